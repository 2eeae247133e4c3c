"""Is this Trainer set up right? Looks at everything, changes nothing, and reports."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.distributed.tensor import DTensor

from lightning_mp.ground.core import private_sharding_api, private_trainer_api
from lightning_mp.ground.core.messages import ABOUT_DTYPES
from lightning_mp.ground.core.private_trainer_api import callbacks_of
from lightning_mp.ground.core.random_state import random_state_kept
from lightning_mp.monitors.preflight_checks.checks import check_everything
from lightning_mp.monitors.preflight_checks.data_facts import FoundData, inspect_data
from lightning_mp.monitors.preflight_checks.found import Found, FoundCheckpoint, FoundMemory, FoundRun, FoundStep
from lightning_mp.monitors.preflight_checks.report import PreflightReport
from lightning_mp.monitors.preflight_checks.trainer_facts import (
    available_bytes,
    budget_of,
    data_ranks_of,
    device_of,
    inspect_checkpoint,
    layers_in_eval,
    layers_of,
    precision_of,
    run_of,
    storage_of,
    untied_embeddings,
    weights_of,
)
from lightning_mp.monitors.preflight_checks.watched_step import StandInTrainer, WatchedStep
from lightning_mp.monitors.step_memory.estimate import reserved_range, under_ddp
from lightning_mp.monitors.step_memory.kernels import CUDA_WORKSPACE_BYTES
from lightning_mp.monitors.step_memory.live_storages import MemorySample
from lightning_mp.monitors.step_memory.sharded_units import Sharding
from lightning_mp.monitors.step_memory.simulated_step import DDPGradients


class TrainerInspection:
    """One preflight; what goes wrong in one part of it does not end the others."""

    def __init__(self, trainer: "pl.Trainer", module: "pl.LightningModule", device: str | None = None) -> None:
        self._trainer, self._module = trainer, module
        self._device, self._device_name = device_of(trainer, device), device
        self._not_checked: list[tuple[str, str]] = []
        self._dtype_error = ""

    def at_data(self, data: Any) -> FoundData:
        """One micro-batch of what a user has given, and how many there are."""
        return inspect_data(
            data,
            self._module,
            data_ranks=data_ranks_of(self._trainer),
            shards_samples=private_trainer_api.uses_distributed_sampler(self._trainer),
            trainer=StandInTrainer(self._trainer, {}),
        )

    def report(self, at_data: Callable[[], FoundData], ckpt_path: str | Path | None) -> PreflightReport:
        """Looks at everything, and checks it."""
        device = self._module.device
        with random_state_kept(device if device.type != "meta" else torch.device("cpu")):
            found = self._look(at_data, ckpt_path)
        return PreflightReport(check_everything(found), tuple(dict.fromkeys(self._not_checked)))

    def _look(self, at_data: Callable[[], FoundData], ckpt_path: str | Path | None) -> Found:
        trainer, module = self._trainer, self._module
        given: FoundData | None = self._attempt("data", at_data)
        run = run_of(trainer, module, given)
        watched = self._attempt("training step", lambda: self._watch(given, run)) if given is not None else None
        built = module if watched is None or watched.copy is None or list(module.parameters()) else watched.copy
        optimized = watched.optimized if watched is not None else None
        with_gradient = watched.with_gradient if watched is not None and optimized is not None else None
        return Found(
            device=self._device,
            precision=precision_of(trainer, module, built),
            run=run,
            weights=weights_of(built, optimized, with_gradient),
            layers=layers_of(built),
            in_eval=layers_in_eval(built),
            untied=untied_embeddings(built),
            step=self._step(watched, given, run),
            schedulers=watched.schedulers if watched is not None else (),
            budget=self._attempt("budget", lambda: given and budget_of(trainer, module, given.batch)),
            memory=self._attempt("memory", lambda: self._memory(watched, run)),
            checkpoint=self._attempt("checkpoint", lambda: self._checkpoint(watched, ckpt_path)),
            dtype_error=self._dtype_error,
            refused_in_16_bit=watched.refused_in_16_bit if watched is not None else None,
            refusals=self._refusals(given) if given is not None else (),
        )

    def _attempt(self, what: str, look: Callable[[], Any]) -> Any:
        """What was seen; None, and a line in the report, if looking failed."""
        try:
            return look()
        except Exception as error:
            reason = str(error).partition("\n")[0] or "no message"
            self._cannot(what, reason if isinstance(error, ValueError) else f"{type(error).__name__}: {reason}")
            return None

    def _cannot(self, what: str, reason: str) -> None:
        self._not_checked.append((what, reason))

    def _refuse_shards(self) -> None:
        if any(isinstance(p, DTensor) or private_sharding_api.is_flat_shard(p) for p in self._module.parameters()):
            raise ValueError("the parameters are sharded. Call preflight() before the fit.")

    def _watch(self, data: FoundData, run: FoundRun, window: int | None = None) -> WatchedStep:
        self._refuse_shards()
        windows = sorted(run.window_lengths)
        answers = {
            "accumulate_grad_batches": window or (windows[-1] if windows else self._trainer.accumulate_grad_batches),
            "estimated_stepping_batches": _most_steps(run),
            "num_training_batches": run.micro_batches_per_epoch or float("inf"),
            "train_dataloader": data.loader,
            "datamodule": data.datamodule,
        }
        watched = WatchedStep(self._module, StandInTrainer(self._trainer, answers), is_set_up=self._trainer.training)
        plugin = self._trainer.precision_plugin
        step = partial(
            watched.run,
            data.batch,
            storage_of(self._trainer),
            getattr(plugin, "policy", None),
            self._device.accelerator,
            accumulates=max(windows, default=1) > 1,
            ddp_gradients=self._ddp_gradients(is_window=max(windows, default=1) > 1),
            sharding=self._sharding(),
        )
        self._attempt("training step", lambda: self._try_step(step))
        self._dtype_error = self._dtype_error or watched.mixed_dtypes
        for failed, reason in watched.failures:
            self._cannot(failed, reason)
        return watched

    def _try_step(self, step: Callable[[], None]) -> None:
        try:
            step()
        except RuntimeError as error:
            if not any(words in str(error) for words in ABOUT_DTYPES):
                raise
            self._dtype_error = str(error).partition("\n")[0]

    def _refusals(self, data: FoundData) -> tuple[tuple[str, str], ...]:
        """What callbacks would refuse in the fit with this batch."""
        found = []
        given: list[Any] = [*callbacks_of(self._trainer)]
        for callback in given:
            if isinstance(callback, type):
                name = callback.__name__
                found.append((name, f"The callback {name} is a class. Make an instance: callbacks=[{name}()]"))
                continue
            if not isinstance(callback, Callback):
                name = type(callback).__name__
                belongs = "Use Trainer(callbacks=[...]) for callbacks only"
                found.append((name, f"{name} was given among the callbacks and is none. {belongs}"))
                continue
            check = getattr(callback, "check_setup", None)
            if check is not None:
                try:
                    check(self._trainer, self._module, data.batch)
                except MisconfigurationException as error:
                    found.append((type(callback).__name__, str(error)))
        return tuple(dict.fromkeys(found))

    def _step(self, watched: WatchedStep | None, data: FoundData | None, run: FoundRun) -> FoundStep | None:
        """What the step did; where it divided its loss by the window's length, once more with another length."""
        found = watched.found if watched is not None else None
        if found is None or data is None or found.loss_divisor not in run.window_lengths - {1}:
            return found
        again = self._watch(data, run, window=int(found.loss_divisor) + 1).found
        return replace(found, divisor_follows=again is not None and again.loss_divisor == found.loss_divisor + 1)

    def _memory(self, watched: WatchedStep | None, run: FoundRun) -> FoundMemory | None:
        available = available_bytes(self._trainer, self._device, self._device_name)
        if watched is None or available is None or not watched.has_optimizers:
            return None
        if not watched.samples:
            if not self._module.automatic_optimization:
                self._cannot("memory", "the module makes its backwards itself (manual optimization).")
            return None
        samples = self._of_strategy(watched.samples, is_window=max(run.window_lengths, default=1) > 1)
        live = max(sample.total_bytes for sample in samples)
        live += CUDA_WORKSPACE_BYTES if self._device.accelerator == "cuda" else 0
        return FoundMemory(live_bytes=live, reserved_bytes=reserved_range(live)[1], available_bytes=available)

    def _ddp_gradients(self, *, is_window: bool) -> DDPGradients | None:
        strategy = self._trainer.strategy
        if not isinstance(strategy, DDPStrategy):
            return None
        views = bool(private_trainer_api.ddp_arguments(strategy).get("gradient_as_bucket_view"))
        return "views" if views and not is_window else "copied to buckets"

    def _sharding(self) -> Sharding | None:
        strategy, ranks = self._trainer.strategy, data_ranks_of(self._trainer)
        is_sharded = isinstance(strategy, FSDPStrategy | ModelParallelStrategy)
        return Sharding(ranks=ranks) if is_sharded else None

    def _of_strategy(self, samples: list[MemorySample], *, is_window: bool) -> list[MemorySample]:
        strategy = self._trainer.strategy
        if isinstance(strategy, FSDPStrategy):
            return samples
        if isinstance(strategy, ModelParallelStrategy) and data_ranks_of(self._trainer) == self._trainer.world_size:
            return samples
        if isinstance(strategy, SingleDeviceStrategy):
            return samples
        if isinstance(strategy, DDPStrategy):
            return under_ddp(samples, gradients_are_views=self._ddp_gradients(is_window=is_window) == "views")
        raise ValueError(f"memory under {type(strategy).__name__} is not known. Use estimate_memory().")

    def _checkpoint(self, watched: WatchedStep | None, path: str | Path | None) -> FoundCheckpoint | None:
        if path is None:
            return None
        self._refuse_shards()  # gathering them would wait for the other ranks
        sizes = watched.group_sizes if watched is not None else None
        rates = watched.learning_rates if watched is not None else ()
        built = self._module if watched is None or list(self._module.parameters()) else watched.copy
        translates = any(getattr(one, "translates_names", False) for one in callbacks_of(self._trainer))
        return inspect_checkpoint(path, built, sizes, rates, translates_names=translates)


def _most_steps(run: FoundRun) -> float:
    """Optimizer steps of the run; where a target batch leaves them unknown, its micro-batches."""
    if run.steps is not None:
        return run.steps
    if run.epochs is None or run.micro_batches_per_epoch is None:
        return float("inf")
    return run.epochs * run.micro_batches_per_epoch


def preflight(
    trainer: "pl.Trainer",
    module: "pl.LightningModule",
    data: Any = None,
    *,
    ckpt_path: str | Path | None = None,
    device: str | None = None,
) -> PreflightReport:
    """Checks a Trainer, a module and its data for mistakes before the first step.

    One training step of a copy of the module runs on fake tensors, which have a shape and no data: nothing is computed,
    and memory and time hardly depend on the size of the model. Module, Trainer, random generators and gradients are
    unchanged. What cannot be checked is listed in ``not_checked``, with the reason: a step that reads numbers
    (``.item()``, ``if loss > 1``), weights that are already sharded.

    Mistakes that the Trainer itself refuses are not checked: ``precision=`` beside a precision plugin, for instance,
    raises an error when the Trainer is created.

    Args:
        trainer: the Trainer, before or during a fit.
        module: the module to train.
        data: a LightningDataModule whose data are available; a loader; a mapping or list of loaders; or one batch. None
            uses the loaders of the module.
        ckpt_path: a single-file checkpoint, as it will be passed to ``trainer.fit``.
        device: target device, if the run is meant for another machine: a chip by name, such as "H100", or "cpu".

    Returns:
        The findings, the most severe first. ``print(report)`` shows them as a table.

    Raises:
        TypeError: if trainer or module is not from ``lightning.pytorch``.
        ValueError: if ``device`` is not known.

    Example:
        >>> import torch
        >>> from lightning_mp.language_model import LanguageModel
        >>> model = LanguageModel(layers=1, heads=1, width=8, total_steps=10, warmup_steps=1).bfloat16()
        >>> trainer = pl.Trainer(accelerator="cpu", max_steps=10, logger=False, enable_checkpointing=False)
        >>> tokens = torch.zeros(2, 8, dtype=torch.long)
        >>> print(preflight(trainer, model, [tokens, tokens]).findings[0].name)
        weights_in_16_bit
    """
    for name, given, wanted in (("trainer", trainer, pl.Trainer), ("module", module, pl.LightningModule)):
        if not isinstance(given, wanted):
            raise TypeError(
                f"preflight({name}=...) takes a lightning.pytorch.{wanted.__name__}, got"
                f" {type(given).__module__}.{type(given).__name__}. Use `import lightning.pytorch as pl`."
            )
    look = TrainerInspection(trainer, module, device)
    return look.report(lambda: look.at_data(data), ckpt_path)
