"""The part of the seams that is about Lightning's loops and settings: where a run stands, its limits, its samplers."""

from collections.abc import Callable, Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.data import _set_sampler_epoch
from lightning.pytorch.callbacks import Callback, ModelPruning
from lightning.pytorch.loops.progress import _ProcessedTracker
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor

from lightning_mp.core.patches import Patches

__all__ = [
    "average_model_of",
    "before_each_fetch",
    "before_first_fetch",
    "ddp_arguments",
    "end_restart",
    "end_resumed_batch",
    "end_resumed_epoch",
    "fetches_ahead",
    "is_accumulating",
    "loader_states",
    "logger_step",
    "replace_end_of_epoch",
    "rewinds_weights",
    "set_device_property",
    "set_max_steps",
    "set_sampler_epoch",
    "step_without_a_batch",
    "take_back_a_logged_step",
    "uses_distributed_sampler",
]


def set_max_steps(trainer: "pl.Trainer", steps: int) -> None:
    """Moves the optimizer step after which the fit loop ends."""
    trainer.fit_loop.epoch_loop.max_steps = steps


def replace_end_of_epoch(trainer: "pl.Trainer", end: tuple[float, bool]) -> tuple[float, bool]:
    """Puts (batches of this epoch, whether this batch is its last) in place of what the loop knows; returns that."""
    loop, progress = trainer.fit_loop, trainer.fit_loop.epoch_loop.batch_progress
    known = loop.max_batches, progress.is_last_batch
    loop.max_batches, progress.is_last_batch = end
    return known


def take_back_a_logged_step(trainer: "pl.Trainer") -> None:
    """The x axis of loggers counts steps; Lightning is about to count one at an epoch's end that was not made."""
    trainer.fit_loop.epoch_loop._batches_that_stepped -= 1


def step_without_a_batch(trainer: "pl.Trainer", batch_idx: int, closure: Callable[[], Tensor]) -> None:
    """An optimizer step as automatic optimization makes it, with the gradients that are there."""
    epoch_loop = trainer.fit_loop.epoch_loop
    epoch_loop.automatic_optimization._optimizer_step(batch_idx, closure)
    epoch_loop._batches_that_stepped += 1


def logger_step(trainer: "pl.Trainer") -> int:
    """Where loggers are on their x axis: batches before this one that ended in an optimizer step."""
    step: int = trainer.fit_loop.epoch_loop._batches_that_stepped
    return step


def is_accumulating(trainer: "pl.Trainer") -> bool:
    """Whether no step was made after this micro-batch; Lightning logs nothing then."""
    return trainer.lightning_module.automatic_optimization and trainer.fit_loop._should_accumulate()


def end_resumed_epoch(trainer: "pl.Trainer") -> bool:
    """Where a resumed run stands behind ``on_train_epoch_end``: counts the epoch, and leaves it for the next one.

    ``fit_loop.reset`` has been called. It has counted the epoch where the run is limited in epochs.

    Returns:
        Whether it stands there.
    """
    fit_loop, epoch_loop = trainer.fit_loop, trainer.fit_loop.epoch_loop
    if fit_loop.restarted_on_epoch_end:
        fit_loop.epoch_progress.increment_completed()
    elif fit_loop.resumed_on_epoch_end:
        # Limited in epochs, a run does not load them. The iterator that goes on from them is at its end.
        assert fit_loop._combined_loader is not None
        assert fit_loop._data_fetcher is not None
        fit_loop._combined_loader._load_state_dicts(fit_loop._combined_loader_states_to_load)
        fit_loop._combined_loader_states_to_load = []
        iter(fit_loop._data_fetcher)
    else:
        return False
    epoch_loop.val_loop.restarting = False
    epoch_loop.on_iteration_done()
    fit_loop.on_iteration_done()
    return True


def end_resumed_batch(trainer: "pl.Trainer") -> None:
    """Where a resumed run stands behind ``on_train_batch_end``: does what follows a batch before the next one begins.

    That is validation where it is due, and the end of the epoch after its last batch, for which Lightning begins the
    next one at once. Not where a learning rate may follow a metric of that batch, which no checkpoint holds.
    """
    fit_loop, epoch_loop = trainer.fit_loop, trainer.fit_loop.epoch_loop
    epochs, batches = fit_loop.epoch_progress, epoch_loop.batch_progress
    if not (epoch_loop.restarted_on_train_batch_end and fit_loop.restarted_mid_epoch):
        return
    follows_batches = any(c.reduce_on_plateau and c.interval == "step" for c in trainer.lr_scheduler_configs)
    is_last = batches.is_last_batch
    if is_last:
        # `fit_loop.reset` has counted the epoch.
        for counts in (epochs.total, epochs.current):
            assert isinstance(counts, _ProcessedTracker)
            counts.processed -= 1
            counts.completed -= 1

    is_first = True

    def reset() -> None:
        nonlocal is_first
        if not is_first:
            patch.original()
            return
        is_first = False
        before = epoch_loop._batches_that_stepped
        if is_last:
            batches.increment_completed()
        else:
            patch.original()
        assert fit_loop._data_fetcher is not None
        is_due = not follows_batches and epoch_loop._should_check_val_fx(fit_loop._data_fetcher)
        if not (is_last or is_due):
            return
        epoch_loop.val_loop.restarting = False
        epoch_loop.on_iteration_done()
        after = before + 1 if is_last else epoch_loop._batches_that_stepped
        epoch_loop._batches_that_stepped = before  # where validation logs
        if is_due:
            epoch_loop.on_advance_end(fit_loop._data_fetcher)
        epoch_loop._batches_that_stepped = after

    patch = Patches.of(trainer).replace(epoch_loop, "reset", reset)


def end_restart(trainer: "pl.Trainer") -> None:
    """Lets a learning rate follow its metric at the end of a resumed epoch, if the metric is there."""
    configs = [config for config in trainer.lr_scheduler_configs if config.reduce_on_plateau]
    if all(config.monitor in trainer.callback_metrics for config in configs):
        trainer.fit_loop.on_iteration_done()


def set_sampler_epoch(trainer: "pl.Trainer", dataloader: object) -> None:
    """Tells the loader's sampler the epoch that comes next, or that a resumed run is in."""
    counts = trainer.fit_loop.epoch_progress.current
    assert isinstance(counts, _ProcessedTracker)
    _set_sampler_epoch(dataloader, counts.processed)


def loader_states(trainer: "pl.Trainer") -> list[dict[str, Any]]:
    """States of the training loaders that have one."""
    loader = trainer.fit_loop._combined_loader
    return loader._state_dicts() if loader is not None else []


def fetches_ahead(trainer: "pl.Trainer") -> bool:
    """Whether a batch is fetched before the one ahead of it is used: only so is it known which one is the last."""
    fetcher = trainer.fit_loop._data_fetcher
    return fetcher is not None and fetcher.length is None


def before_each_fetch(trainer: "pl.Trainer", function: Callable[[list[dict[str, Any]]], None], *, always: bool) -> None:
    """Calls ``function`` with the states of the training loaders before one is asked for a batch.

    Not for the first batch of a fit; and only where loaders are fetched from ahead, unless ``always``.
    """

    def before() -> None:
        if always or fetches_ahead(trainer):
            function(loader_states(trainer))
        patch.original()

    patch = Patches.of(trainer).replace(trainer.fit_loop.epoch_loop, "_on_before_fetch", before)


def before_first_fetch(trainer: "pl.Trainer", function: Callable[[list[dict[str, Any]]], None]) -> None:
    """Calls ``function`` with the states that the training loaders are about to go on from, none for new ones.

    That is whenever loaders are made, before the first of them is asked for a batch.
    """
    loop = trainer.fit_loop

    def load() -> None:
        function(list(loop._combined_loader_states_to_load) if loop.restarting else [])
        patch.original()

    patch = Patches.of(trainer).replace(loop, "_load_combined_loader_states", load)


def ddp_arguments(strategy: DDPStrategy) -> Mapping[str, Any]:
    """Keyword arguments that a strategy will give ``DistributedDataParallel``."""
    return strategy._ddp_kwargs


def uses_distributed_sampler(trainer: "pl.Trainer") -> bool:
    """What ``Trainer(use_distributed_sampler=...)`` was given."""
    return bool(trainer._accelerator_connector.use_distributed_sampler)


def set_device_property(module: "pl.LightningModule", device: torch.device) -> None:
    """What ``module.device`` says from now on; its tensors stay where they are."""
    module._device = device


def rewinds_weights(callback: ModelPruning) -> bool:
    """Whether weights go back to their first values when they are pruned, or may."""
    return bool(callback._use_lottery_ticket_hypothesis)


def average_model_of(callback: Callback) -> torch.nn.Module | None:
    """What ``WeightAveraging`` or ``StochasticWeightAveraging`` averages into; None outside of a fit."""
    average: torch.nn.Module | None = vars(callback)["_average_model"]
    return average
