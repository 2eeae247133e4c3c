"""``ModelCheckpoint`` waits for the end of the accumulation window."""

from collections.abc import Callable
from typing import Any, Self

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_mp.holds import InstanceMethod

__all__ = ["CheckpointHold"]


class CheckpointHold:
    """Keeps every ``ModelCheckpoint`` of a Trainer from writing inside an open window, whose gradient is in no file.

    A checkpoint that comes due there (a time interval, a validation in the middle, the first micro-batch after a
    resume) is written after the window's optimizer step, with the metrics it was to be judged by. Both hooks are public
    and wrapped on the instance for the time of one ``fit``.

    Args:
        trainer: its checkpoint callbacks are held.
        is_open: whether a window is open after this micro-batch.
    """

    def __init__(self, trainer: "pl.Trainer", is_open: Callable[[], bool]) -> None:
        self._trainer = trainer
        self._is_open = is_open
        self._methods: list[InstanceMethod] = []

    def attach(self) -> Self:
        """Starts holding."""
        for callback in self._trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint):
                self._hold(callback)
        return self

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
            else:
                validation_end.original(trainer, pl_module)

        def on_train_epoch_end(trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
            nonlocal epoch_postponed
            if self._is_open():
                epoch_postponed = True
            else:
                epoch_end.original(trainer, pl_module)

        batch_end = InstanceMethod(checkpoint, "on_train_batch_end", on_train_batch_end)
        validation_end = InstanceMethod(checkpoint, "on_validation_end", on_validation_end)
        epoch_end = InstanceMethod(checkpoint, "on_train_epoch_end", on_train_epoch_end)
        self._methods += [batch_end, validation_end, epoch_end]

    def detach(self) -> None:
        """Gives the callbacks their own hooks back."""
        for method in self._methods:
            method.restore()
        self._methods = []
