"""What a preflight reads off a Trainer, a module and a checkpoint: precision, weights, layers, length, and a budget."""

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy
from torch import Tensor, nn

from lightning_mp.ground.core import private_trainer_api
from lightning_mp.ground.core.precisions import PRECISIONS, PrecisionSpec, find_precision
from lightning_mp.ground.core.private_dispatch_api import holds_compiled_code
from lightning_mp.ground.core.private_trainer_api import callbacks_of
from lightning_mp.ground.core.trainer_ranks import num_data_ranks
from lightning_mp.ground.flops.device_traits import DeviceTraits, find_device, named_device
from lightning_mp.ground.modules.compiled_names import translated_names
from lightning_mp.ground.modules.names import named_modules
from lightning_mp.ground.modules.norms import BATCH_NORMS
from lightning_mp.monitors.preflight_checks.data_facts import FoundData
from lightning_mp.monitors.preflight_checks.found import (
    FoundBudget,
    FoundCheckpoint,
    FoundLayer,
    FoundPrecision,
    FoundRun,
    FoundWeight,
)
from lightning_mp.training.accumulation.schedule import Progress, TargetBatch, estimate_steps
from lightning_mp.training.tokens.batch_tokens import find_labels, shifts_labels_inside
from lightning_mp.training.tokens.loss_weighting import Weighting


def weights_of(
    module: nn.Module, optimized: frozenset[str] | None = None, with_gradient: frozenset[str] | None = None
) -> tuple[FoundWeight, ...]:
    """Every parameter once, with what a step has shown of it."""
    names: dict[Tensor, list[str]] = {}
    for owner, part in named_modules(module):
        for name, parameter in part.named_parameters(recurse=False):
            names.setdefault(parameter, []).append(f"{owner}.{name}".lstrip("."))
    return tuple(
        FoundWeight(
            names=tuple(own),
            dtype=str(parameter.dtype).removeprefix("torch."),
            elements=0 if nn.parameter.is_lazy(parameter) else parameter.numel(),
            is_trainable=parameter.requires_grad,
            memory=_address(parameter),
            is_optimized=None if optimized is None else not optimized.isdisjoint(own),
            has_gradient=None if with_gradient is None else not with_gradient.isdisjoint(own),
        )
        for parameter, own in names.items()
    )


def _address(parameter: Tensor) -> int | None:
    """Where its numbers begin; None for fake tensors, and for parts of flat buffers."""
    if type(parameter) is not nn.Parameter or parameter.device.type == "meta" or not parameter.numel():
        return None
    return parameter.data_ptr() or None


def layers_of(module: nn.Module) -> tuple[FoundLayer, ...]:
    """Layers that multiply matrices, and norms with running statistics."""
    found: dict[int, FoundLayer] = {}
    for name, part in named_modules(module):
        sizes = tuple(_sizes(part))
        learns = isinstance(part, BATCH_NORMS) and part.training and part.track_running_stats
        if sizes or learns:
            own = list(part.parameters(recurse=False))
            frozen = bool(own) and not any(parameter.requires_grad for parameter in own)
            found.setdefault(
                id(part), FoundLayer(name=name, sizes=sizes, learns_statistics=bool(learns), is_frozen=frozen)
            )
    return tuple(found.values())


def _sizes(part: nn.Module) -> Iterator[tuple[str, int]]:
    if isinstance(part, nn.Linear):
        yield from (("in_features", part.in_features), ("out_features", part.out_features))
    elif isinstance(part, nn.Conv1d | nn.Conv2d | nn.Conv3d) and part.groups == 1:
        yield from (("in_channels", part.in_channels), ("out_channels", part.out_channels))
    elif isinstance(part, nn.MultiheadAttention):
        yield from (("embed_dim", part.embed_dim), ("head_dim", part.head_dim))
    elif type(part).__name__ == "Conv1D":  # GPT-2's linear layer in transformers, with a transposed weight
        rows, columns = part.get_parameter("weight").shape
        yield from (("in_features", rows), ("out_features", columns))


# torch's classes; DropPath of timm and transformers, StochasticDepth of torchvision.
_DROPOUT = re.compile("Drop|StochasticDepth")


def layers_in_eval(module: nn.Module) -> tuple[str, ...]:
    """Layers of dropout and BatchNorm in eval mode that have trainable weights, or whose parent has."""
    parts = dict(named_modules(module))
    return tuple(name for name, part in parts.items() if not part.training and _differs(part) and _trains(parts, name))


def _differs(part: nn.Module) -> bool:
    """Whether a layer does something else in training."""
    if _DROPOUT.search(type(part).__name__):
        return any(isinstance(rate, float) and rate > 0 for rate in (vars(part).get("p"), vars(part).get("drop_prob")))
    if isinstance(part, nn.MultiheadAttention | nn.RNNBase):
        return part.dropout > 0
    return isinstance(part, BATCH_NORMS) and part.track_running_stats


def _trains(parts: Mapping[str, nn.Module], name: str) -> bool:
    own = list(parts[name].parameters())
    if not own and name:
        return _trains(parts, name.rpartition(".")[0])
    return any(parameter.requires_grad for parameter in own)


def own_scalers(module: nn.Module) -> tuple[str, ...]:
    """Names of attributes that are enabled gradient scalers."""
    return tuple(
        f"{owner}.{name}".lstrip(".")
        for owner, part in named_modules(module)
        for name, value in vars(part).items()
        if isinstance(value, torch.amp.GradScaler) and value.is_enabled()
    )


def untied_embeddings(module: nn.Module) -> tuple[str, ...]:
    """Of Hugging Face models whose config ties embeddings: those that are not."""
    found = []
    for name, part in named_modules(module):
        if "PreTrainedModel" not in {cls.__name__ for cls in type(part).__mro__}:
            continue
        owner: Any = part
        if not _requests_tied(owner):
            continue
        first, last = owner.get_input_embeddings(), owner.get_output_embeddings()
        if last is not None and first is not None and first.weight is not last.weight:
            found.append(f"input and output embeddings of {name or type(part).__name__}")
    return tuple(found)


def _requests_tied(model: Any) -> bool:
    config = model.config
    settings: Mapping[str, Any] = config.to_dict() if hasattr(config, "to_dict") else {}
    return bool(settings.get("tie_word_embeddings", False)) and hasattr(model, "get_output_embeddings")


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


def precision_of(trainer: "pl.Trainer", module: "pl.LightningModule", built: nn.Module) -> FoundPrecision:
    """What the run computes in; ``built`` has the layers."""
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
        no_fp8_layer=_no_fp8_layer(plugin, built),
        is_compiled=any(holds_compiled_code(part) for part in (*module.modules(), *built.modules())),
        takes_a_policy=hasattr(plugin, "policy"),
        emulates_fp8=bool(getattr(plugin, "emulate", False)),
        own_scalers=own_scalers(module),
        of_strategy=f"{type(strategy).__name__}(mixed_precision=...)" if twice else "",
    )


def _no_fp8_layer(plugin: Any, built: nn.Module) -> str:
    choose = getattr(plugin, "choose_layers", None)
    if choose is None or not list(built.parameters()):
        return ""
    try:
        return plugin.why_no_layer(choose(built)) or ""
    except ValueError as error:  # an entry of skip, or a rule of a policy, that matches nothing
        return str(error)


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
        clip_value=trainer.gradient_clip_val,
        detects_anomalies=private_trainer_api.detects_anomalies(trainer),
        is_manual=not module.automatic_optimization,
        needs_all_gradients=isinstance(strategy, DDPStrategy)
        and not private_trainer_api.ddp_arguments(strategy).get("find_unused_parameters", False),
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
    if callback.count is None and find_labels(batch) is None:
        return None  # the callback refuses it
    weighting = Weighting("token", callback.count, shifted=shifts_labels_inside(module, batch))
    ranks = data_ranks_of(trainer)
    scheduler: Any = next((one for one in callbacks_of(trainer) if hasattr(one, "scheduling")), None)
    schedule = getattr(scheduler, "windows", None)
    window = None
    if isinstance(schedule, TargetBatch):
        samples, input_tokens = weighting.size(batch, schedule.units)
        sizes = {"micro_batch_samples": samples * ranks, "micro_batch_tokens": input_tokens * ranks}
        window = max(schedule.micro_batches(Progress(at, at, at, at, **sizes)) for at in schedule.targets)
    return FoundBudget(
        tokens=tokens,
        micro_batch_tokens=int(weighting.measure(batch).tokens) * ranks,
        window_micro_batches=window,
        frozen_fraction=frozen / everything if counts_all and everything else 0.0,
    )


def inspect_checkpoint(
    path: str | Path,
    module: nn.Module,
    own_optimizers: tuple[tuple[int, ...], ...] | None,
    own_learning_rates: tuple[float, ...],
    *,
    translates_names: bool = False,
) -> FoundCheckpoint:
    """Compares a checkpoint of Lightning's in one file with a module and its optimizers."""
    file = Path(path)
    if not file.is_file():
        what = "a folder of shards, which is read on the ranks" if file.is_dir() else "no file"
        raise ValueError(f"{file} is {what}.")
    try:
        content = torch.load(file, map_location="meta", mmap=True, weights_only=True)
    except Exception as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"{file} cannot be read without running code from it ({reason}).") from error
    if not isinstance(content, Mapping) or "state_dict" not in content:
        raise ValueError(f"{file} is not a Lightning checkpoint: it has no 'state_dict'.")
    saved, own = content["state_dict"], module.state_dict()
    translated = translated_names(saved, own) if translates_names else {}
    saved = {translated.get(name, name): value for name, value in saved.items()}
    groups = [list(one["param_groups"]) for one in content.get("optimizer_states", [])]
    return FoundCheckpoint(
        path=file.name,
        missing=tuple(name for name in own if name not in saved),
        unexpected=tuple(name for name in saved if name not in own),
        reshaped=tuple(name for name in own if name in saved and _shape(own[name]) != _shape(saved[name])),
        optimizers=tuple(tuple(len(group["params"]) for group in one) for one in groups) or None,
        own_optimizers=own_optimizers,
        learning_rates=tuple(float(group.get("initial_lr", group.get("lr", 0.0))) for one in groups for group in one),
        own_learning_rates=own_learning_rates,
        global_step=int(content.get("global_step", 0)),
        epochs_done=_epochs_done(content),
        has_scale=any(_is_scale(state) for state in content.values()),
    )


def _shape(value: Any) -> Any:
    return value.shape if isinstance(value, Tensor) else None


def _epochs_done(content: Mapping[str, Any]) -> int:
    progress = content.get("loops", {}).get("fit_loop", {}).get("epoch_progress", {})
    return int(progress.get("current", {}).get("processed", 0))


def _is_scale(state: Any) -> bool:
    """What torch's GradScaler saves, alone or in the state of a plugin."""
    return isinstance(state, Mapping) and any("growth_factor" in one for one in _mappings(state))


def _mappings(state: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    yield state
    for value in state.values():
        if isinstance(value, Mapping):
            yield value
