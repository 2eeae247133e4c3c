"""A float32 number as a bfloat16 number and the 16 bits that it lacks, or 8 of them.

bfloat16 is the upper half of float32. If the lower half is kept beside a bf16 weight, the pair is the float32 number to
the last bit, in 4 bytes instead of 2 + 4.

.. code-block:: text

    m          = bits of |x|                      (x is nan: bits of the canonical nan)
    high       = (m + 0x8000) >> 16               rounds to nearest, ties away from zero
    remainder  = m - (high << 16)                 in [-0x8000, 0x7fff]: 16 bits
    |x|        = (high << 16) + remainder

Every finite number, both zeros and both infinities come back to the bit, subnormal numbers too. Of a nan only the sign
survives: its payload does not fit, and CUDA's own nan, 0x7fffffff, would round to -0.0. The bf16 number differs from
what ``x.to(torch.bfloat16)`` gives (ties to even) at ties only.

In 3 bytes, ``m`` is first rounded to a multiple of 256 (:func:`round_to_24_bits`): 1 sign bit, 8 of the exponent and 15
of the fraction. The remainder is then a multiple of 256, too, and is kept divided by it, in [-0x80, 0x7f]: 8 bits. A
tie between two weights is now one of 256 numbers, and cannot go to even: 257 numbers would have the same even weight.

References:
    The idea is that of ``store_param_remainders`` in NVIDIA's Transformer Engine,
    https://github.com/NVIDIA/TransformerEngine, there for its own Adam on CUDA.
    Stochastic rounding: Gupta et al., "Deep Learning with Limited Numerical Precision", 2015, section 3,
    https://arxiv.org/abs/1502.02551
"""

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_mp.core import private_api
from lightning_mp.gradients.step_blocks import padded

_MAGNITUDE = 0x7FFFFFFF
_INFINITY = 0x7F800000
_NAN = 0x7FC00000
_SIGN = -0x80000000
_HALF = 0x8000
_LOW_BYTE = 0xFF
# Odd, so that its multiples have all values; those of neighbours differ much (Knuth, volume 3, section 6.4).
_GOLDEN_RATIO = 0x9E37 - (1 << 16)


def split(master: Tensor) -> tuple[Tensor, Tensor]:
    """The bf16 number nearest to each float32 number, and what it lacks.

    Example:
        >>> import torch
        >>> high, remainder = split(torch.tensor([1.0, 1.001]))
        >>> high.tolist(), remainder.tolist()
        ([1.0, 1.0], [0, 8389])
        >>> join(high, remainder)
        tensor([1.0000, 1.0010])
    """
    bits = master.view(torch.int32)
    magnitude = bits & _MAGNITUDE
    magnitude.masked_fill_(magnitude > _INFINITY, _NAN)
    high = (magnitude + _HALF).bitwise_right_shift_(16)
    remainder = magnitude.sub_(high << 16).to(torch.int16)
    high.bitwise_or_((bits >> 16).bitwise_and_(_HALF))
    return high.to(torch.int16).view(torch.bfloat16), remainder


def _noise(low: Tensor, step: int) -> Tensor:
    """int16 whose upper byte is uniform over steps, and over the lower halves of a step."""
    # Not a plain multiple of the step: with updates that are alike in each step it would be in or out of time.
    offset = torch.tensor(random.Random(step).getrandbits(16) - _HALF, dtype=torch.int16)
    return torch.add(offset, low, alpha=_GOLDEN_RATIO)


def round_to_24_bits(master: Tensor, step: int) -> Tensor:
    """float32 numbers with 15 instead of 23 bits of fraction, stochastically rounded.

    A number between two neighbours becomes either, the more often the nearer it is, so that updates that are smaller
    than their distance add up. To nearest, a weight of 1 would never take an update below 2^-16, which is a learning
    rate of 1.5e-5 with Adam. Which it is depends on the number and the step alone: a step that is made again, on
    another rank or after a resume, rounds alike.

    The error is below the last bit that is kept: 2^-15 times the power of two below the number, 2^-141 for subnormal
    numbers. A number that has 24 bits stays; so do both zeros and both infinities. Finite numbers within that error of
    infinity may become infinite, as their bf16 weights are. Of a nan the sign survives.

    Example:
        >>> import torch
        >>> master = torch.tensor([1.0, 1 + 2**-17])  # a quarter of the distance to the next number
        >>> rounded = torch.stack([round_to_24_bits(master, step) for step in range(8)])
        >>> (rounded - 1).mul(2**15).int().T.tolist()
        [[0, 0, 0, 0, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0, 1, 0]]
    """
    bits = master.view(torch.int32)
    magnitude = bits & _MAGNITUDE
    noise = _noise(bits.to(torch.int16), step)
    magnitude.add_((noise >> 8).bitwise_and_(_LOW_BYTE)).bitwise_and_(~_LOW_BYTE)
    magnitude.masked_fill_(master.isnan(), _NAN)
    return magnitude.bitwise_or_(bits & _SIGN).view(torch.float32)


def split_24_bits(master: Tensor, step: int) -> tuple[Tensor, Tensor]:
    """The same of a master that is rounded to 24 bits (:func:`round_to_24_bits`); 8 bits are left.

    Example:
        >>> import torch
        >>> high, remainder = split_24_bits(torch.tensor([1.0, 1.0009765625]), step=0)
        >>> high.tolist(), remainder.tolist()
        ([1.0, 1.0], [0, 32])
    """
    high, remainder = split(round_to_24_bits(master, step))
    return high, (remainder >> 8).to(torch.int8)


def join(working: Tensor, remainder: Tensor) -> Tensor:
    """The float32 numbers that :func:`split`, or :func:`split_24_bits`, took apart.

    If the bf16 number was changed since, the result is a number that still rounds to it: what is left of the old
    remainder is less than half its last bit.
    """
    if remainder.dtype == torch.int8:
        remainder = remainder.to(torch.int16) << 8
    high = working.view(torch.int16).to(torch.int32)
    magnitude = (high & (_MAGNITUDE >> 16)).bitwise_left_shift_(16).add_(remainder)
    # Below zero only if the weight was set to zero from outside; without the limit that would be a nan.
    magnitude.clamp_(0, _NAN)
    return magnitude.bitwise_or_(high.bitwise_and_(_SIGN)).view(torch.float32)


# What `RemainderBlock` reads and writes, in bytes per parameter:
#
#     join:    weights, one behind the other     2 + 2
#              (weight << 16) + remainder        2 + 2 + 4
#     split:   the lower half is the remainder   2 + 2
#              ties are moved up by a last bit   4 + 1 + 4      so that rounding to even rounds away from zero
#              weights, rounded                  4 + 2
#
# and where the remainder has 8 bits:
#
#     join:    (weight << 8) + remainder         2 + 1 + 4
#              the sum << 8                      4 + 4
#     split:   noise                             2 + 2
#              lower half + noise                2 + 1 + 2
#              its upper byte is the remainder   1 + 1
#              what it carries is moved up       2 + 1 + 2      by bits of the remainder, which is zero where none are
class RemainderBlock:
    """Remainders of many weights in one memory, joined and split by few kernels: to the bit what is done to one tensor.

    That holds for weights that are what was split last, or that are not zero. Remainders are int16, or int8.
    """

    def __init__(self, parameters: Sequence[Tensor], weights: Sequence[Tensor], dtype: torch.dtype) -> None:
        self.parameters = list(parameters)
        self._places = []
        end = 0
        for weight in weights:
            # Dense memory in whatever order; `empty_like` of anything else is contiguous.
            self._places.append((weight.shape, torch.empty_like(weight, device="meta").stride(), end))
            end += padded(weight.numel())
        self._remainders = torch.zeros(end, dtype=dtype, device=weights[0].device)
        self._high = torch.tensor([1 << 8 * dtype.itemsize], dtype=torch.int32, device=weights[0].device)
        self._masters: Tensor | None = None

    @property
    def remainders(self) -> list[Tensor]:
        """Of each weight."""
        return self._parts(self._remainders)

    @property
    def is_lent(self) -> bool:
        """Whether masters were joined and not split since."""
        return self._masters is not None

    def holds(self, parameters: Sequence[Tensor]) -> bool:
        """Whether it is made of exactly these, in this order."""
        return len(parameters) == len(self.parameters) and all(
            a is b for a, b in zip(parameters, self.parameters, strict=True)
        )

    def join(self, weights: Sequence[Tensor]) -> list[Tensor]:
        """fp32 masters of the weights, in memory that lives until :meth:`split`."""
        high = torch.empty_like(self._remainders, dtype=torch.bfloat16)
        private_api.foreach_copy_(self._parts(high), weights)
        bits = torch.addcmul(self._remainders, high.view(torch.int16), self._high)
        if self._remainders.dtype == torch.int8:
            bits.bitwise_left_shift_(8)
        self._masters = bits.view(torch.float32)
        return self._parts(self._masters)

    def split(self, weights: Sequence[Tensor], masters: Sequence[Tensor], step: int) -> None:
        """Keeps the remainders of masters, and writes the weights."""
        assert self._masters is not None
        room = self._parts(self._masters)
        for own, master in zip(room, masters, strict=True):
            if own.data_ptr() != master.data_ptr():
                own.copy_(master)
        # The lower half of a number comes first in memory.
        bits, low = self._masters.view(torch.int32), self._masters.view(torch.int16)[::2]
        if self._remainders.dtype == torch.int16:
            self._remainders.copy_(low)
            bits.bitwise_or_(self._remainders.view(torch.uint8)[1::2])
        else:
            rounded = low + _noise(low, step).view(torch.uint8)[1::2]
            self._remainders.copy_(rounded.view(torch.int8)[1::2])
            low.bitwise_or_(self._remainders)
        private_api.foreach_copy_(weights, room)
        self._masters = None

    def _parts(self, flat: Tensor) -> list[Tensor]:
        return [flat.as_strided(*place) for place in self._places]
