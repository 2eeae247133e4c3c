"""float32 numbers as bfloat16 numbers and the 16 bits that these lack, or 8 of them.

bfloat16 is the upper half of float32. With the lower half beside it, a bf16 number is the float32 number to the last
bit, in 2 + 2 bytes instead of 2 + 4.

.. code-block:: text

    m     = bits of |x|
    high  = (m + 0x8000) >> 16        rounds to nearest, ties away from zero
    rest  = m - (high << 16)          in [-0x8000, 0x7fff]: 16 bits
    |x|   = (high << 16) + rest

The rest of a tie, 0x8000 of 16 bits, is negative, so ties go away from zero: to even, they would need 17 bits. All
other numbers round as ``x.to(torch.bfloat16)`` does. Finite numbers, both zeros and both infinities return to the bit,
subnormal numbers too; a nan returns as a nan.

In 2 + 1 bytes, ``m`` is first rounded to a multiple of 256: 1 sign bit, 8 of the exponent and 15 of the fraction. The
rest is then a multiple of 256, too, and is kept divided by it. Rounding is stochastic: a number between two neighbours
becomes either, the more often the nearer it is, so that updates that are smaller than their distance add up. To
nearest, a weight of 1 would never take an update below 2^-16, which is a learning rate of 1.5e-5 with Adam. Which it is
depends on the number and the step alone: a step that is made again, on another rank or after a resume, rounds equally.
The error is below the last bit that is kept: 2^-15 times the power of two below the number, 2^-141 for subnormal
numbers. Numbers of 24 bits stay as they are. Finite numbers within that error of infinity may become infinite.

References:
    The idea is that of ``store_param_remainders`` in NVIDIA's Transformer Engine,
    https://github.com/NVIDIA/TransformerEngine, there for its own Adam on CUDA.
    Stochastic rounding: Gupta et al., "Deep Learning with Limited Numerical Precision", 2015, section 3,
    https://arxiv.org/abs/1502.02551
"""

import random

import torch
from torch import Tensor

# Odd, so that its multiples have all values; those of neighbours differ much (Knuth, volume 3, section 6.4).
_GOLDEN_RATIO = 0x9E37 - (1 << 16)


def _noise(low: Tensor, step: int) -> Tensor:
    """int16 whose upper byte is uniform over steps, and over the lower halves of a step."""
    # Not a plain multiple of the step: with equal updates in each step, rounding would repeat with a period.
    offset = torch.tensor(random.Random(step).getrandbits(16) - 0x8000, dtype=torch.int16)
    return torch.add(offset, low, alpha=_GOLDEN_RATIO)


# What is read and written, in bytes per number:
#
#     join:    zeros have no rest below zero     3 + 3 + 3 + 5
#              (high << 16) + rest               2 + 2 + 4
#     split:   the lower half is the rest        2 + 2
#              ties are moved up by a last bit   4 + 1 + 4      so that rounding to even rounds away from zero
#              rounded                           4 + 2
#
# and where the rest has 8 bits:
#
#     join:    zeros have no rest below zero     3 + 2 + 3 + 3
#              (high << 8) + rest                2 + 1 + 4
#              the sum << 8                      4 + 4
#     split:   noise                             2 + 2
#              lower half + noise                2 + 1 + 2
#              its upper byte is the rest        1 + 1
#              what it carries is moved up       2 + 1 + 2      by bits of the rest, which is zero where none are
#              rounded                           4 + 2
class SplitNumbers:
    """Room for many split float32 numbers, which few kernels join and split, or a range of them.

    Args:
        numel: how many numbers there is room for.
        rest_dtype: ``torch.int16``, which is exact, or ``torch.int8``.
        device: where.

    Example:
        >>> import torch
        >>> split = SplitNumbers(2, torch.int16, torch.device("cpu"))
        >>> split.split(torch.tensor([1.0, 1.001]), 0, step=0)
        >>> split.high.tolist(), split.rest.tolist()
        ([1.0, 1.0], [0, 8389])
        >>> split.join(0, 2)
        tensor([1.0000, 1.0010])

        In 8 bits 1 + 2^-17, a quarter of the distance to the next number, becomes 1 or 1 + 2^-15:

        >>> split = SplitNumbers(1, torch.int8, torch.device("cpu"))
        >>> joined = []
        >>> for step in range(8):
        ...     split.split(torch.tensor([1 + 2**-17]), 0, step)
        ...     joined.append((split.join(0, 1).item() - 1) * 2**15)
        >>> joined
        [1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0]
    """

    def __init__(self, numel: int, rest_dtype: torch.dtype, device: torch.device) -> None:
        self.high = torch.zeros(numel, dtype=torch.bfloat16, device=device)
        self.rest = torch.zeros(numel, dtype=rest_dtype, device=device)
        # Of one dimension: kernels then promote the 16 bits that it multiplies to 32.
        self._unit = torch.tensor([1 << 8 * rest_dtype.itemsize], dtype=torch.int32, device=device)

    def join(self, start: int, end: int) -> Tensor:
        """The float32 numbers of a range, in new memory.

        A bf16 number that other code has changed since keeps its rest, which is less than half its last bit.
        """
        high, rest = self.high[start:end], self.rest[start:end]
        # No number is split like this, but a zero that other code has written would be a nan.
        rest.masked_fill_((high == 0).logical_and_(rest < 0), 0)
        bits = torch.addcmul(rest, high.view(torch.int16), self._unit)
        if self.rest.dtype == torch.int8:
            bits.bitwise_left_shift_(8)
        return bits.view(torch.float32)

    def split(self, numbers: Tensor, start: int, step: int) -> None:
        """Writes float32 numbers, in a dense row, to a range that begins at ``start``; they are garbage afterwards.

        ``step`` is how many steps were taken so far; rounding to 24 bits depends on it.
        """
        end = start + numbers.numel()
        rest = self.rest[start:end]
        # The lower half of a number comes first in memory.
        bits, low = numbers.view(torch.int32), numbers.view(torch.int16)[::2]
        if rest.dtype == torch.int16:
            rest.copy_(low)
            bits.bitwise_or_(rest.view(torch.uint8)[1::2])
        else:
            rounded = low + _noise(low, step).view(torch.uint8)[1::2]
            rest.copy_(rounded.view(torch.int8)[1::2])
            low.bitwise_or_(rest)
        self.high[start:end].copy_(numbers)
