"""One accumulation window as Lightning sees it: the value of ``trainer.accumulate_grad_batches``."""

import math
from collections.abc import Callable, Mapping
from typing import Any, Self

from typing_extensions import override

from lightning_mp.ground.core.modulo_override import ModuloOverride

#: Gives the optimizer steps of a run; None if they are not known.
TotalSteps = Callable[[], int | None]


class _StepsPerEpoch(int):
    """Answers ``steps_per_epoch * epochs``, of which the true number is no multiple."""

    _total: TotalSteps

    @override
    def __mul__(self, epochs: int) -> int:
        total = self._total()
        return int(self) * epochs if total is None else total


class _MeanStepsPerEpoch(float):
    _total: TotalSteps

    @override
    def __ceil__(self) -> int:
        steps = _StepsPerEpoch(math.ceil(float(self)))
        steps._total = self._total
        return steps


class AccumulateGradBatches(ModuloOverride):
    """A number of micro-batches, with answers of the accumulation controller to what Lightning computes by it.

    Lightning evaluates two conditions by modulo: ``batch_idx % N == 0`` (set the gradients to zero?) and
    ``(batch_idx + 1) % N == 0`` (make the optimizer step?), which ``remainders`` answers. It computes the steps of a
    run as ``ceil(batches / N) * epochs`` with the ``N`` of that moment, which ``total`` answers, where it knows it.
    Python lets the right operand answer if its class is a subclass of the left one's. For everything else it is the
    plain number ``N``, by which Lightning divides the loss.

    >>> window = AccumulateGradBatches(4, {6: 0, 7: 1}, lambda: 18)
    >>> 6 % window, 7 % window, 12 / window, window + 1, math.ceil(20 / window) * 2
    (0, 1, 3.0, 5, 18)
    """

    _remainders: Mapping[int, int]
    _total: TotalSteps | None

    def __new__(
        cls, micro_batches: int, remainders: Mapping[int, int] | None = None, total: TotalSteps | None = None
    ) -> Self:
        """Makes the number; an ``int`` is complete before ``__init__`` could see it."""
        window = super().__new__(cls, micro_batches)
        window._remainders, window._total = remainders or {}, total
        return window

    @override
    def __rmod__(self, value: int) -> int:
        return self._remainders.get(value, value % int(self))

    @override
    def __rtruediv__(self, value: Any) -> Any:
        quotient = super().__rtruediv__(value)
        if self._total is None or not isinstance(value, int):
            return quotient
        mean = _MeanStepsPerEpoch(quotient)
        mean._total = self._total
        return mean
