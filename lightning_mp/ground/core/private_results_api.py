"""What is not public of logged values and metrics, and of when Lightning passes them on."""

import builtins
from collections.abc import Mapping
from operator import attrgetter
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loops import progress
from lightning.pytorch.loops.progress import _ProcessedTracker
from torch import Tensor
from torchmetrics import Metric

#: (owner, private name, why it is needed)
PRIVATE_NAMES: tuple[tuple[object, str, str], ...] = (
    (progress, "_ProcessedTracker", "how many epochs were begun and ended"),
)


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
