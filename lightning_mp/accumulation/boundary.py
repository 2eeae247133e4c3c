"""What waits for the end of an accumulation window, for the time of one ``fit``."""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.optim import Optimizer

from lightning_mp.accumulation.across_epochs import CarryOverEpochs, another_epoch_follows
from lightning_mp.accumulation.declined_batch import DeclinedBatches
from lightning_mp.core import private_loop_api
from lightning_mp.core.messages import lightning_logger
from lightning_mp.core.patches import Patches
from lightning_mp.gradients.sync import Sync, gradient_sync
from lightning_mp.optimizer_step.closures import cannot_do_without_its_closure
from lightning_mp.optimizer_step.outcome import StepOutcomeDispatcher
from lightning_mp.optimizer_step.scheduler_frequency import LearningRateFrequency

__all__ = ["DeferredCheckpoints", "AccumulationBoundary", "refuse_repeated_losses", "repeated_losses"]


def refuse_repeated_losses(trainer: "pl.Trainer") -> None:
    """Refuses an optimizer that is known to evaluate the loss several times in one step.

    Raises:
        MisconfigurationException: with LBFGS, or an optimizer whose ``step`` must be given a closure.
    """
    for optimizer in trainer.optimizers:
        if cannot_do_without_its_closure(optimizer):
            raise repeated_losses([optimizer])


def repeated_losses(optimizers: Sequence[Optimizer]) -> MisconfigurationException:
    """The refusal of optimizers that evaluate the loss several times in one step; of others, once they do."""
    names = " and ".join(dict.fromkeys(type(optimizer).__name__ for optimizer in optimizers))
    return MisconfigurationException(
        f"AccumulationScheduler, ChinchillaBudget, MFUMonitor and TokenLearningRate cannot be used with {names}, which"
        " evaluates the loss several times in one step: tokens and windows would be counted more than once. Use another"
        " optimizer, or remove those of them that are among the callbacks."
    )


class _EndOfWindow(int):
    """A number of steps that was not requested, which says so where Lightning prints it."""

    def __repr__(self) -> str:
        return "the end of the accumulation window"


class _StopAtTheEnd(logging.Filter):
    """Rewords Lightning's message about ``min_steps`` when a run is told to stop inside a window."""

    def __init__(self, trainer: "pl.Trainer") -> None:
        super().__init__()
        self._trainer = trainer

    def filter(self, record: logging.LogRecord) -> bool:
        """Lets everything through."""
        has_epochs = not self._trainer.min_epochs or self._trainer.current_epoch >= self._trainer.min_epochs
        if has_epochs and f"min_steps={_EndOfWindow()!r}" in str(record.msg):
            record.msg = "The Trainer was told to stop; it will stop at the end of the accumulation window."
        return True


class AccumulationBoundary:
    """Reductions of sharded gradients, checkpoints, the end of the run, and the frequency of learning-rate schedulers.

    Args:
        trainer: after its strategy was set up.
        pl_module: its module.
        sync: when sharded gradients are reduced.
        is_open: whether a window is open after a micro-batch.
        close: called when the open window was closed between two micro-batches.
        checkpoints_wait: ``ModelCheckpoint`` writes at the ends of windows only.
        carries_over: windows may go on in the next epoch.
    """

    def __init__(
        self,
        trainer: "pl.Trainer",
        pl_module: "pl.LightningModule",
        sync: Sync,
        is_open: Callable[[], bool],
        close: Callable[[], None],
        *,
        checkpoints_wait: bool,
        carries_over: bool = False,
    ) -> None:
        self._trainer = trainer
        self._min_steps = private_loop_api.min_steps_of(trainer)
        self._reductions = gradient_sync(trainer, trainer.strategy.model or pl_module, sync)
        if checkpoints_wait:
            DeferredCheckpoints(trainer, is_open).attach()
        self._carry_over = CarryOverEpochs(trainer, pl_module, is_open) if carries_over else None
        self._frequency: LearningRateFrequency | None = None
        DeclinedBatches(trainer, pl_module, is_open, self._goes_on, close)
        self._wording = _StopAtTheEnd(trainer)
        self._logger = lightning_logger()
        self._logger.addFilter(self._wording)

    def start(self) -> None:
        """Training starts: by now every monitor is there. With outcomes, skipped steps do not count."""
        if StepOutcomeDispatcher.of(self._trainer) is None:
            self._frequency = LearningRateFrequency(self._trainer, lambda: 0).attach()

    def before_step(self) -> None:
        """An optimizer is about to step; a fit may have been given other schedulers since the last one."""
        if self._frequency is not None:
            self._frequency.attach()

    def begin(self, *, closes: bool, last_of_epoch: bool = False) -> None:
        """A micro-batch begins; ``closes`` if the optimizer steps after it."""
        if self._carry_over is not None and last_of_epoch and not closes:
            self._carry_over.hide()
        self._reductions.end()  # of a micro-batch that was declined
        # Lightning leaves the loop after any micro-batch once `should_stop` is set, but not before `min_steps`.
        end = self._trainer.global_step + 1
        is_asked_for = closes or (self._min_steps is not None and self._min_steps >= end)
        private_loop_api.set_min_steps(self._trainer, self._min_steps if is_asked_for else _EndOfWindow(end))
        self._reductions.begin(closes=closes)

    def _goes_on(self) -> bool:
        return self._carry_over is not None and another_epoch_follows(self._trainer)

    def end(self) -> None:
        """The micro-batch is over."""
        self._reductions.end()
        if self._carry_over is not None:
            self._carry_over.show()

    def settle_outcome(self) -> None:
        """Makes sure that it is known whether the last step was skipped."""
        dispatcher = StepOutcomeDispatcher.of(self._trainer)
        if dispatcher is not None:
            dispatcher.settle()

    def detach(self) -> None:
        """Leaves everything as it was."""
        self._logger.removeFilter(self._wording)
        private_loop_api.set_min_steps(self._trainer, self._min_steps)
        self._reductions.detach()
        if self._carry_over is not None:
            self._carry_over.detach()
        if self._frequency is not None:
            self._frequency.detach()


class DeferredCheckpoints:
    """Keeps every ``ModelCheckpoint`` of a Trainer from writing inside an open window, whose gradient is in no file.

    A checkpoint that comes due there (a time interval, a validation in the middle, the first micro-batch after a
    resume) is written after the window's optimizer step, with the metrics it was to be judged by. Where it is judged by
    a metric, these are not those of the weights in the file, which is said once. A checkpoint of weights alone has no
    gradient to lose, and is written at once. All hooks are public and wrapped on the instance for the time of one
    ``fit``.

    Args:
        trainer: its checkpoint callbacks are held.
        is_open: whether a window is open after this micro-batch.
    """

    def __init__(self, trainer: "pl.Trainer", is_open: Callable[[], bool]) -> None:
        self._trainer = trainer
        self._is_open = is_open
        self._has_told = False

    def attach(self) -> None:
        """Starts holding."""
        for callback in self._trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint) and not callback.save_weights_only:
                self._hold(callback)

    def _hold(self, checkpoint: ModelCheckpoint) -> None:
        postponed = epoch_postponed = False

        def on_train_batch_end(trainer: "pl.Trainer", pl_module: "pl.LightningModule", *args: Any, **kw: Any) -> None:
            nonlocal postponed, epoch_postponed
            if self._is_open():
                return
            batch_end.original(trainer, pl_module, *args, **kw)
            if postponed:
                postponed = False
                validation_end.original(trainer, pl_module)
            if epoch_postponed:
                epoch_postponed = False
                epoch_end.original(trainer, pl_module)

        def on_validation_end(trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
            nonlocal postponed
            if self._is_open():
                postponed = True
                self._tell(checkpoint)
            else:
                validation_end.original(trainer, pl_module)

        def on_train_epoch_end(trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
            nonlocal epoch_postponed
            if self._is_open():
                epoch_postponed = True
            else:
                epoch_end.original(trainer, pl_module)

        patches = Patches.of(self._trainer)
        batch_end = patches.replace(checkpoint, "on_train_batch_end", on_train_batch_end)
        validation_end = patches.replace(checkpoint, "on_validation_end", on_validation_end)
        epoch_end = patches.replace(checkpoint, "on_train_epoch_end", on_train_epoch_end)

    def _tell(self, checkpoint: ModelCheckpoint) -> None:
        if checkpoint.monitor is None or self._trainer.sanity_checking or self._has_told:
            return
        self._has_told = True
        rank_zero_warn(
            f"ModelCheckpoint(monitor={checkpoint.monitor!r}): validation came inside an accumulation window, and the"
            " checkpoint is written at its end, so the file contains weights from one optimizer step after those that"
            " were validated. Validate at the ends of windows (val_check_interval a multiple of the micro-batches per"
            " step), save_weights_only=True, or use AccumulationScheduler(save_partial_gradients=True)."
        )
