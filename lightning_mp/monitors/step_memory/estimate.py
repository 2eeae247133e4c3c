"""How much memory a training step takes, by part, measured on the user's own module without running it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, get_args

from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_mp.ground.core import private_sharding_api
from lightning_mp.ground.core.arguments import whole_number
from lightning_mp.ground.core.pictures import check_picture_ending
from lightning_mp.ground.core.precisions import PrecisionLike, PrecisionSpec, find_precision
from lightning_mp.ground.core.quantities import format_bytes
from lightning_mp.ground.core.text_columns import aligned
from lightning_mp.monitors.step_memory.kernels import CUDA_WORKSPACE_BYTES
from lightning_mp.monitors.step_memory.live_storages import PARTS, MemorySample, Part
from lightning_mp.monitors.step_memory.sharded_units import SYNCS, GradientSync, Sharding
from lightning_mp.monitors.step_memory.simulated_step import DDPGradients, StepFunction, simulate_step
from lightning_mp.monitors.step_memory.stand_in_optimizer import OptimizerFactory
from lightning_mp.training.policy.policy import PrecisionPolicy
from lightning_mp.training.policy.unit_selection import Shard

MemoryStrategy = Literal["single", "ddp", "fsdp2"]
# Rajbhandari et al. 2020, arXiv:1910.02054, section 3.2: in extreme cases out of memory with over 30% of it free.
_WORST_FRAGMENTATION = 0.3
_CONTEXT_BYTES = 1024**3  # CUDA context, cuBLAS and NCCL workspaces: an allowance, not measured


def reserved_range(live_bytes: float) -> tuple[int, int]:
    """Memory that a GPU needs for n live bytes: a range, because the caching allocator was not measured.

    From nothing lost at all, to 30% of what is reserved lost to fragmentation (the extreme that ZeRO's authors report)
    and 1 GiB for the context and the workspaces of libraries.

    >>> [round(bytes / 1024**3, 1) for bytes in reserved_range(10 * 1024**3)]
    [10.0, 15.3]
    """
    return int(live_bytes), int(live_bytes / (1 - _WORST_FRAGMENTATION) + _CONTEXT_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Live bytes of one rank over one training step."""

    samples: tuple[MemorySample, ...]  #: what is alive after each operation of the step that changes it.
    precision: str  #: name of a row of :data:`~lightning_mp.ground.core.precisions.PRECISIONS`.
    strategy: MemoryStrategy  #: how the ranks share the model.
    ranks: int  #: how many there are.
    device_type: str  #: the device that it is an estimate for.

    @property
    def peak(self) -> MemorySample:
        """The moment at which most is alive."""
        return max(self.samples, key=lambda sample: sample.total_bytes)

    @property
    def peak_bytes(self) -> int:
        """Bytes of all live tensors at the peak."""
        return self.peak.total_bytes

    @property
    def end_of_forward(self) -> MemorySample:
        """The moment at which everything that backward needs is saved."""
        return next(sample for sample in reversed(self.samples) if sample.phase == "forward")

    @property
    def saved_bytes(self) -> int:
        """Saved for backward: activations and casts of weights."""
        saved = self.end_of_forward.bytes_by_part
        return saved.get("activations", 0) + saved.get("weight casts", 0)

    @property
    def reserved_bytes(self) -> tuple[int, int]:
        """Lower and upper bound of what a GPU needs; see :func:`reserved_range`."""
        return reserved_range(self.peak_bytes)

    def plot(self, path: str | Path) -> None:
        """Draws the parts over the step; needs matplotlib.

        Args:
            path: file to write: png, pdf or svg.
        """
        draw_timeline(self, Path(path))

    @override
    def __str__(self) -> str:
        peak, end = self.peak.bytes_by_part, self.end_of_forward.bytes_by_part
        shown = [part for part in PARTS if peak.get(part) or end.get(part)]
        ranks = f"each of {self.ranks} ranks" if self.ranks > 1 else "one rank"
        where = "one device" if self.strategy == "single" else f"{ranks} under {self.strategy}"
        rows = [(str(part), format_bytes(end.get(part, 0)), format_bytes(peak.get(part, 0))) for part in shown]
        rows.append(("sum", format_bytes(self.end_of_forward.total_bytes), format_bytes(self.peak_bytes)))
        low, high = self.reserved_bytes
        lines = [
            f"Live tensors on {where}, {self.precision}; peak in the {self.peak.phase}",
            *(f"  {line}" for line in aligned([("", "end of forward", "peak"), *rows])),
        ]
        if self.device_type != "cpu":
            lines.append(f"A GPU needs {format_bytes(low)} to {format_bytes(high)}: its allocator was not measured.")
        return "\n".join(lines)


def estimate_memory(
    module: nn.Module,
    batch: Any,
    step: StepFunction | None = None,
    *,
    precision: PrecisionLike = "32-true",
    optimizer: str | OptimizerFactory | None = None,
    policy: PrecisionPolicy | Mapping[str, str] | None = None,
    strategy: MemoryStrategy = "single",
    ranks: int = 1,
    units: Shard | None = None,
    gradient_as_bucket_view: bool = False,
    accumulate_grad_batches: int | None = None,
    sync: GradientSync = "micro_batch",
    device_type: str = "cuda",
) -> MemoryEstimate:
    """Estimates the memory of one training step, on one device or on each of several ranks.

    The step runs on fake tensors, which have a shape and a dtype but no data: nothing is computed, no memory is used.
    It measures the module's own code, the casts of the precision, saved tensors, activation checkpoints and the
    optimizer's step; there are no formulas. The module is not changed.

    Hugging Face models create a mask, and repeat the keys and values of grouped queries, for a padded batch: one whose
    ``attention_mask`` has a zero. A mask under another name, or on the meta device, is assumed to hide no token, and
    positions to be those of one sequence.

    The order of events is Lightning's: with its own plugins, gradients of the previous step live until the forward has
    ended; those of earlier micro-batches live through forward and backward. Operations count with their outputs. Of the
    workspaces of kernels, those of cuBLAS and, with one thread, of a CPU's oneDNN are included; those of cuDNN are not.

    Args:
        module: any module; for a LightningModule, ``training_step`` and ``configure_optimizers`` are used. Parameters
            without ``requires_grad`` have no gradient. Wrap blocks for activation checkpointing beforehand.
        batch: one micro-batch of one rank. Tensors may be on any device, including "meta".
        step: a function of module and batch that returns the loss; None uses ``training_step``, or the module's
            forward: it is called with a tensor, with a list or tuple as positional or with a mapping as keyword
            arguments, and the loss is its result's attribute ``loss``, or the sum.
        precision: a name of :data:`~lightning_mp.ground.core.precisions.PRECISIONS`, or a precision plugin.
        optimizer: a class of ``torch.optim`` by name, or a function from parameters to an optimizer. None uses
            ``configure_optimizers``, or AdamW.
        policy: a :class:`~lightning_mp.PrecisionPolicy` or its rules; None uses that of the plugin.
        strategy: "single", "ddp", or "fsdp2" (ZeRO stage 3).
        ranks: number of data-parallel ranks.
        units: with "fsdp2": modules that are gathered one after the other, as ``FSDP2Strategy(shard=...)`` takes them;
            None finds repeated blocks.
        gradient_as_bucket_view: with "ddp": as in ``DDPStrategy``.
        accumulate_grad_batches: micro-batches per optimizer step. None is that of the Trainer that the module is
            attached to, or 1.
        sync: with "fsdp2": as in :class:`~lightning_mp.AccumulationScheduler`; "micro_batch" is what FSDP2 does without
            it, "window" holds whole gradients in fp32.
        device_type: the device type to estimate for: its autocast lists and, on "cuda", foreach optimizers by default.

    Returns:
        Bytes by part over the step.

    Raises:
        ValueError: an argument is unknown, the module is sharded, has sparse gradients or, for a CPU, an
            ``nn.LSTM``, the step reads numbers of tensors, or the optimizer cannot step fake tensors.

    Source:
        What is kept per parameter: Rajbhandari et al. 2020, arXiv:1910.02054, section 3.1.

    Example:
        Autocast halves what is saved for backward, and nothing of what is kept per parameter:

        >>> from torch import zeros
        >>> model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256))
        >>> for precision in ("32-true", "bf16-mixed"):
        ...     parts = estimate_memory(model, zeros(1024, 256), precision=precision).end_of_forward.bytes_by_part
        ...     print(parts["weights"], parts["optimizer states"], parts["activations"])
        789504 1579032 2097152
        789504 1579032 1572864
    """
    row = find_precision(precision)
    _check(module, strategy, ranks, units, device_type)
    if batch is None or isinstance(batch, DataLoader):
        raise ValueError(f"`batch` must be one batch, got {type(batch).__name__}. Pass next(iter(loader)).")
    window = _window(module, accumulate_grad_batches)
    if sync not in SYNCS:
        raise ValueError(f"`sync` {sync!r} is not known. Use one of {', '.join(SYNCS)}.")
    sharding = None
    if strategy == "fsdp2":
        sharding = Sharding(ranks=ranks, units="auto" if units is None else units, sync=sync)
    chosen = _policy(policy, precision, row)
    # Earlier micro-batches of a window reduce nothing: their gradients are no views.
    views = gradient_as_bucket_view and window == 1
    ddp: DDPGradients = "views" if views else "copied to buckets"
    samples = simulate_step(
        module,
        batch,
        step,
        optimizer=optimizer,
        precision=row,
        policy=chosen,
        device_type=device_type,
        accumulates=window > 1,
        ddp_gradients=ddp if strategy == "ddp" else None,
        sharding=sharding,
    )
    if strategy == "ddp":
        samples = under_ddp(samples, gradients_are_views=views)
    if device_type == "cuda":
        samples = [_with(sample, {"workspaces": CUDA_WORKSPACE_BYTES}) for sample in samples]
    return MemoryEstimate(
        samples=tuple(samples), precision=row.name, strategy=strategy, ranks=ranks, device_type=device_type
    )


def _policy(
    policy: PrecisionPolicy | Mapping[str, str] | None, precision: PrecisionLike, row: PrecisionSpec
) -> PrecisionPolicy | None:
    """The rules to estimate with: those given, those of the plugin, or the default of a precision by name."""
    of_name = PrecisionPolicy.default() if row.master_bytes and isinstance(precision, str) else None
    rules = policy if policy is not None else getattr(precision, "policy", of_name)
    if rules is not None and not (row.autocast or row.master_bytes):
        raise ValueError(f"`policy` needs a precision that has one, got {row.name!r}. Use bf16-mixed, or leave it out.")
    return rules if rules is None or isinstance(rules, PrecisionPolicy) else PrecisionPolicy(rules)


def _window(module: nn.Module, accumulate_grad_batches: int | None) -> int:
    if accumulate_grad_batches is None:
        trainer = getattr(module, "_trainer", None)
        accumulate_grad_batches = int(getattr(trainer, "accumulate_grad_batches", 1))
    return whole_number(accumulate_grad_batches, "accumulate_grad_batches")


def _check(module: nn.Module, strategy: str, ranks: int, units: object, device_type: str) -> None:
    if not isinstance(module, nn.Module):
        raise ValueError(f"`module` must be a torch.nn.Module, got {module!r}.")
    if strategy not in get_args(MemoryStrategy):
        raise ValueError(f"`strategy` {strategy!r} is not known. Use one of {', '.join(get_args(MemoryStrategy))}.")
    whole_number(ranks, "ranks")
    if strategy == "single" and ranks > 1:
        raise ValueError(f"`ranks` is {ranks} and `strategy` is 'single'. Pass strategy='ddp' or strategy='fsdp2'.")
    if units is not None and strategy != "fsdp2":
        raise ValueError(f"`units` belongs to strategy='fsdp2', got strategy={strategy!r}. Leave it out.")
    if device_type == "cpu" and any(isinstance(part, nn.LSTM) for part in module.modules()):
        raise ValueError(
            "estimate_memory() does not know what oneDNN's LSTM keeps on a CPU. Measure a step there, or pass"
            " device_type='cuda'."
        )
    if any(isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse for part in module.modules()):
        raise ValueError(
            "estimate_memory() does not know what sums of sparse gradients take. Measure a step, or pass the module"
            " with sparse=False."
        )
    if any(isinstance(p, DTensor) or private_sharding_api.is_flat_shard(p) for p in module.parameters()):
        raise ValueError(
            "estimate_memory() was given a module with sharded parameters. Pass the whole module, strategy= and ranks=."
        )


def draw_timeline(estimate: MemoryEstimate, path: Path) -> None:
    """Draws the parts on top of each other, over the operations of the step."""
    check_picture_ending(path)
    from matplotlib.figure import Figure

    samples = estimate.samples
    unit, name = (2**30, "GiB") if estimate.peak_bytes >= 2**30 else (2**20, "MiB")
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.subplots()
    shown = [part for part in PARTS if any(sample.bytes_by_part.get(part) for sample in samples)]
    heights = [[sample.bytes_by_part.get(part, 0) / unit for sample in samples] for part in shown]
    axes.stackplot(range(len(samples)), heights, labels=shown, step="post")
    for index, sample in enumerate(samples):
        if index == 0 or samples[index - 1].phase != sample.phase:
            axes.axvline(index, color="black", linewidth=0.6)
            side = "right" if index > 0.8 * len(samples) else "left"
            place = len(samples) - 1 if side == "right" else index
            axes.text(place, 1.01, sample.phase, ha=side, va="bottom", transform=axes.get_xaxis_transform())
    axes.set(xlabel="operations that change it", ylabel=f"live tensors, {name}", xlim=(0, max(len(samples) - 1, 1)))
    axes.set_ylim(0, estimate.peak_bytes / unit * 1.05)
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    ranks = "" if estimate.ranks == 1 else f" on {estimate.ranks} ranks, each of them"
    axes.set_title(f"{estimate.precision}, {estimate.strategy}{ranks}", fontsize="medium", pad=20)
    figure.savefig(path)


def under_ddp(samples: Sequence[MemorySample], *, gradients_are_views: bool = False) -> list[MemorySample]:
    """Every rank holds everything; gradients are there a second time, in the buckets that are reduced.

    As views of the buckets, gradients are there once, and always: they are cleared, but not freed. In backward one at a
    time comes on top, until it is copied.

    Source:
        Li et al. 2020, arXiv:2006.15704, section 3.2; torch's DistributedDataParallel makes the buckets when it wraps
        the model.
    """
    buckets: dict[Part, int] = {"communication buffers": samples[-1].bytes_by_part.get("gradients", 0)}
    are_in_buckets: dict[Part, int] = {"gradients": 0} if gradients_are_views else {}
    return [_with(sample, buckets if sample.phase == "backward" else buckets | are_in_buckets) for sample in samples]


def _with(sample: MemorySample, extra: Mapping[Part, int]) -> MemorySample:
    both = {**sample.bytes_by_part, **extra}
    return MemorySample(sample.phase, MappingProxyType({part: both[part] for part in PARTS if both.get(part)}))
