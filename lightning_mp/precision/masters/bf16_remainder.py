"""A float32 number as a bfloat16 number and the 16 bits that it lacks.

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

References:
    The idea is that of ``store_param_remainders`` in NVIDIA's Transformer Engine,
    https://github.com/NVIDIA/TransformerEngine, there for its own Adam on CUDA.
"""

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


def join(working: Tensor, remainder: Tensor) -> Tensor:
    """The float32 numbers that :func:`split` took apart.

    If the bf16 number was changed since, the result is a number that still rounds to it: what is left of the old
    remainder is less than half its last bit.
    """
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
class RemainderBlock:
    """Remainders of many weights in one memory, joined and split by few kernels: to the bit what is done to one tensor.

    That holds for weights that are what was split last, or that are not zero.
    """

    def __init__(self, parameters: Sequence[Tensor], weights: Sequence[Tensor]) -> None:
        self.parameters = list(parameters)
        self._places = []
        end = 0
        for weight in weights:
            # Dense memory in whatever order; `empty_like` of anything else is contiguous.
            self._places.append((weight.shape, torch.empty_like(weight, device="meta").stride(), end))
            end += padded(weight.numel())
        self._remainders = torch.zeros(end, dtype=torch.int16, device=weights[0].device)
        self._high = torch.tensor([1 << 16], dtype=torch.int32, device=weights[0].device)
        self._masters: Tensor | None = None

    @property
    def remainders(self) -> list[Tensor]:
        """int16, of each weight."""
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
        self._masters = torch.addcmul(self._remainders, high.view(torch.int16), self._high).view(torch.float32)
        return self._parts(self._masters)

    def split(self, weights: Sequence[Tensor], masters: Sequence[Tensor]) -> None:
        """Keeps the remainders of masters, and writes the weights."""
        assert self._masters is not None
        room = self._parts(self._masters)
        for own, master in zip(room, masters, strict=True):
            if own.data_ptr() != master.data_ptr():
                own.copy_(master)
        # The lower half of a number comes first in memory.
        self._remainders.copy_(self._masters.view(torch.int16)[::2])
        self._masters.view(torch.int32).bitwise_or_(self._remainders.view(torch.uint8)[1::2])
        private_api.foreach_copy_(weights, room)
        self._masters = None

    def _parts(self, flat: Tensor) -> list[Tensor]:
        return [flat.as_strided(*place) for place in self._places]
