"""One accumulation window as Lightning sees it: the value of ``trainer.accumulate_grad_batches``."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import lightning.pytorch as pl
from typing_extensions import override

from lightning_mp.accumulation.schedule import Progress, Unit
from lightning_mp.core.modulo_override import ModuloOverride


class _StepsPerEpoch(int):
    """Answers ``steps_per_epoch * epochs``, of which the true number is no multiple."""

    _total: Callable[[], int | None]

    @override
    def __mul__(self, epochs: int) -> int:
        total = self._total()
        return int(self) * epochs if total is None else total


class _MeanStepsPerEpoch(float):
    _total: Callable[[], int | None]

    @override
    def __ceil__(self) -> int:
        steps = _StepsPerEpoch(math.ceil(float(self)))
        steps._total = self._total
        return steps


class ScheduledWindows(ModuloOverride):
    """A number of micro-batches by which ``trainer.estimated_stepping_batches`` finds the steps of a whole schedule.

    Lightning computes ``ceil(batches / N) * epochs`` with the ``N`` of that moment. Python lets the right
    operand answer the division if its class is a subclass of the left one's.

    >>> windows = ScheduledWindows(1, lambda: 18)
    >>> math.ceil(20 / windows) * 2, 20 / windows, windows + 1
    (18, 20.0, 2)
    """

    _total: Callable[[], int | None] | None = None

    def __new__(cls, micro_batches: int, total: Callable[[], int | None] | None = None) -> Self:
        """Makes the number; an ``int`` is complete before ``__init__`` could see it."""
        number = super().__new__(cls, micro_batches)
        number._total = total
        return number

    @override
    def __rtruediv__(self, value: Any) -> Any:
        quotient = super().__rtruediv__(value)
        if self._total is None or not isinstance(value, int):
            return quotient
        mean = _MeanStepsPerEpoch(quotient)
        mean._total = self._total
        return mean


class AccumulateGradBatches(ScheduledWindows):
    """The value of ``trainer.accumulate_grad_batches`` for one micro-batch.

    Lightning evaluates two conditions by modulo: ``batch_idx % N == 0`` (set the gradients to zero?) and
    ``(batch_idx + 1) % N == 0`` (make the optimizer step?). Python lets the right operand answer if its class is a
    subclass of the left one's, so the answers come from the controller. For everything else it is the plain number
    ``N``, by which Lightning divides the loss.

    In a ``training_step(dataloader_iter)`` Lightning 2.6 evaluates the first one with the index of the previous batch,
    and so clears the gradient of each window's first micro-batch; the second one with ``num_ready``.

    >>> window = AccumulateGradBatches(4, batch_idx=6, opens=True, closes=False)
    >>> 6 % window, 7 % window, 12 / window
    (0, 1, 3.0)
    """

    _batch_idx: int
    _num_ready: int
    _opens: bool
    _closes: bool

    def __new__(
        cls,
        micro_batches: int,
        *,
        batch_idx: int,
        opens: bool,
        closes: bool,
        num_ready: int | None = None,
        total: Callable[[], int | None] | None = None,
    ) -> Self:
        """Makes the number; an ``int`` is complete before ``__init__`` could see it."""
        window = super().__new__(cls, micro_batches, total)
        window._batch_idx = batch_idx
        window._num_ready = batch_idx + 1 if num_ready is None else num_ready
        window._opens = opens
        window._closes = closes
        return window

    @override
    def __rmod__(self, value: int) -> int:
        if value == self._batch_idx:
            return int(not self._opens)
        if value == self._num_ready:
            return int(not self._closes)
        return value % int(self)


@dataclass(frozen=True)
class LightningWindows:
    """The schedule of Lightning itself: ``trainer.accumulate_grad_batches``, from any source."""

    has_target: ClassVar[bool] = False

    trainer: "pl.Trainer"

    @property
    def units(self) -> frozenset[Unit]:
        """Nothing is counted."""
        return frozenset()

    def micro_batches(self, progress: Progress) -> int:
        """Length of the window that opens now."""
        return int(self.trainer.accumulate_grad_batches)
