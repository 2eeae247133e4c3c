"""What a preflight has found in a Trainer, a module and its data: plain values, which the checks read."""

from dataclasses import dataclass, field

from lightning_mp.ground.core.precisions import format_of
from lightning_mp.ground.flops.device_traits import DeviceTraits
from lightning_mp.training.lr_schedule.scheduler_facts import FoundScheduler
from lightning_mp.training.policy.fails_in_16_bit import RefusedIn16Bit

"""What a scheduler does when it is stepped more often than it was planned for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundPrecision:
    """What the run computes in."""

    name: str = "32-true"  # as Lightning writes it, "16-mixed"
    plugin: str = "Precision()"  # how messages name the plugin
    has_masters: bool = False  # 16-bit weights have fp32 masters
    has_scaler: bool = False  # losses are scaled by the plugin
    needs_closure: bool = False  # the plugin makes a step only where `optimizer.step` is given the closure
    takes_a_policy: bool = True  # the plugin has the argument `policy`
    emulates_fp8: bool = False  # fp8 was set without the units
    no_fp8_layer: str = ""  # why nothing would multiply in fp8, as the plugin says at set-up; "" if something does
    is_compiled: bool = True  # torch.compile was called on a part of the module
    own_scalers: tuple[str, ...] = ()  # attributes of the module that are enabled `GradScaler` objects
    of_strategy: str = ""  # a second setting for precision, at the strategy; "" for none

    @property
    def base(self) -> str:
        """The format of matrix products; "" where it is not known."""
        return format_of(self.name) or ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundWeight:
    """One parameter."""

    names: tuple[str, ...]  # every name that it has; several where it is tied
    dtype: str = "float32"  # "float32", "bfloat16", ...
    elements: int = 1  # how many
    is_trainable: bool = True  # what `requires_grad` says
    # the same number for parameters that begin at the same address; None where it has no memory yet
    memory: int | None = None
    is_optimized: bool | None = None  # an optimizer was given it; None where that was not seen
    has_gradient: bool | None = None  # the step has given it one; None where that was not seen


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundLayer:
    """A layer that multiplies matrices, or one with running statistics."""

    name: str  # of the module
    sizes: tuple[tuple[str, int], ...] = ()  # names and sizes of the dimensions that were chosen with the model
    learns_statistics: bool = False  # it is in training mode, and updates running statistics
    is_frozen: bool = False  # it has weights, and none of them is trainable


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundRun:
    """How long the run is."""

    micro_batches_per_epoch: int | None = None  # of one rank; None where the data have no length
    epochs: int | None = None  # `max_epochs`; None for no limit
    steps: int | None = None  # optimizer steps of the whole run; None where they are not known
    max_steps: int | None = None  # None for no limit
    window_lengths: frozenset[int] = frozenset({1})  # micro-batches per optimizer step, all that the run may use
    data_ranks: int = 1  # ranks that see different data
    clip_value: float | None = None  # the Trainer's `gradient_clip_val`
    detects_anomalies: bool = False  # Trainer(detect_anomaly=True)
    is_manual: bool = False  # the module steps its optimizers itself
    needs_all_gradients: bool = False  # DDP waits for the gradient of every trainable parameter


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundStep:
    """What one step did, on fake tensors."""

    loss_divisor: float | None = None  # the last operation divided the loss by this number
    divisor_follows: bool = False  # it was another one when `trainer.accumulate_grad_batches` was
    raw_backwards: bool = False  # gradients came without `manual_backward`
    raw_steps: tuple[str, ...] = ()  # classes of optimizers that were stepped past Lightning's wrapper
    closure_before_step: bool = False  # `optimizer_step` ran the closure itself and stepped without it
    ignores_clipping: bool = False  # `configure_gradient_clipping` was given a value and did nothing
    draws_anew: bool = False  # random numbers of recomputed modules differ from those of their forward
    weight_copies: tuple[tuple[str, int], ...] = ()  # of which backward keeps several, with their number
    copied_bytes: int = 0  # of the 16-bit copies beyond the first of each weight


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundBudget:
    """A budget of tokens."""

    tokens: int  # that the run is to train on
    # target tokens of one micro-batch over all ranks; None where they were not counted
    micro_batch_tokens: int | None = None
    window_micro_batches: int | None = None  # of the longest window under a target batch; None without one
    frozen_fraction: float = 0.0  # share of the parameters behind the budget that is frozen


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundMemory:
    """What one micro-batch takes on one device."""

    live_bytes: int  # of all live tensors at the peak
    reserved_bytes: int  # with the most that an allocator loses
    available_bytes: int  # of the device


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundCheckpoint:
    """A checkpoint beside the run that is to resume from it."""

    path: str  # as it was given
    missing: tuple[str, ...] = ()  # names that the module has and the checkpoint has not
    unexpected: tuple[str, ...] = ()  # names that the checkpoint has and the module has not
    reshaped: tuple[str, ...] = ()  # names with another shape
    # parameters per group of each optimizer in the checkpoint; None where there are none
    optimizers: tuple[tuple[int, ...], ...] | None = None
    own_optimizers: tuple[tuple[int, ...], ...] | None = None  # the same of the run; None where they were not seen
    learning_rates: tuple[float, ...] = ()  # of each group in the checkpoint, before any schedule
    own_learning_rates: tuple[float, ...] = ()  # the same of the run
    global_step: int = 0  # of the checkpoint
    epochs_done: int = 0  # of the checkpoint
    has_scale: bool = False  # it holds the state of a loss scale


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """All of it; None or empty where something was not seen."""

    device: DeviceTraits  # that the run is for
    precision: FoundPrecision = field(default_factory=FoundPrecision)  # what it computes in
    run: FoundRun = field(default_factory=FoundRun)  # how long it is
    weights: tuple[FoundWeight, ...] = ()  # every parameter
    layers: tuple[FoundLayer, ...] = ()  # that multiply matrices or have running statistics
    in_eval: tuple[str, ...] = ()  # layers of dropout and BatchNorm in eval mode beside trainable weights
    untied: tuple[str, ...] = ()  # embeddings that a config says are tied, and are not
    step: FoundStep | None = None  # what a training step did
    schedulers: tuple[FoundScheduler, ...] = ()  # that were planned for a number of calls
    budget: FoundBudget | None = None  # of tokens
    memory: FoundMemory | None = None  # of one micro-batch
    checkpoint: FoundCheckpoint | None = None  # that the run is to resume from
    dtype_error: str = ""  # what torch said about dtypes in the training step; "" if nothing
    # the first operation that torch would refuse, and in which format; None if there is none
    refused_in_16_bit: tuple[str, RefusedIn16Bit] | None = None
    refusals: tuple[tuple[str, str], ...] = ()  # what callbacks will refuse, each with its reason
