"""A resumed run continues bit for bit: random numbers, position in the data and epoch metrics in every checkpoint."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities.apply_func import apply_to_collection
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset
from torchmetrics import Metric
from typing_extensions import override

from lightning_mp.ground.core import private_results_api, private_resume_api, private_trainer_api
from lightning_mp.ground.core.foreign_trainers import refuse_other_trainers
from lightning_mp.ground.core.patches import Patches
from lightning_mp.ground.core.private_results_api import set_metric_state
from lightning_mp.ground.core.random_state import random_state_kept
from lightning_mp.ground.core.rank_rng import RankRNG
from lightning_mp.ground.core.ranks import world_size
from lightning_mp.ground.core.run_state import RunState
from lightning_mp.ground.core.saved_state import MAPPING, POSITIVE_COUNT, Schema, checked_state
from lightning_mp.ground.core.settings_repr import SettingsRepr
from lightning_mp.ground.core.trainer_ranks import data_rank, num_data_ranks
from lightning_mp.ground.modules.compiled_names import translate_on_load
from lightning_mp.training.accumulation.boundary import defer_checkpoints
from lightning_mp.training.accumulation.controller import AccumulationController
from lightning_mp.training.accumulation.lost_gradient import lost_gradient_message
from lightning_mp.training.resume.differences import EXACT_RESUME_KEY
from lightning_mp.training.resume.loader_position import LoaderPosition, StreamPosition, why_unsupported
from lightning_mp.training.resume.random_numbers import captured, restore
from lightning_mp.training.resume.records import RECORDED_KINDS, bit_hash, bit_hash_of_nested, write_record
from lightning_mp.training.resume.resumable_progress import (
    ResumableProgress,
    is_epoch_over,
    num_unprocessed_batches,
    repeat_validation,
    saves_on_exception,
)


@dataclass
class _Fit:
    """The position of one fit; kept until the next one, for checkpoints that are written after its end."""

    positions: list[LoaderPosition | StreamPosition] = field(default_factory=list)
    positions_are_complete: bool = False
    resumed: dict[str, Any] | None = None  # what this rank continues from, until it does
    # Random states before the fetch before the last, and before the last, where a batch may be done again.
    before_fetches: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=2))
    before_epoch: dict[str, Any] | None = None
    # Random state and metrics before the validation that runs.
    before_validation: tuple[dict[str, Any], dict[str, Any]] | None = None
    # Random state and progress, before a validation that only runs because the run stops.
    before_stop: tuple[dict[str, Any], dict[str, Any]] | None = None
    # Random state of the run's end, and metrics of an epoch that it cuts off, before that logs and forgets them.
    at_end: dict[str, Any] | None = None
    of_cut_epoch: dict[str, Any] | None = None
    hashes: dict[str, Tensor] = field(default_factory=dict)  # of the current batch


class ExactResume(SettingsRepr, Callback):
    """Makes ``fit(ckpt_path=...)`` continue with the next batch and the same random numbers, as if never interrupted.

    Every checkpoint of the run stores, for each rank, the state of the random generators (torch on the CPU and on
    the rank's device, Python, NumPy), the position of every training loader, and the values logged in the epoch so far.
    Loaders need no change: an ordinary ``DataLoader`` with ``shuffle``, a sampler, a batch sampler, a ``generator`` or
    workers; a ``DistributedSampler``; several in a ``CombinedLoader``. A resumed run draws the used indices from the
    sampler again, without loading their samples. Loaders with a ``state_dict``, such as torchdata's
    ``StatefulDataLoader``, and iterable datasets with one (without workers) continue from it.

    A checkpoint of a module with compiled parts (``torch.compile(part)``) loads into one without, and vice versa, in
    ``fit`` and in ``validate``, ``test`` and ``predict``.

    It changes a run in three ways: each batch that a worker process loads has its own seed, so that augmentation does
    not depend on what the worker loaded before; a validation loader with ``persistent_workers`` no longer advances the
    random generators of the process when it starts its workers; and a batch sampler that draws when its iterator is
    made draws at the first batch instead.

    Args:
        on_unsupported: ``"warn"`` or ``"error"``, if the position of a training loader cannot be recorded, or a
            checkpoint is saved inside an accumulation window whose gradient it does not hold.
        record: a file ``*.jsonl`` to which a hash of each batch, loss, gradients, weights and state is written, for
            ``lightning-mp bits``. It costs one read from the device per batch.

    Raises:
        ValueError: if ``on_unsupported`` is neither, or ``record`` is not a ``.jsonl`` file; on loading, if the state
            in a checkpoint is damaged, or belongs to a loader with another dataset length or batch size.
        MisconfigurationException: at set-up, with ``on_unsupported="error"``, if the position of a training loader
            cannot be recorded; or at a save inside an accumulation window, except one on an exception.

    Example:
        >>> import lightning.pytorch as pl
        >>> trainer = pl.Trainer(callbacks=[ExactResume()], accelerator="cpu", logger=False)
    """

    #: Names in a checkpoint are the same for compiled and eager modules.
    translates_names: ClassVar[bool] = True

    def __init__(self, *, on_unsupported: Literal["warn", "error"] = "warn", record: str | Path | None = None) -> None:
        if on_unsupported not in ("warn", "error"):
            raise ValueError(f"ExactResume(on_unsupported={on_unsupported!r}): it must be 'warn' or 'error'.")
        if record is not None and not (isinstance(record, str | Path) and Path(record).suffix == ".jsonl"):
            raise ValueError(f"ExactResume(record={record!r}): give a file named *.jsonl, or None.")
        self.on_unsupported = on_unsupported
        self.record = None if record is None else Path(record)
        self._fit = _Fit()

    # -- set-up --------------------------------------------------------------------------------------------------------

    @override
    def setup(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", stage: str) -> None:
        """Records loaders as they are created, and the moments from which a checkpoint may be written."""
        refuse_other_trainers(self, trainer)
        patches = Patches.of(trainer)
        patches.at_end(translate_on_load(pl_module).remove)
        if trainer.state.fn != TrainerFn.FITTING:
            return
        self._fit = fit = _Fit()
        # Before it lets the epoch of a checkpoint continue or end.
        progress = ResumableProgress.attach(trainer)
        patches.around(progress, "on_train_start", before=lambda: self._restore_metrics(trainer))

        def process(dataloader: object) -> object:
            processed = processing.original(dataloader)
            self._inspect(trainer, processed)
            return processed

        def begin(states: list[dict[str, Any]]) -> None:
            fit.positions_are_complete = True
            random = captured(pl_module.device)
            if fit.resumed is not None and fit.resumed["random"]["ahead"] is not None:
                random = fit.resumed["random"]["ahead"]
                restore(random, pl_module.device)
                for position in fit.positions:
                    position.when_made = lambda: restore(random, pl_module.device)
            fit.before_fetches = deque([random], maxlen=2)

        processing = patches.replace(trainer.strategy, "process_dataloader", process)
        private_resume_api.before_first_fetch(trainer, begin)
        private_resume_api.before_each_advance(trainer, lambda: self._begin_epoch(trainer))
        private_resume_api.around_validation(
            trainer, lambda: self._begin_validation(trainer), lambda: self._end_validation(trainer)
        )

    def _inspect(self, trainer: "pl.Trainer", loader: object) -> None:
        """Gives a training loader a state, unless it has one."""
        fit, patches = self._fit, Patches.of(trainer)
        if trainer.state.stage != RunningStage.TRAINING:
            if isinstance(loader, DataLoader) and loader.persistent_workers:
                _start_workers_aside(loader, patches)
            return
        if hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict"):
            return
        reason = why_unsupported(loader)
        if reason:
            self._tell_unsupported(reason)
            return
        if fit.positions_are_complete:  # loaders are created again
            fit.positions, fit.positions_are_complete = [], False
        assert isinstance(loader, DataLoader)
        if isinstance(loader.dataset, IterableDataset):
            fit.positions.append(StreamPosition(loader, patches))
        else:
            ranks = data_rank(trainer), num_data_ranks(trainer)
            fit.positions.append(LoaderPosition(loader, patches, *ranks, self._tell_unsupported))

    def _tell_unsupported(self, reason: str) -> None:
        text = f"ExactResume cannot resume the training loader: {reason}. A resumed run repeats samples of its epoch."
        if self.on_unsupported == "error":
            raise MisconfigurationException(text)
        rank_zero_warn(text)

    # -- moments -------------------------------------------------------------------------------------------------------

    def _begin_epoch(self, trainer: "pl.Trainer") -> None:
        fit, device = self._fit, trainer.lightning_module.device
        resumed, fit.resumed = fit.resumed, None
        if resumed is not None:
            restore(resumed["random"]["now"], device)
            for position, state in zip(fit.positions, _of_positions(resumed["loaders"]), strict=False):
                position.restore_generators(state)
            RankRNG.restore_kept(resumed["random"]["of_ranks"])
        fit.before_epoch = captured(device)

    @override
    def on_fit_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Lets no ``ModelCheckpoint`` write inside a window of the Trainer's own; our scheduler does so for its own."""

        def is_open() -> bool:
            return type(trainer.accumulate_grad_batches) is int and private_trainer_api.is_accumulating(trainer)

        defer_checkpoints(trainer, is_open)

    @override
    def on_train_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Keeps the random state before each fetch, if a batch may be repeated."""
        if self.record is not None and trainer.is_global_zero and trainer.ckpt_path is None:
            self.record.parent.mkdir(parents=True, exist_ok=True)
            self.record.unlink(missing_ok=True)
        fit = self._fit

        def keep(states: list[dict[str, Any]]) -> None:
            fit.before_fetches.append(captured(pl_module.device))

        private_resume_api.before_each_fetch(trainer, keep, always=saves_on_exception(trainer))

    def _begin_validation(self, trainer: "pl.Trainer") -> None:
        if not trainer.sanity_checking:
            fit, module = self._fit, trainer.lightning_module
            fit.before_validation = captured(module.device), metric_states(module)
            if private_resume_api.is_validation_of_the_stop(trainer):
                fit.before_stop = fit.before_validation[0], private_resume_api.validation_progress(trainer)

    def _end_validation(self, trainer: "pl.Trainer") -> None:
        self._fit.before_validation = None
        if self._fit.before_stop is not None:
            random, progress = self._fit.before_stop
            restore(random, trainer.lightning_module.device)
            private_resume_api.restore_validation_progress(trainer, progress)

    # -- record --------------------------------------------------------------------------------------------------------

    @override
    def on_train_batch_start(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", batch: Any, batch_idx: int
    ) -> None:
        """Hashes the batch."""
        if self.record is not None:
            zero = torch.zeros((), dtype=torch.int64, device=pl_module.device)
            batch_hash = bit_hash_of_nested(batch, pl_module.device)
            self._fit.hashes = dict.fromkeys(RECORDED_KINDS, zero) | {"batch": batch_hash}

    def needs_gradients(self, step_index: int) -> bool:
        """Whether gradients are hashed; called by the precision plugins."""
        return self.record is not None

    @override
    def on_before_optimizer_step(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", optimizer: Optimizer
    ) -> None:
        """Hashes the gradients."""
        if self.record is not None:
            gradients = [p.grad for p in pl_module.parameters() if p.grad is not None]
            self._fit.hashes["gradients"] = bit_hash(gradients, pl_module.device)

    @override
    def on_train_batch_end(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Hashes the rest, and writes one line."""
        if self.record is None:
            return
        hashes, device = self._fit.hashes, pl_module.device
        hashes["loss"] = bit_hash_of_nested(outputs, device)
        hashes["weights"] = bit_hash(pl_module.parameters(), device)
        states = [
            value
            for optimizer in trainer.optimizers
            for state in optimizer.state.values()
            for value in state.values()
            if isinstance(value, Tensor)
        ]
        hashes["state"] = bit_hash([*pl_module.buffers(), *states], device)
        stacked = torch.stack([hashes[kind] for kind in RECORDED_KINDS]) * (2 * trainer.global_rank + 1)
        if trainer.world_size > 1:
            dist.all_reduce(stacked)
        if trainer.is_global_zero:
            numbers = dict(zip(RECORDED_KINDS, stacked.tolist(), strict=True))
            write_record(self.record, trainer.fit_loop.epoch_loop.total_batch_idx, trainer.global_step, numbers)

    # -- ends ----------------------------------------------------------------------------------------------------------

    @override
    def on_validation_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Checkpoints after this were written after the validation."""
        self._end_validation(trainer)

    @override
    def on_train_epoch_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Keeps the metrics and the random state of an epoch that a later run continues, before hooks of its end."""
        if private_resume_api.is_epoch_cut(trainer):
            self._fit.of_cut_epoch, self._fit.at_end = _metrics(trainer), captured(pl_module.device)

    @override
    def on_train_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Keeps the random state of the end, for checkpoints that are written after the run."""
        self._fit.at_end = self._fit.at_end or captured(pl_module.device)

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    @override
    def on_save_checkpoint(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", checkpoint: dict[str, Any]
    ) -> None:
        """Adds the state of every rank; all ranks call this."""
        progress = checkpoint.get("loops", {}).get("fit_loop")
        if progress is None or self._is_tuning(trainer):
            return
        self._report_lost_gradient(trainer, progress)
        fit = self._fit
        metrics = fit.of_cut_epoch if fit.at_end is not None else None
        metrics = metrics or _metrics(trainer) | {"epoch_ends": private_resume_api.is_in_end_of_epoch(trainer)}
        if fit.before_validation is not None and progress["epoch_loop.batch_progress"]["current"]["completed"]:
            metrics["states"] = fit.before_validation[1]
            repeat_validation(progress)
        loaders = progress["state_dict"].get("combined_loader", [])
        if is_epoch_over(progress):
            for state in _of_positions(loaders):
                state["is_over"] = True
        own = {"random": self._random(trainer, progress), "loaders": loaders, "metrics": metrics}
        ranks = _gathered(own)
        checkpoint[EXACT_RESUME_KEY] = {"version": 1, "num_ranks": len(ranks), "per_rank": ranks}

    def _is_tuning(self, trainer: "pl.Trainer") -> bool:
        progress = RunState.of(trainer).callback(ResumableProgress)
        return progress is not None and progress.is_tuning

    def _report_lost_gradient(self, trainer: "pl.Trainer", progress: Mapping[str, Any]) -> None:
        """Of a window that is open; AccumulationScheduler keeps that of its own, or has warned already."""
        controller = AccumulationController.of(trainer)
        lost = controller.lost_window if controller is not None else None
        planned = trainer.accumulate_grad_batches
        is_of_trainer = type(planned) is int  # not the scheduler's answer to Lightning's two questions
        if is_of_trainer:
            batches = progress["epoch_loop.batch_progress"]
            position = 0 if batches["is_last_batch"] else batches["current"]["processed"] % planned
            lost = (planned, position) if position else None
        if lost is None:
            return
        # A checkpoint that is saved on an exception must not replace it by another one.
        if self.on_unsupported == "error" and not trainer.interrupted:
            raise MisconfigurationException(f"ExactResume(on_unsupported='error'): {lost_gradient_message(*lost)}")
        if is_of_trainer:
            rank_zero_warn(lost_gradient_message(*lost))

    def _random(self, trainer: "pl.Trainer", progress: Mapping[str, Any]) -> dict[str, Any]:
        """The random state from which a resumed run continues, and that of batches fetched ahead."""
        epochs, batches = progress["epoch_progress"]["current"], progress["epoch_loop.batch_progress"]["current"]
        fit, now = self._fit, captured(trainer.lightning_module.device)
        if fit.at_end is not None:
            now = fit.at_end
        elif fit.before_validation is not None:
            now = fit.before_validation[0]
        elif private_resume_api.is_in_start_of_epoch(trainer) and fit.before_epoch is not None:
            now = fit.before_epoch
        elif batches["ready"] > batches["processed"] and saves_on_exception(trainer):
            now = fit.before_fetches[-1]
        ahead = None
        if epochs["ready"] and private_resume_api.fetches_ahead(trainer):
            again = min(num_unprocessed_batches(trainer, progress), len(fit.before_fetches))
            ahead = fit.before_fetches[-again] if again else None
        return {"now": now, "ahead": ahead, "of_ranks": RankRNG.kept_states()}

    @override
    def on_load_checkpoint(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", checkpoint: dict[str, Any]
    ) -> None:
        """Restores the state of this rank and of its loaders.

        Raises:
            ValueError: if the state is damaged.
        """
        if trainer.state.fn != TrainerFn.FITTING or self._is_tuning(trainer):
            return
        saved = checkpoint.get(EXACT_RESUME_KEY)
        if saved is None:
            rank_zero_warn(
                "ExactResume: this checkpoint holds no random state and no position in the data, as its run had no"
                " ExactResume(). This run draws other random numbers and begins its epoch's data again."
            )
            return
        kinds = {"num_ranks": POSITIVE_COUNT, "per_rank": _LIST}
        values = checked_state(saved, kinds, "ExactResume")
        rank, num_ranks = trainer.global_rank, values["num_ranks"]
        own = checked_state(
            values["per_rank"][min(rank, num_ranks - 1)],
            {"random": MAPPING, "loaders": _LIST, "metrics": MAPPING},
            f"ExactResume on rank {rank}",
        )
        if num_ranks != trainer.world_size:
            rank_zero_warn(
                f"ExactResume: the checkpoint is of {num_ranks} ranks, this run has {trainer.world_size}. Each epoch"
                " continues with the samples that are left, in the same order; random numbers and the rounding of sums"
                " differ."
            )
            for state in _of_positions(own["loaders"]):
                state["last"] = None  # the ranks share the order, but each has other indices
        with random_state_kept(pl_module.device):
            restore(own["random"]["now"], pl_module.device)  # or says that it cannot
        checkpoint["loops"]["fit_loop"]["state_dict"]["combined_loader"] = own["loaders"]
        self._fit.resumed = own

    def _restore_metrics(self, trainer: "pl.Trainer") -> None:
        if self._fit.resumed is None:
            return
        metrics, module = self._fit.resumed["metrics"], trainer.lightning_module
        batches = trainer.fit_loop.epoch_loop.batch_progress.current.ready
        inside = bool(batches) and not metrics["epoch_ends"]
        private_results_api.restore_logged_results(trainer, metrics["logged"], inside_epoch=inside)
        restore_metric_states(module, metrics["states"])
        latest = {name: value.to(module.device) for name, value in metrics["latest"].items()}
        private_results_api.latest_metrics(trainer).update(latest)
        if metrics["epoch_ends"]:
            private_results_api.end_of_resumed_epoch(trainer)
        elif inside:
            private_results_api.log_resumed_batch(trainer)


def _of_positions(states: list[Any]) -> list[Any]:
    """Those that this package has written."""
    return [state for state in states if isinstance(state, dict) and "is_over" in state]


def _gathered(own: dict[str, Any]) -> list[Any]:
    """The states of all ranks, on rank 0; elsewhere this rank's alone."""
    if world_size() == 1:
        return [own]
    is_first = dist.get_rank() == 0
    ranks: list[Any] | None = [None] * world_size() if is_first else None
    dist.gather_object(own, ranks)
    return ranks if ranks is not None else [own]


def _start_workers_aside(loader: "DataLoader[Any]", patches: Patches) -> None:
    """Keeps the random state: a resumed run starts workers again, and would draw one seed more."""

    def get_iterator() -> Any:
        with random_state_kept(torch.device("cpu")):
            return get_iterator_patch.original()

    get_iterator_patch = patches.replace(loader, "_get_iterator", get_iterator)


def _metrics(trainer: "pl.Trainer") -> dict[str, Any]:
    """What the epoch has logged so far, and what is in its metrics."""
    latest = private_results_api.latest_metrics(trainer).items()
    return {
        "logged": private_results_api.logged_results(trainer),
        "states": metric_states(trainer.lightning_module),
        "latest": {name: value.detach().cpu().clone() for name, value in latest if isinstance(value, Tensor)},
        "epoch_ends": False,
    }


def metric_states(module: nn.Module) -> dict[str, Any]:
    """Of those that were updated since they were reset, by name.

    Example:
        >>> from torchmetrics.aggregation import MeanMetric
        >>> module, other = nn.ModuleDict({"mean": MeanMetric()}), nn.ModuleDict({"mean": MeanMetric()})
        >>> module["mean"].update(3.0)
        >>> restore_metric_states(other, metric_states(module))
        >>> float(other["mean"].compute())
        3.0
    """
    return {
        name: {"states": _copied(metric.metric_state, torch.device("cpu")), "updates": metric.update_count}
        for name, metric in module.named_modules()
        if isinstance(metric, Metric) and metric.update_count
    }


def restore_metric_states(module: nn.Module, saved: Mapping[str, Any]) -> None:
    """Restores metrics by name; those that the module no longer has are left out."""
    metrics = {name: metric for name, metric in module.named_modules() if isinstance(metric, Metric)}
    for name in saved.keys() & metrics.keys():
        metric = metrics[name]
        set_metric_state(metric, _copied(saved[name]["states"], metric.device), saved[name]["updates"])


def _copied(states: Any, device: torch.device) -> Any:
    return apply_to_collection(states, Tensor, lambda value: value.detach().to(device, copy=True))


_LIST = Schema("a list", lambda value: isinstance(value, list))
