"""All checkpoints of a fit, files and directories, are there as a whole or not at all."""

import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_mp.callbacks._common import refuse_other_trainers
from lightning_mp.faults.atomic_checkpoint import (
    begin_checkpoint,
    commit_checkpoint,
    is_local,
    remove_checkpoint,
    settle_checkpoint,
    temporary_path,
)
from lightning_mp.holds import InstanceMethod
from lightning_mp.seams import callbacks_of, set_callbacks

__all__ = ["AtomicCheckpoints"]


class AtomicCheckpoints(Callback):
    """Makes each checkpoint of ``fit`` appear in one step: ``kill -9`` at any moment leaves the last one usable.

    For any strategy and any kind of checkpoint: a single file, or the directory that FSDP and ModelParallelStrategy
    write with all ranks. It is written under a hidden name beside its place, synced to the disk, marked as complete if
    it is a directory, and renamed by rank 0 when all ranks are done. :func:`lightning_mp.latest_checkpoint` finds it
    again. All ranks must see the same folder. Paths with a protocol, as ``s3://``, are left to Lightning.

    ``strategy.save_checkpoint`` and ``remove_checkpoint`` are wrapped for the time of ``fit``, ``validate`` or
    ``test``; a ``trainer.save_checkpoint`` after it is written as without this callback.

    Raises:
        MisconfigurationException: at set-up, if checkpoints are written in the background by ``AsyncCheckpointIO``.

    Example:
        >>> import lightning.pytorch as pl
        >>> from lightning.pytorch.callbacks import ModelCheckpoint
        >>> from lightning_mp.faults.latest_checkpoint import latest_checkpoint
        >>> trainer = pl.Trainer(
        ...     callbacks=[AtomicCheckpoints(), ModelCheckpoint("checkpoints", every_n_train_steps=100)], logger=False
        ... )
        >>> path = latest_checkpoint("checkpoints")  # for trainer.fit(module, loader, ckpt_path=path)
    """

    def __init__(self) -> None:
        self._methods: list[InstanceMethod] = []

    def setup(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", stage: str) -> None:
        """Wraps the strategy's two methods."""
        refuse_other_trainers(self, trainer)
        strategy = trainer.strategy
        if isinstance(strategy.checkpoint_io, AsyncCheckpointIO):
            raise MisconfigurationException(
                "AtomicCheckpoints renames a checkpoint when it is written, but AsyncCheckpointIO writes it later, in"
                " the background. Remove the callback and use plugins=[AsyncCheckpointIO(AtomicCheckpointIO())], which"
                " writes single files atomically, or remove AsyncCheckpointIO."
            )
        self._restore()

        def save(checkpoint: dict[str, Any], filepath: str | os.PathLike[str], storage_options: Any = None) -> None:
            if not is_local(filepath):
                saving.original(checkpoint, filepath, storage_options=storage_options)
                return
            path = Path(strategy.broadcast(filepath))
            if trainer.is_global_zero:
                begin_checkpoint(path)
            strategy.barrier("AtomicCheckpoints begins")
            saving.original(checkpoint, temporary_path(path), storage_options=storage_options)
            strategy.barrier("AtomicCheckpoints commits")
            if trainer.is_global_zero:
                commit_checkpoint(path)

        def remove(filepath: str | os.PathLike[str]) -> None:
            if trainer.is_global_zero and is_local(filepath):
                remove_checkpoint(Path(filepath))
            else:
                removing.original(filepath)

        saving = InstanceMethod(strategy, "save_checkpoint", save)
        removing = InstanceMethod(strategy, "remove_checkpoint", remove)
        self._methods = [saving, removing]
        # Behind the others, so that a checkpoint that another writes on an exception is atomic too. A new list:
        # Lightning is walking through the old one.
        others = [callback for callback in callbacks_of(trainer) if callback is not self]
        set_callbacks(trainer, [*others, self])

    def on_train_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Ends a rename that a killed run had begun, now that all ranks have read the checkpoint."""
        if trainer.is_global_zero and trainer.ckpt_path is not None and is_local(trainer.ckpt_path):
            settle_checkpoint(Path(trainer.ckpt_path))

    def teardown(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", stage: str) -> None:
        """Gives the strategy its own methods back."""
        self._restore()

    def on_exception(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", exception: BaseException) -> None:
        """Gives the strategy its own methods back."""
        self._restore()

    def _restore(self) -> None:
        methods, self._methods = self._methods, []
        for method in methods:
            method.restore()
