"""What is not public of how far a run is and of its loaders, so that it continues where it was."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from math import inf
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities import data as fabric_data
from lightning.fabric.utilities.data import _set_sampler_epoch
from lightning.pytorch.loops import fit_loop, training_epoch_loop
from lightning.pytorch.loops.progress import _ProcessedTracker
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader

from lightning_mp.ground.core.patches import Patches
from lightning_mp.ground.core.private_trainer_api import is_accumulating
from lightning_mp.ground.core.random_state import random_state_kept

#: (owner, private name, why it is needed)
PRIVATE_NAMES: tuple[tuple[object, str, str], ...] = (
    (fit_loop._FitLoop, "_load_combined_loader_states", "the moment before loaders load their first batch"),
    (training_epoch_loop, "_TrainingEpochLoop", "the loop of the next name"),
    (training_epoch_loop._TrainingEpochLoop, "_on_before_fetch", "the moment before a loader loads a batch"),
    (training_epoch_loop._TrainingEpochLoop, "_should_check_val_fx", "whether validation follows this batch"),
    (fabric_data, "_set_sampler_epoch", "calls set_epoch wherever a loader keeps its sampler"),
    (CombinedLoader, "_state_dicts", "the states of the training loaders, as a checkpoint holds them"),
    (CombinedLoader, "_load_state_dicts", "puts them back where Lightning does not"),
    (DataLoader, "_get_iterator", "the moment in which a loader makes an iterator"),
    (DataLoader, "_index_sampler", "what gives a loader its indices"),
    (DataLoader, "_auto_collation", "whether those are indices of batches"),
)


def end_resumed_epoch(trainer: "pl.Trainer") -> bool:
    """In a resumed run, after ``on_train_epoch_end``: counts the epoch, and leaves it for the next one.

    ``fit_loop.reset`` has been called. It has counted the epoch where the run is limited in epochs.
    """
    fit_loop, epoch_loop = trainer.fit_loop, trainer.fit_loop.epoch_loop
    if fit_loop.restarted_on_epoch_end:
        fit_loop.epoch_progress.increment_completed()
    elif fit_loop.resumed_on_epoch_end:
        # Limited in epochs, a run does not load them. The iterator that continues from them is at its end.
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
    """In a resumed run, after ``on_train_batch_end``: does what follows a batch before the next one begins.

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


def is_validation_due(trainer: "pl.Trainer") -> bool:
    """Whether the current batch ends in a step and a validation, inside an epoch."""
    fetcher, epoch_loop = trainer.fit_loop._data_fetcher, trainer.fit_loop.epoch_loop
    if fetcher is None or not is_epoch_cut(trainer) or not epoch_loop.batch_progress.current.ready:
        return False
    return not is_accumulating(trainer) and _is_due(trainer)


def _is_due(trainer: "pl.Trainer") -> bool:
    """Whether a validation follows this batch in a run that does not stop here; not for one that the clock starts."""
    fetcher, stops = trainer.fit_loop._data_fetcher, trainer.should_stop
    assert fetcher is not None
    if getattr(trainer, "_val_check_time_interval", None) is not None:  # ranks may read different times
        return False
    trainer.should_stop = False
    try:
        return trainer.fit_loop.epoch_loop._should_check_val_fx(fetcher)
    finally:
        trainer.should_stop = stops


def is_validation_of_the_stop(trainer: "pl.Trainer") -> bool:
    """Whether the validation after this batch is run only because the run stops: a longer run does not have it."""
    return trainer.should_stop and not _is_due(trainer)


def skip_validation_of_the_stop(trainer: "pl.Trainer") -> None:
    """Leaves out the validation after this batch if it is not due."""
    trainer.fit_loop.epoch_loop._skip_next_val = is_validation_of_the_stop(trainer)


def validation_progress(trainer: "pl.Trainer") -> dict[str, Any]:
    """How many batches were validated."""
    return deepcopy(trainer.fit_loop.epoch_loop.val_loop.batch_progress.state_dict())


def restore_validation_progress(trainer: "pl.Trainer", progress: dict[str, Any]) -> None:
    """As if nothing was validated since."""
    trainer.fit_loop.epoch_loop.val_loop.batch_progress.load_state_dict(progress)


def end_restart(trainer: "pl.Trainer") -> None:
    """Lets a learning rate follow its metric at the end of a resumed epoch, if the metric is there."""
    configs = [config for config in trainer.lr_scheduler_configs if config.reduce_on_plateau]
    if all(config.monitor in trainer.callback_metrics for config in configs):
        trainer.fit_loop.on_iteration_done()


def set_sampler_epoch(trainer: "pl.Trainer", dataloader: object) -> None:
    """Tells the loader's sampler the epoch that comes next, or that a resumed run is in.

    Lightning 2.6 does so after the loader has asked it: Lightning-AI/pytorch-lightning#21938.
    """
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
    """Calls ``function`` with the states of the training loaders before one loads a batch.

    Not for the first batch of a fit; and only where loaders are fetched from ahead, unless ``always``.
    """

    def before() -> None:
        if always or fetches_ahead(trainer):
            function(loader_states(trainer))
        patch.original()

    patch = Patches.of(trainer).replace(trainer.fit_loop.epoch_loop, "_on_before_fetch", before)


def before_first_fetch(trainer: "pl.Trainer", function: Callable[[list[dict[str, Any]]], None]) -> None:
    """Calls ``function`` with the states that the training loaders are about to continue from, none for new ones.

    That is whenever loaders are made, before the first of them loads a batch.
    """
    loop = trainer.fit_loop

    def before() -> None:
        function(list(loop._combined_loader_states_to_load) if loop.restarting else [])

    Patches.of(trainer).around(loop, "_load_combined_loader_states", before)


def index_sampler(loader: "DataLoader[Any]") -> Any:
    """What gives a loader its indices: of batches, or of samples where it makes no batches."""
    return loader._index_sampler


def replace_index_sampler(loader: "DataLoader[Any]", sampler: Any) -> Callable[[], None]:
    """Puts another in its place, which the loader refuses otherwise; returns what takes it away again."""
    name = "batch_sampler" if loader._auto_collation else "sampler"
    before = vars(loader)[name]
    object.__setattr__(loader, name, sampler)
    return lambda: object.__setattr__(loader, name, before)


def batches_yielded(iterator: Any) -> int:
    """How many batches an iterator of a ``DataLoader`` has returned."""
    return int(iterator._num_yielded)


def load_late_states(trainer: "pl.Trainer") -> None:
    """Has loaders continue that were made before the checkpoint was read, as for ``estimated_stepping_batches``.

    Lightning 2.6 does not: Lightning-AI/pytorch-lightning#20550.
    """
    loop = trainer.fit_loop
    if not (loop.restarting and loop._combined_loader_states_to_load and loop._combined_loader is not None):
        return
    for loader in loop._combined_loader.flattened:
        set_sampler_epoch(trainer, loader)
    loop._load_combined_loader_states()
    assert loop._data_fetcher is not None
    iter(loop._data_fetcher)


def before_loader_states(trainer: "pl.Trainer", function: Callable[[], None]) -> None:
    """Calls a function before training loaders continue from their saved states."""
    Patches.of(trainer).around(trainer.fit_loop, "_load_combined_loader_states", before=function)


def forget_loader_states(trainer: "pl.Trainer") -> None:
    """Makes training loaders start again if their states, not yet loaded, are those of this package."""
    loop = trainer.fit_loop
    if any(isinstance(state, dict) and "is_over" in state for state in loop._combined_loader_states_to_load):
        loop._combined_loader_states_to_load = []


def loaders_made_in(trainer: "pl.Trainer") -> list[int | None]:
    """The epochs in which the training loaders and those for validation were made; None if they were not."""
    loop, validation = trainer.fit_loop, trainer.fit_loop.epoch_loop.val_loop
    epochs = loop._last_train_dl_reload_epoch, validation._last_val_dl_reload_epoch
    return [None if epoch == -inf else int(epoch) for epoch in epochs]


def make_loaders_of(trainer: "pl.Trainer", epochs: Sequence[int | None]) -> None:
    """In a resumed run: loaders that the run before made in an earlier epoch are requested as of that epoch.

    Lightning makes them in the epoch in which it resumes, and counts ``reload_dataloaders_every_n_epochs`` from there
    (Lightning-AI/pytorch-lightning#21492, open as of Lightning 2.6).
    """
    loop = trainer.fit_loop
    for part, name, epoch in (
        (loop, "_last_train_dl_reload_epoch", epochs[0]),
        (loop.epoch_loop.val_loop, "_last_val_dl_reload_epoch", epochs[1]),
    ):
        if epoch is not None:
            _make_first_as_of(part, name, epoch, trainer)


def _make_first_as_of(part: Any, name: str, epoch: int, trainer: "pl.Trainer") -> None:
    patches = Patches.of(trainer)
    is_over = is_requested = False

    def request() -> Any:
        nonlocal is_requested
        progress: Any = trainer.fit_loop.epoch_progress.current
        now = progress.completed
        # Loaders for validation are requested once more when they are due; training loaders have a position to take.
        is_due = part is trainer.fit_loop and 0 < vars(trainer)["reload_dataloaders_every_n_epochs"] <= now - epoch
        if is_over or is_due:
            return requesting.original()
        is_requested, progress.completed = True, epoch
        try:
            return requesting.original()
        finally:
            progress.completed = now

    def set_up(*args: Any, **kwargs: Any) -> Any:
        nonlocal is_over
        result = setting_up.original(*args, **kwargs)
        if is_requested and not is_over:
            setattr(part, name, epoch)
        is_over = True
        return result

    requesting = patches.replace(part._data_source, "dataloader", request)
    setting_up = patches.replace(part, "setup_data", set_up)


def before_each_advance(trainer: "pl.Trainer", function: Callable[[], None]) -> None:
    """Calls ``function`` before each epoch, or the rest of one, when nothing of it was done."""
    Patches.of(trainer).around(trainer.fit_loop, "on_advance_start", function)


def is_in_start_of_epoch(trainer: "pl.Trainer") -> bool:
    """Whether ``on_train_epoch_start`` is under way."""
    counts = trainer.fit_loop.epoch_progress.current
    assert isinstance(counts, _ProcessedTracker)
    return counts.ready > counts.started


def is_epoch_cut(trainer: "pl.Trainer") -> bool:
    """Whether the run ends before the epoch's last batch."""
    batches = trainer.fit_loop.epoch_loop.batch_progress
    return not batches.is_last_batch and batches.current.ready < trainer.num_training_batches


def is_in_end_of_epoch(trainer: "pl.Trainer") -> bool:
    """Whether ``on_train_epoch_end`` is under way, before the epoch's metrics are logged."""
    counts = trainer.fit_loop.epoch_progress.current
    assert isinstance(counts, _ProcessedTracker)
    return counts.ready == counts.started == counts.processed == counts.completed + 1


def around_validation(trainer: "pl.Trainer", before: Callable[[], None], after: Callable[[], None]) -> None:
    """Calls the functions before a validation first uses its loaders, and after it."""

    def count() -> None:
        with random_state_kept(torch.device("cpu")):
            counting.original()

    validation = trainer.fit_loop.epoch_loop.val_loop
    Patches.of(trainer).around(validation, "run", before, after)
    # On a restart where a validation lies behind, Lightning makes the iterators of its loaders for nothing.
    counting = Patches.of(trainer).replace(validation, "increment_progress_to_evaluation_end", count)
