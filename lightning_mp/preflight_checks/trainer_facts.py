"""What a preflight reads off a Trainer: precision, device, how long it trains, and a budget."""

import math
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy

from lightning_mp.accumulation.step_estimate import estimate_steps
from lightning_mp.core import private_loop_api
from lightning_mp.core.precisions import PRECISIONS, PrecisionSpec, find_precision
from lightning_mp.core.private_api import callbacks_of
from lightning_mp.distributed.data_ranks import num_data_ranks
from lightning_mp.planning.advice.device_traits import DeviceTraits, find_device, named_device
from lightning_mp.preflight_checks.data_facts import FoundData
from lightning_mp.preflight_checks.found import FoundBudget, FoundPrecision, FoundRun
from lightning_mp.preflight_checks.module_facts import own_scalers
from lightning_mp.tokens.batch_tokens import shifts_labels_inside
from lightning_mp.tokens.loss_weighting import Weighting


def device_of(trainer: "pl.Trainer", name: str | None) -> DeviceTraits:
    """The device that the run is for: by name, or the Trainer's."""
    if name is not None:
        return named_device(name)
    kind = trainer.strategy.root_device.type
    return find_device() if kind == "cuda" else named_device("mps" if kind == "mps" else "cpu")


def available_bytes(trainer: "pl.Trainer", device: DeviceTraits, name: str | None) -> int | None:
    """Memory that the run can have; None where it shares that of the host, or is not known."""
    if name is not None or device.accelerator != "cuda":
        return device.memory_bytes
    root = trainer.strategy.root_device
    return int(torch.cuda.mem_get_info(root)[0] + torch.cuda.memory_reserved(root))


def storage_of(trainer: "pl.Trainer") -> PrecisionSpec:
    """What the precision stores; that of fp32 for precisions that estimates of memory do not know."""
    try:
        return find_precision(trainer.precision_plugin)
    except ValueError:
        return PRECISIONS["32-true"]


def precision_of(trainer: "pl.Trainer", module: "pl.LightningModule") -> FoundPrecision:
    """What the run computes in."""
    plugin, strategy = trainer.precision_plugin, trainer.strategy
    scaler = getattr(plugin, "scaler", None)
    name = str(plugin.precision)
    twice = isinstance(strategy, FSDPStrategy) and strategy.mixed_precision is not None and name != "32-true"
    return FoundPrecision(
        name=name,
        plugin=f"{type(plugin).__name__}({name!r})",
        has_masters=bool(storage_of(trainer).master_bytes),
        has_scaler=scaler is not None and bool(scaler.is_enabled()),
        needs_closure=type(plugin).optimizer_step is MixedPrecision.optimizer_step,
        emulates_fp8=bool(getattr(plugin, "emulate", False)),
        own_scalers=own_scalers(module),
        of_strategy=f"{type(strategy).__name__}(mixed_precision=...)" if twice else "",
    )


def run_of(trainer: "pl.Trainer", module: "pl.LightningModule", data: FoundData | None) -> FoundRun:
    """How long the run is, before or in a fit."""
    strategy = trainer.strategy
    number = data.batches_per_epoch if data is not None else None
    if data is None or not data.is_limited:
        number = _limited(number, trainer.limit_train_batches)
    epochs = None if trainer.max_epochs in (None, -1) else trainer.max_epochs
    max_steps = None if trainer.max_steps == -1 else trainer.max_steps
    lengths, steps = _windows(trainer, number, epochs, max_steps)
    return FoundRun(
        micro_batches_per_epoch=number,
        epochs=epochs,
        steps=steps if module.automatic_optimization else max_steps,
        max_steps=max_steps,
        window_lengths=lengths,
        data_ranks=data_ranks_of(trainer),
        is_manual=not module.automatic_optimization,
        needs_all_gradients=isinstance(strategy, DDPStrategy)
        and not private_loop_api.ddp_arguments(strategy).get("find_unused_parameters", False),
    )


def data_ranks_of(trainer: "pl.Trainer") -> int:
    """Ranks that see different data; of strategies that only know it in a run, the number of all ranks."""
    try:
        return num_data_ranks(trainer)
    except (RuntimeError, AssertionError, AttributeError):
        return trainer.world_size


def _limited(batches: int | None, limit: int | float | None) -> int | None:
    if limit is None or (isinstance(limit, float) and limit == 1.0):
        return batches
    if isinstance(limit, int):
        return limit if batches is None else min(batches, limit)
    return None if batches is None else int(batches * limit)


def _windows(
    trainer: "pl.Trainer", batches: int | None, epochs: int | None, max_steps: int | None
) -> tuple[frozenset[int], int | None]:
    """Micro-batches per optimizer step, all that the run may use, and optimizer steps of the run."""
    scheduler: Any = next((one for one in callbacks_of(trainer) if hasattr(one, "scheduling")), None)
    if scheduler is None:
        window = int(trainer.accumulate_grad_batches)
        per_epoch = None if batches is None else math.ceil(batches / window)
        known = None if epochs is None or per_epoch is None else epochs * per_epoch
        limits = [limit for limit in (known, max_steps) if limit is not None]
        return frozenset({window}), min(limits, default=None)
    lengths = frozenset((scheduler.scheduling or {}).values())
    schedule = getattr(scheduler, "windows", None)
    if schedule is None or batches is None or not schedule.units <= {"epoch", "step"} or not lengths:
        return lengths, max_steps
    steps = estimate_steps(
        schedule,
        batches,
        max_epochs=-1 if epochs is None else epochs,
        max_steps=-1 if max_steps is None else max_steps,
        carry_over=scheduler.carry_over,
    )
    return lengths, None if steps == math.inf else int(steps)


def budget_of(trainer: "pl.Trainer", module: "pl.LightningModule", batch: Any) -> FoundBudget | None:
    """The budget of tokens, if there is one."""
    callback: Any = next((one for one in callbacks_of(trainer) if hasattr(one, "planned_tokens")), None)
    if callback is None:
        return None
    tokens = callback.budget_tokens or callback.planned_tokens(trainer, module)
    if tokens is None:
        return None
    counts_all = callback.tokens_per_parameter is not None and callback.parameters != "trainable"
    everything = sum(parameter.numel() for parameter in module.parameters())
    frozen = sum(parameter.numel() for parameter in module.parameters() if not parameter.requires_grad)
    weighting = Weighting("token", callback.count, shifted=shifts_labels_inside(module, batch))
    return FoundBudget(
        tokens=tokens,
        micro_batch_tokens=int(weighting.measure(batch).tokens) * data_ranks_of(trainer),
        frozen_fraction=frozen / everything if counts_all and everything else 0.0,
    )
