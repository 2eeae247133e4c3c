"""What a preflight has found in a Trainer, a module and its data: plain values, which the checks read."""

from dataclasses import dataclass, field
from typing import Literal

from lightning_mp.core.precisions import format_of
from lightning_mp.planning.advice.device_traits import DeviceTraits

__all__ = [
    "AfterItsEnd",
    "Found",
    "FoundBudget",
    "FoundCheckpoint",
    "FoundLayer",
    "FoundMemory",
    "FoundPrecision",
    "FoundRun",
    "FoundScheduler",
    "FoundStep",
    "FoundWeight",
]

AfterItsEnd = Literal["raises", "rises", "zero", "stays"]
"""What a scheduler does when it is stepped more often than it was planned for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundPrecision:
    """What the run computes in.

    Attributes:
        name: as Lightning writes it, "16-mixed".
        plugin: how messages name the plugin.
        has_masters: 16-bit weights have fp32 masters.
        has_scaler: losses are scaled by the plugin.
        needs_closure: the plugin makes a step only where ``optimizer.step`` is given the closure.
        emulates_fp8: fp8 was asked for without the units.
        own_scalers: attributes of the module that are enabled ``GradScaler`` objects.
        of_strategy: a second setting for precision, at the strategy; "" for none.
    """

    name: str = "32-true"
    plugin: str = "Precision()"
    has_masters: bool = False
    has_scaler: bool = False
    needs_closure: bool = False
    emulates_fp8: bool = False
    own_scalers: tuple[str, ...] = ()
    of_strategy: str = ""

    @property
    def base(self) -> str:
        """The format of matrix products; "" where it is not known."""
        return format_of(self.name) or ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundWeight:
    """One parameter.

    Attributes:
        names: every name that it has; several where it is tied.
        dtype: "float32", "bfloat16", ...
        elements: how many.
        is_trainable: what ``requires_grad`` says.
        memory: the same number for parameters that begin at the same address; None where it has no memory yet.
        is_optimized: an optimizer was given it; None where that was not seen.
        has_gradient: the step has given it one; None where that was not seen.
    """

    names: tuple[str, ...]
    dtype: str = "float32"
    elements: int = 1
    is_trainable: bool = True
    memory: int | None = None
    is_optimized: bool | None = None
    has_gradient: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundLayer:
    """A layer that multiplies matrices, or one with running statistics.

    Attributes:
        name: of the module.
        sizes: names and sizes of the dimensions that were chosen with the model.
        learns_statistics: it is in training mode, and updates running statistics.
        is_frozen: it has weights, and none of them is trainable.
    """

    name: str
    sizes: tuple[tuple[str, int], ...] = ()
    learns_statistics: bool = False
    is_frozen: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundScheduler:
    """A learning-rate scheduler that was planned for a number of calls.

    Attributes:
        name: its class.
        setting: the argument that was read.
        planned: how many calls it was planned for; ``math.inf`` where the length of the run was not known.
        interval: what Lightning calls it after: "step" or "epoch".
        frequency: after every how many of these.
        after_its_end: what it does when it is called more often.
    """

    name: str
    setting: str
    planned: int | float
    interval: str
    frequency: int = 1
    after_its_end: AfterItsEnd = "stays"


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundRun:
    """How long the run is.

    Attributes:
        micro_batches_per_epoch: of one rank; None where the data have no length.
        epochs: ``max_epochs``; None for no limit.
        steps: optimizer steps of the whole run; None where they are not known.
        max_steps: None for no limit.
        window_lengths: micro-batches per optimizer step, all that the run may use.
        data_ranks: ranks that see different data.
        is_manual: the module steps its optimizers itself.
        needs_all_gradients: DDP waits for the gradient of every trainable parameter.
    """

    micro_batches_per_epoch: int | None = None
    epochs: int | None = None
    steps: int | None = None
    max_steps: int | None = None
    window_lengths: frozenset[int] = frozenset({1})
    data_ranks: int = 1
    is_manual: bool = False
    needs_all_gradients: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundStep:
    """What one step did, on fake tensors.

    Attributes:
        loss_divisor: the last operation divided the loss by this number.
        divisor_follows: it was another one when ``trainer.accumulate_grad_batches`` was.
        raw_backwards: gradients came without ``manual_backward``.
        raw_steps: classes of optimizers that were stepped past Lightning's wrapper.
        closure_before_step: ``optimizer_step`` ran the closure itself and stepped without it.
        ignores_clipping: ``configure_gradient_clipping`` was given a value and did nothing.
        draws_anew: random numbers of recomputed modules differ from those of their forward.
    """

    loss_divisor: float | None = None
    divisor_follows: bool = False
    raw_backwards: bool = False
    raw_steps: tuple[str, ...] = ()
    closure_before_step: bool = False
    ignores_clipping: bool = False
    draws_anew: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundBudget:
    """A budget of tokens.

    Attributes:
        tokens: that the run is to train on.
        micro_batch_tokens: target tokens of one micro-batch over all ranks; None where they were not counted.
        frozen_fraction: share of the parameters behind the budget that is frozen.
    """

    tokens: int
    micro_batch_tokens: int | None = None
    frozen_fraction: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundMemory:
    """What one micro-batch takes on one device.

    Attributes:
        live_bytes: of all live tensors at the peak.
        reserved_bytes: with the most that an allocator loses.
        available_bytes: of the device.
    """

    live_bytes: int
    reserved_bytes: int
    available_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundCheckpoint:
    """A checkpoint beside the run that is to resume from it.

    Attributes:
        path: as it was given.
        missing: names that the module has and the checkpoint has not.
        unexpected: names that the checkpoint has and the module has not.
        reshaped: names with another shape.
        optimizers: parameters per group of each optimizer in the checkpoint; None where there are none.
        own_optimizers: the same of the run; None where they were not seen.
        learning_rates: of each group in the checkpoint, before any schedule.
        own_learning_rates: the same of the run.
        global_step: of the checkpoint.
        epochs_done: of the checkpoint.
        has_scale: it holds the state of a loss scale.
    """

    path: str
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    reshaped: tuple[str, ...] = ()
    optimizers: tuple[tuple[int, ...], ...] | None = None
    own_optimizers: tuple[tuple[int, ...], ...] | None = None
    learning_rates: tuple[float, ...] = ()
    own_learning_rates: tuple[float, ...] = ()
    global_step: int = 0
    epochs_done: int = 0
    has_scale: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """All of it; None or empty where something was not seen.

    Attributes:
        device: that the run is for.
        precision: what it computes in.
        run: how long it is.
        weights: every parameter.
        layers: that multiply matrices or have running statistics.
        untied: embeddings that a config says are tied, and are not.
        step: what a training step did.
        schedulers: that were planned for a number of calls.
        budget: of tokens.
        memory: of one micro-batch.
        checkpoint: that the run is to resume from.
        dtype_error: what torch said about dtypes in the training step; "" if nothing.
        refusals: what callbacks will refuse, each with its reason.
    """

    device: DeviceTraits
    precision: FoundPrecision = field(default_factory=FoundPrecision)
    run: FoundRun = field(default_factory=FoundRun)
    weights: tuple[FoundWeight, ...] = ()
    layers: tuple[FoundLayer, ...] = ()
    untied: tuple[str, ...] = ()
    step: FoundStep | None = None
    schedulers: tuple[FoundScheduler, ...] = ()
    budget: FoundBudget | None = None
    memory: FoundMemory | None = None
    checkpoint: FoundCheckpoint | None = None
    dtype_error: str = ""
    refusals: tuple[tuple[str, str], ...] = ()
