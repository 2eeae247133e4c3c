"""What is deferred to the end of an accumulation window, during one ``fit``."""

from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.optim import Optimizer

from lightning_mp.ground.core import private_loop_api
from lightning_mp.ground.core.patches import Patch, Patches
from lightning_mp.training.accumulation.accumulate_grad_batches import AccumulateGradBatches
from lightning_mp.training.accumulation.partial_state import mean_over_ranks, why_gradients_are_elsewhere
from lightning_mp.training.accumulation.settings import AccumulationSettings
from lightning_mp.training.gradients.sync import gradient_sync
from lightning_mp.training.optimizer_step.gradient_observers import overrides


def repeated_losses(optimizers: Sequence[Optimizer]) -> MisconfigurationException:
    """The refusal of optimizers that evaluate the loss several times in one step; of others, once they do."""
    names = " and ".join(dict.fromkeys(type(optimizer).__name__ for optimizer in optimizers))
    return MisconfigurationException(
        f"AccumulationScheduler, ChinchillaBudget, MFUMonitor and TokenLearningRate cannot be used with {names}, which"
        " evaluates the loss several times per step: tokens and windows would be counted more than once. Use another"
        " optimizer, or remove these callbacks."
    )


class AccumulationBoundary:
    """Reductions of sharded gradients, checkpoints, the end of the run, and windows that continue in the next epoch.

    Lightning steps with the last micro-batch of every epoch. While that runs in a window that stays open, the epoch is
    made to look endless. When it is over the epoch ends as always: schedulers that count epochs step, validation runs,
    ``on_train_epoch_end`` is called. Two things that Lightning does there, in the belief that a step was made, are held
    back: it zeroes the gradients for validation, and it counts a step for the x axis of loggers.
    """

    def __init__(
        self,
        trainer: "pl.Trainer",
        pl_module: "pl.LightningModule",
        settings: AccumulationSettings,
        is_open: Callable[[], bool],
        close: Callable[[], None],
    ) -> None:
        self._trainer = trainer
        self._loop = trainer.fit_loop.epoch_loop
        self._min_steps = self._loop.min_steps
        self._reductions = gradient_sync(trainer, trainer.strategy.model or pl_module, settings.sync)
        self._hidden_end: tuple[float, bool] | None = None  # of an epoch whose last window stays open
        self.acts_at_ends = self._reductions is not None or settings.carries_over
        if not settings.saves_partial_gradients:
            defer_checkpoints(trainer, is_open)
        if settings.carries_over:
            _refuse_plateaus_by_step(trainer)
            zero_grad = Patches.of(trainer).replace(
                pl_module, "on_validation_model_zero_grad", lambda: None if is_open() else zero_grad.original()
            )
        step_where_batches_are_declined(trainer, pl_module, is_open, close, carries_over=settings.carries_over)
        Patches.of(trainer).at_end(self._detach)

    def begin(self, *, closes: bool, last_of_epoch: bool) -> None:
        """A micro-batch begins; ``closes`` if the optimizer steps after it."""
        if last_of_epoch and not closes:
            self._hidden_end = private_loop_api.replace_end_of_epoch(self._trainer, (float("inf"), False))
        # Lightning leaves the loop after any micro-batch once `should_stop` is set, but not before `min_steps`.
        end = self._trainer.global_step + 1
        is_asked_for = closes or (self._min_steps is not None and self._min_steps >= end)
        self._loop.min_steps = self._min_steps if is_asked_for else end
        if self._reductions is not None:
            self._reductions.end()  # of a micro-batch that was declined
            self._reductions.begin(closes=closes)

    def end(self) -> None:
        """The micro-batch has ended."""
        if self._reductions is not None:
            self._reductions.end()
        if self._hidden_end is not None:
            self._show_end(self._hidden_end)
            self._loop.update_lr_schedulers("epoch", update_plateau_schedulers=False)
            private_loop_api.undo_logged_step(self._trainer)

    def _show_end(self, end: tuple[float, bool]) -> None:
        private_loop_api.replace_end_of_epoch(self._trainer, end)
        self._hidden_end = None

    def _detach(self) -> None:
        self._loop.min_steps = self._min_steps
        if self._reductions is not None:
            self._reductions.detach()
        if self._hidden_end is not None:
            self._show_end(self._hidden_end)


def _refuse_plateaus_by_step(trainer: "pl.Trainer") -> None:
    if any(config.interval == "step" and config.reduce_on_plateau for config in trainer.lr_scheduler_configs):
        raise MisconfigurationException(
            "AccumulationScheduler(carry_over=True) cannot be used with ReduceLROnPlateau at interval='step',"
            " which Lightning steps at the end of every epoch as well. Use interval='epoch', or leave carry_over"
            " out."
        )


def defer_checkpoints(trainer: "pl.Trainer", is_open: Callable[[], bool]) -> None:
    """Keeps every ``ModelCheckpoint`` of a Trainer from writing inside an open window, whose gradient is in no file.

    A checkpoint that comes due there (a time interval, a validation in the middle, the first micro-batch after a
    resume) is written after the window's optimizer step, with the metrics it was to be judged by. Where it is judged by
    a metric, these are not the metrics of the weights in the file; a message says so. A checkpoint of weights
    alone has no gradient to lose, and is written immediately.
    """
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint) and not callback.save_weights_only:
            _defer(callback, Patches.of(trainer), is_open)


def _defer(checkpoint: ModelCheckpoint, patches: Patches, is_open: Callable[[], bool]) -> None:
    postponed: list[Patch] = []

    def on_train_batch_end(trainer: "pl.Trainer", pl_module: "pl.LightningModule", *args: Any, **kw: Any) -> None:
        if is_open():
            return
        batch_end.original(trainer, pl_module, *args, **kw)
        while postponed:
            postponed.pop(0).original(trainer, pl_module)

    def postpone(name: str) -> None:
        def hook(trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
            if not is_open():
                patch.original(trainer, pl_module)
                return
            if patch not in postponed:
                postponed.append(patch)
            if name == "on_validation_end" and checkpoint.monitor is not None and not trainer.sanity_checking:
                rank_zero_warn(
                    f"ModelCheckpoint(monitor={checkpoint.monitor!r}) validated inside an accumulation window and saves"
                    " at its end, one optimizer step later. Make val_check_interval a multiple of the micro-batches per"
                    " step, or use save_weights_only=True or AccumulationScheduler(save_partial_gradients=True)."
                )

        patch = patches.replace(checkpoint, name, hook)

    batch_end = patches.replace(checkpoint, "on_train_batch_end", on_train_batch_end)
    postpone("on_validation_end")
    postpone("on_train_epoch_end")


def another_epoch_follows(trainer: "pl.Trainer") -> bool:
    """Whether this epoch is not the last of ``max_epochs``."""
    return trainer.max_epochs in (None, -1) or trainer.current_epoch + 1 < trainer.max_epochs


def step_where_batches_are_declined(
    trainer: "pl.Trainer",
    pl_module: "pl.LightningModule",
    is_open: Callable[[], bool],
    close: Callable[[], None],
    *,
    carries_over: bool,
) -> None:
    """Makes the step of an open window when the module declines the next micro-batch and the rest of its epoch.

    Lightning leaves the epoch without a step. The gradient so far would go into a window of the next epoch, or be lost
    where there is none. Here it is reduced over ranks, which the last micro-batch would have done, and stepped with.
    Where a strategy does not expose it, a warning says so.
    """
    if not overrides(pl_module, pl.LightningModule, "on_train_batch_start"):
        return

    def ask(*args: Any, **kwargs: Any) -> Any:
        was_open = is_open()
        response = method.original(*args, **kwargs)
        if response == -1 and was_open and not (carries_over and another_epoch_follows(trainer)):
            if reason := why_gradients_are_elsewhere(trainer):
                rank_zero_warn(
                    "Gradient accumulation: on_train_batch_start returned -1 inside a window, which continues in the"
                    f" next epoch or, after the last one, is lost: {reason} Return -1 where a window opens, or use"
                    " DDPStrategy."
                )
            else:
                _step(trainer, pl_module)
                close()
        return response

    method = Patches.of(trainer).replace(pl_module, "on_train_batch_start", ask)


def _step(trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
    means = mean_over_ranks(pl_module)
    if not means:
        return  # no micro-batch of the window had a loss
    for name, gradient in means.items():
        pl_module.get_parameter(name).grad = gradient
    batch_idx = trainer.fit_loop.epoch_loop.batch_idx
    remainders = {batch_idx: 1, batch_idx + 1: 0}
    trainer.accumulate_grad_batches = AccumulateGradBatches(int(trainer.accumulate_grad_batches), remainders)
    private_loop_api.step_without_a_batch(trainer, batch_idx, lambda: torch.zeros((), device=pl_module.device))
