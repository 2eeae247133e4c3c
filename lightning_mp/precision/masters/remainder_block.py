"""The remainders of many bf16 weights in one memory, joined with the weights and split again by few kernels.

Bytes per parameter, read and written:

.. code-block:: text

    join:    weights, one behind the other     2 + 2
             (weight << 16) + remainder        2 + 2 + 4
    split:   the lower half is the remainder   2 + 2
             ties are moved up by a last bit   4 + 1 + 4      so that rounding to even rounds away from zero
             weights, rounded                  4 + 2

It is what :mod:`~lightning_mp.precision.masters.bf16_remainder` does to the numbers of one tensor, to the bit, for
weights that are what was split last, or that are not zero.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_mp.core import private_api
from lightning_mp.gradients.step_blocks import padded


class RemainderBlock:
    """Room for the remainders of some weights, and for their fp32 masters while these are lent."""

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
