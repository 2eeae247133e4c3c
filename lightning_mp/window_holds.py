"""What waits for the end of an accumulation window, for the time of one ``fit``."""

from collections.abc import Callable

import lightning.pytorch as pl

from lightning_mp.checkpoint_hold import CheckpointHold
from lightning_mp.gradient_sync import Sync, gradient_sync
from lightning_mp.learning_rate_frequency import LearningRateFrequency
from lightning_mp.outcome import StepDispatcher
from lightning_mp.straddled_epochs import StraddledEpochs

__all__ = ["WindowHolds"]


class WindowHolds:
    """Reductions of sharded gradients, checkpoints, the end of the run, and the frequency of learning-rate schedulers.

    Args:
        trainer: after its strategy was set up.
        pl_module: its module.
        sync: when sharded gradients are reduced.
        is_open: whether a window is open after a micro-batch.
        checkpoints_wait: ``ModelCheckpoint`` writes at the ends of windows only.
        straddles_epochs: windows may go on in the next epoch.
    """

    def __init__(
        self,
        trainer: "pl.Trainer",
        pl_module: "pl.LightningModule",
        sync: Sync,
        is_open: Callable[[], bool],
        *,
        checkpoints_wait: bool,
        straddles_epochs: bool = False,
    ) -> None:
        self._trainer = trainer
        self._min_steps = trainer.fit_loop.epoch_loop.min_steps
        self._reductions = gradient_sync(trainer, trainer.strategy.model or pl_module, sync)
        self._checkpoints = CheckpointHold(trainer, is_open).attach() if checkpoints_wait else None
        self._straddled = StraddledEpochs(trainer, pl_module, is_open) if straddles_epochs else None
        self._frequency: LearningRateFrequency | None = None

    def start(self) -> None:
        """Training starts: by now every monitor is there. With outcomes, skipped steps do not count."""
        if StepDispatcher.of(self._trainer) is None:
            self._frequency = LearningRateFrequency(self._trainer, lambda: 0).attach()

    def begin(self, *, closes: bool, last_of_epoch: bool = False) -> None:
        """A micro-batch begins; ``closes`` if the optimizer steps after it."""
        if self._straddled is not None and last_of_epoch and not closes:
            self._straddled.hide()
        # Lightning leaves the loop after any micro-batch once `should_stop` is set, but not before `min_steps`.
        self._trainer.fit_loop.epoch_loop.min_steps = self._min_steps if closes else self._trainer.global_step + 1
        self._reductions.begin(closes=closes)

    def end(self) -> None:
        """The micro-batch is over."""
        self._reductions.end()
        if self._straddled is not None:
            self._straddled.show()

    def settle_outcome(self) -> None:
        """Makes sure that it is known whether the last step was skipped."""
        dispatcher = StepDispatcher.of(self._trainer)
        if dispatcher is not None:
            dispatcher.settle()

    def detach(self) -> None:
        """Leaves everything as it was."""
        self._trainer.fit_loop.epoch_loop.min_steps = self._min_steps
        self._reductions.detach()
        if self._straddled is not None:
            self._straddled.detach()
        if self._checkpoints is not None:
            self._checkpoints.detach()
        if self._frequency is not None:
            self._frequency.detach()
