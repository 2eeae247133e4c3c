"""The part of the seams that is about Lightning's loops and settings: how far a run is, its limits, its samplers."""

import builtins
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from math import inf
from operator import attrgetter
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.data import _set_sampler_epoch
from lightning.pytorch.callbacks import Callback, ModelPruning
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from lightning.pytorch.loops.progress import _ProcessedTracker
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from torchmetrics import Metric

from lightning_mp.core.patches import Patch, Patches
from lightning_mp.core.random_state import random_state_kept


def set_max_steps(trainer: "pl.Trainer", steps: int) -> None:
    """Moves the optimizer step after which the fit loop ends."""
    trainer.fit_loop.epoch_loop.max_steps = steps


def detects_anomalies(trainer: "pl.Trainer") -> bool:
    """Whether the Trainer runs under ``torch.autograd.set_detect_anomaly``."""
    return bool(trainer._detect_anomaly)


def replace_end_of_epoch(trainer: "pl.Trainer", end: tuple[float, bool]) -> tuple[float, bool]:
    """Puts (batches of this epoch, whether this batch is its last) in place of what the loop knows; returns that."""
    loop, progress = trainer.fit_loop, trainer.fit_loop.epoch_loop.batch_progress
    known = loop.max_batches, progress.is_last_batch
    loop.max_batches, progress.is_last_batch = end
    return known


def undo_logged_step(trainer: "pl.Trainer") -> None:
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


@dataclass
class BatchClosure:
    """The closure of one batch in automatic optimization, taken apart; whoever steps the optimizer calls it."""

    arguments: Mapping[str, Any]  # of the training step: the batch first, then its index if that takes one
    batch_idx: int
    optimizer: Optimizer
    training_step: Callable[[Any], ClosureResult]  # of a batch; the loss is divided by `accumulate_grad_batches`
    zero_grad: Callable[[], None] | None  # where the batch opens a window
    backward: Callable[[Tensor], None] | None

    @property
    def batch(self) -> Any:
        """What the loader returned, on its device."""
        return self.arguments["batch"]


def replace_closures(
    trainer: "pl.Trainer", begin: Callable[[BatchClosure], Callable[[], ClosureResult] | None]
) -> None:
    """Has ``begin`` make what runs training step, ``zero_grad`` and backward of each batch; None keeps Lightning's."""
    loop = trainer.fit_loop.epoch_loop.automatic_optimization

    def make_closure(arguments: Any, optimizer: Optimizer, batch_idx: int) -> Any:
        closure = making.original(arguments, optimizer, batch_idx)
        warnings = closure.warning_cache  # not the closure itself, which will refer to this: it would keep its batch

        def training_step(batch: Any) -> ClosureResult:
            output = loop._training_step(type(arguments)(arguments, batch=batch))
            if output.closure_loss is None:
                warnings.warn("`training_step` returned `None`. If this was on purpose, ignore this warning...")
            return output

        parts = closure._zero_grad_fn, closure._backward_fn
        run = begin(BatchClosure(arguments, batch_idx, optimizer, training_step, *parts))
        if run is not None:
            closure.closure = torch.enable_grad()(run)
        return closure

    making = Patches.of(trainer).replace(loop, "_make_closure", make_closure)


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


# -- loaders -----------------------------------------------------------------------------------------------------------


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
    """Has training loaders begin anew where their states, not yet loaded, are those of this package."""
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


# -- logged values -----------------------------------------------------------------------------------------------------


def replace_logging(trainer: "pl.Trainer", log: Callable[..., None]) -> Patch:
    """Has ``log`` take what ``self.log`` is called with in training, with the hook's name before the others."""
    return Patches.of(trainer).replace(trainer.fit_loop.epoch_loop._results, "log", log)


def logged_results(trainer: "pl.Trainer") -> dict[str, Any]:
    """What the training epoch has logged so far: plain values of each entry, by which it can be made again."""
    found: dict[str, Any] = {}
    for key, result in trainer.fit_loop.epoch_loop._results.items():
        meta = result.meta
        if result.has_reset or meta.dataloader_idx is not None or meta.sync.group is not None:
            continue
        cache = result._forward_cache
        found[key] = {
            "arguments": {
                "fx": meta.fx,
                "name": meta.name,
                "prog_bar": meta.prog_bar,
                "logger": meta.logger,
                "on_step": meta.on_step,
                "on_epoch": meta.on_epoch,
                "enable_graph": meta.enable_graph,
                "sync_dist": meta.sync.should,
                "add_dataloader_idx": meta.add_dataloader_idx,
                "metric_attribute": meta.metric_attribute,
                "rank_zero_only": meta.sync.rank_zero_only,
            },
            "reduce_fx": meta.reduce_fx.__name__,
            "is_builtin": meta.reduce_fx in (sum, max, min),
            "value": result.value.detach().cpu().clone() if result.is_tensor else None,
            "batch_size": int(result.cumulated_batch_size) if result.is_tensor and meta.is_mean_reduction else None,
            "forward_cache": cache.detach().cpu().clone() if isinstance(cache, Tensor) else None,
            "updates": result._update_count,
        }
    return found


def restore_logged_results(trainer: "pl.Trainer", saved: Mapping[str, Any], *, inside_epoch: bool) -> None:
    """Makes the entries again, as if this process had logged them."""
    results, module = trainer.fit_loop.epoch_loop._results, trainer.lightning_module
    for key, entry in saved.items():
        arguments, value = entry["arguments"], entry["value"]
        attribute = arguments["metric_attribute"]
        logged = value.to(module.device) if value is not None else attrgetter(attribute)(module)
        function = getattr(builtins if entry["is_builtin"] else torch, entry["reduce_fx"])
        results.log(**arguments, value=logged, reduce_fx=function, sync_dist_fn=trainer.strategy.reduce, batch_size=1)
        result = results[key]
        if value is not None:
            result.value = logged.clone()
        if entry["batch_size"] is not None:
            result.cumulated_batch_size = torch.tensor(entry["batch_size"], device=module.device)
        cache = entry["forward_cache"]
        result._forward_cache = cache if cache is None else cache.to(module.device)
        result._computed, result._update_count = None, entry["updates"]
    if inside_epoch:
        # Lightning forgets what was logged before the first batch that it sees of an epoch.
        trainer._logger_connector._first_loop_iter = False


def log_resumed_batch(trainer: "pl.Trainer") -> None:
    """Has loggers see the values of a batch once more that a checkpoint was written after, and maybe before they did.

    ``fit_loop.reset`` has been called. It has counted the epoch if the batch is its last.
    """
    epoch_loop, epochs = trainer.fit_loop.epoch_loop, trainer.fit_loop.epoch_progress.current
    if not (epoch_loop.restarted_on_train_batch_end and trainer.fit_loop.restarted_mid_epoch):
        return
    is_last = epoch_loop.batch_progress.is_last_batch
    epochs.completed -= is_last
    trainer._logger_connector.update_train_step_metrics()
    epochs.completed += is_last


def latest_metrics(trainer: "pl.Trainer") -> dict[str, Any]:
    """What ``trainer.callback_metrics`` has by now, without asking for more; to be changed in place."""
    return trainer._logger_connector._callback_metrics


def set_metric_state(metric: Metric, states: Mapping[str, Any], updates: int) -> None:
    """Sets the states of a metric and its number of updates."""
    for name, value in states.items():
        setattr(metric, name, value)
    metric._update_count, metric._computed = updates, None


def end_of_resumed_epoch(trainer: "pl.Trainer") -> None:
    """Does what follows ``on_train_epoch_end``: epoch metrics are logged, and a learning rate may follow them.

    ``fit_loop.reset`` has been called, which counts the epoch where the run is limited in epochs.
    """
    fit_loop, connector = trainer.fit_loop, trainer._logger_connector
    if not (fit_loop.restarted_on_epoch_end or fit_loop.resumed_on_epoch_end):
        return
    counts = fit_loop.epoch_progress.current
    assert isinstance(counts, _ProcessedTracker)
    completed = counts.completed
    counts.completed = counts.processed - 1
    connector.on_epoch_end()
    plateaus = [config for config in trainer.lr_scheduler_configs if config.reduce_on_plateau]
    if all(config.monitor in connector._callback_metrics for config in plateaus):
        fit_loop.epoch_loop.update_lr_schedulers("epoch", update_plateau_schedulers=True)
    fit_loop.epoch_loop._batches_that_stepped -= 1
    connector.update_train_epoch_metrics()
    fit_loop.epoch_loop._batches_that_stepped += 1
    counts.completed = completed
