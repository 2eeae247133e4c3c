"""Checkpoints, files and directories, that are written completely or not at all."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.strategies import (
    DDPStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
    Strategy,
)
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.optim import Optimizer
from typing_extensions import override

from lightning_mp.ground.core.foreign_trainers import refuse_other_trainers
from lightning_mp.ground.core.patches import Patches
from lightning_mp.ground.core.run_state import RunState
from lightning_mp.ground.core.settings_repr import SettingsRepr
from lightning_mp.training.checkpoints.atomic import (
    begin_checkpoint,
    commit_checkpoint,
    is_local,
    recover_checkpoint,
    refuse_shards,
    remove_checkpoint,
    temporary_path,
)
from lightning_mp.training.checkpoints.sharded import (
    has_optimizer_state,
    is_sharded_checkpoint,
    load_checkpoint,
    without_synthetic_step,
)
from lightning_mp.training.resume.resumable_progress import ResumableProgress


class AtomicCheckpoints(SettingsRepr, Callback):
    """Writes each checkpoint of ``fit`` atomically: after a ``kill -9`` at any moment, the last one is usable.

    Works with any strategy and any kind of checkpoint: a single file, or the directory that FSDP and
    ModelParallelStrategy write with all ranks. It is written under a hidden name in the same folder, synced to disk,
    marked as complete if it is a directory, and renamed by rank 0 when all ranks are done.
    :func:`lightning_mp.checkpoints.latest_checkpoint` finds it again. All ranks must see the same folder. Paths with a
    protocol, such as ``s3://``, are left to Lightning.

    To make a restarted run continue exactly, add :class:`~lightning_mp.ExactResume`.

    Lightning's ModelParallelStrategy cannot read a checkpoint in which a parameter has no optimizer state yet, because
    all steps so far were skipped or did not use it, and writing one before the first step makes Adam count a step too
    many. This callback fixes both. :class:`~lightning_mp.FSDP2Strategy` does all of this by itself, and the callback
    does nothing there. FSDPStrategy cannot read a folder without optimizer state and raises an error.

    ``strategy.save_checkpoint`` and ``remove_checkpoint``, and for the last two ``load_checkpoint`` and
    ``optimizer_state``, are wrapped during ``fit``, ``validate`` or ``test``; a later ``trainer.save_checkpoint`` is
    written as it is without this callback.

    Raises:
        MisconfigurationException: at set-up, if checkpoints are written in the background by ``AsyncCheckpointIO``; on
            loading, if FSDPStrategy is to resume from a folder without optimizer state, or one device or DDP from any
            folder.

    Example:
        >>> import lightning.pytorch as pl
        >>> from lightning.pytorch.callbacks import ModelCheckpoint
        >>> from lightning_mp.checkpoints import latest_checkpoint
        >>> trainer = pl.Trainer(
        ...     callbacks=[AtomicCheckpoints(), ModelCheckpoint("checkpoints", every_n_train_steps=100)], logger=False
        ... )
        >>> path = latest_checkpoint("checkpoints")  # for trainer.fit(module, loader, ckpt_path=path)
    """

    @override
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
        ResumableProgress.attach(trainer)
        if getattr(strategy, "writes_atomically", False):
            return

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

        patches = Patches.of(trainer)
        saving = patches.replace(strategy, "save_checkpoint", save)
        removing = patches.replace(strategy, "remove_checkpoint", remove)
        if isinstance(strategy, ModelParallelStrategy):
            _keep_state_as_it_is(patches, strategy)
        elif isinstance(strategy, FSDPStrategy) and trainer.state.fn == TrainerFn.FITTING:
            _check_before_loading(patches, strategy, _refuse_without_state)
        elif type(strategy) in (SingleDeviceStrategy, DDPStrategy):  # others may read their own kind of folder
            _check_before_loading(patches, strategy, lambda path: refuse_shards(path, type(strategy).__name__))
        # Behind the others, so that a checkpoint that another writes on an exception is atomic too.
        RunState.of(trainer).place_callback(self, "last")

    @override
    def on_train_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Finishes a rename that a killed run had begun, now that all ranks have read the checkpoint."""
        if trainer.is_global_zero and trainer.ckpt_path is not None and is_local(trainer.ckpt_path):
            recover_checkpoint(Path(trainer.ckpt_path))


def _keep_state_as_it_is(patches: Patches, strategy: ModelParallelStrategy) -> None:
    """Lets Lightning's own strategy write and read optimizers with incomplete state; other strategies are unchanged."""

    def load(checkpoint_path: str | os.PathLike[str], weights_only: bool | None = None) -> dict[str, Any]:
        assert strategy.model is not None
        assert strategy.lightning_module is not None
        return load_checkpoint(
            Path(strategy.broadcast(checkpoint_path)),
            strategy.model,
            strategy.optimizers,
            strict=strategy.lightning_module.strict_loading,
            weights_only=weights_only,
        )

    def state(optimizer: Optimizer) -> dict[str, Any]:
        inner = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        with without_synthetic_step(inner):
            whole: dict[str, Any] = asking.original(inner)
            return whole

    if type(strategy).load_checkpoint is not ModelParallelStrategy.load_checkpoint:
        return
    asking = patches.replace(strategy, "optimizer_state", state)
    patches.replace(strategy, "load_checkpoint", load)


def _check_before_loading(patches: Patches, strategy: Strategy, check: Callable[[Path], None]) -> None:
    """Checks a path first, for clearer messages than those of torch and Python."""

    def load(checkpoint_path: str | os.PathLike[str], weights_only: bool | None = None) -> dict[str, Any]:
        if is_local(checkpoint_path):
            check(Path(strategy.broadcast(checkpoint_path)))
        checkpoint: dict[str, Any] = loading.original(checkpoint_path, weights_only)
        return checkpoint

    loading = patches.replace(strategy, "load_checkpoint", load)


def _refuse_without_state(path: Path) -> None:
    if is_sharded_checkpoint(path) and not has_optimizer_state(path):
        raise MisconfigurationException(
            f"FSDPStrategy(state_dict_type='sharded') cannot resume from {path}, which has no optimizer state. If"
            " all its steps were skipped, start again with a lower loss scale. If the optimizer has no state, like"
            " plain SGD, use state_dict_type='full' or FSDP2Strategy."
        )
