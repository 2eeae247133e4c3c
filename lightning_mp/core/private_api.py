"""What is not public in Lightning or torch; what is about sharding and about loops has a file beside this one.

Each entry of :data:`PRIVATE_NAMES` says which private name the pack relies on and why; a guard test fails when an
upgrade takes one away.
"""

import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import lightning.pytorch.trainer.call
import torch
from lightning.fabric.utilities import data as fabric_data
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loops import fit_loop, progress, training_epoch_loop
from lightning.pytorch.loops.optimization import automatic
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.profilers import Profiler
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.trainer.call import _call_callback_hooks, _call_lightning_module_hook
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch._functorch import config as functorch_config
from torch._functorch import pyfunctorch
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.amp.grad_scaler import OptState
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer, _muon
from torch.optim.lr_scheduler import ChainedScheduler, LRScheduler, SequentialLR
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader
from torch.utils.hooks import RemovableHandle

from lightning_mp.core.patches import Patch

if TYPE_CHECKING:
    from torch.amp.grad_scaler import GradScaler

_OPTIMIZER_MODULE: Any = sys.modules[Optimizer.__module__]
_A_MODULE = torch.nn.Identity()  # modules make these attributes in their constructor

#: (owner, private name, why it is needed)
PRIVATE_NAMES: tuple[tuple[object, str, str], ...] = (
    (torch, "_amp_update_scale_", "torch's own scale update, so that ours is bit-identical"),
    (torch, "_amp_foreach_non_finite_check_and_unscale_", "torch's own unscaling with its check, in one kernel"),
    (torch, "_foreach_norm", "the norm of all gradients in one kernel"),
    (torch, "_foreach_mul_", "all gradients multiplied in one kernel"),
    (torch, "_foreach_clamp_min_", "all masters held within the range of fp16 in one kernel"),
    (torch, "_foreach_clamp_max_", "the same from above"),
    (torch, "_foreach_copy_", "all weights or gradients cast in one kernel"),
    (torch.Tensor, "_backward_hooks", "whether a parameter has hooks that would run on every microbatch"),
    (torch.Tensor, "_post_accumulate_grad_hooks", "the same after its gradient was accumulated"),
    (torch.Tensor, "_version", "shows that other code has changed a weight in place"),
    (torch.Tensor, "grad_dtype", "a parameter whose memory is given away is asked for it"),
    (torch, "_functorch", "where the next name is kept"),
    (torch._functorch, "pyfunctorch", "work on weights that no transform of torch.func around it sees"),
    (torch._C, "_set_throw_on_mutable_data_ptr", "memory that nobody may write to"),
    (torch.UntypedStorage, "_cdata", "shows that a weight has moved to other memory"),
    (torch._C, "_storage_Use_Count", "shows that another tensor shares the memory of a weight"),
    (torch.ops.aten, "huber_loss_backward", "gradients scaled and clamped in one kernel"),
    (torch.optim, "_muon", "the module of the next two names"),
    (torch.optim._muon, "_zeropower_via_newtonschulz", "Muon's orthogonalisation, of a matrix that was put together"),
    (torch.optim._muon, "_adjust_lr", "Muon's learning rate for the shape of a whole matrix"),
    (Optimizer, "_patch_step_function", "marks a step that runs hooks, and keeps the one that does not"),
    (_OPTIMIZER_MODULE, "_global_optimizer_pre_hooks", "whether other hooks have to see all parameters of a step"),
    (_OPTIMIZER_MODULE, "_global_optimizer_post_hooks", "the same after the step"),
    (torch.amp.GradScaler, "_unscale_grads_", "both GradScaler paths, fused and not, check gradients here"),
    (torch.amp.GradScaler, "_check_scale_growth_tracker", "the scale tensor with torch's error if there is none"),
    (torch.amp.GradScaler, "_lazy_init_scale_growth_tracker", "where the scale tensor is made"),
    (torch.amp.GradScaler, "_get_scale_async", "the scale without waiting for the device"),
    (functorch_config, "backward_pass_autocast", "a compiled backward runs outside of autocast, as an eager one does"),
    (torch.utils, "_python_dispatch", "every operation as it really runs, after autocast and in backward"),
    (torch, "_subclasses", "tensors with device, dtype and autograd but no numbers, for estimates of memory"),
    (torch, "_C", "where the next name is kept"),
    (torch._C, "_dispatch_has_kernel_for_dispatch_key", "whether this torch's autocast knows an operation"),
    (torch._C, "_dispatch_get_all_op_names", "which operations there are; the entry above raises for others"),
    (torch._C, "_current_autograd_node", "shows whether an operation runs in backward, and for which part of forward"),
    (torch.autograd, "_get_sequence_nr", "marks the parts of a forward, to recognise them in its backward"),
    (torch.autograd.graph.Node, "_sequence_nr", "the same mark of a node of the graph"),
    (torch._C, "DisableTorchFunction", "what a layer does inside is no business of rules about operations"),
    (torch._C, "DisableTorchFunctionSubclass", "calls torch for a subclass of Tensor, while modes stay on"),
    (torch.Tensor, "_make_wrapper_subclass", "a tensor of which this rank has a part only"),
    (FSDPModule, "_get_fsdp_state", "in which dtype FSDP2 gathers the parameters of a unit"),
    (torch.distributed.tensor, "_utils", "where in the whole tensor the part of a rank begins"),
    (torch.distributed.distributed_c10d, "_set_pg_timeout", "how long operations on a group of a mesh may take"),
    (ModelParallelStrategy, "_setup_distributed", "its set-up without the new mesh that it makes in each run"),
    (torch.nn.parallel.DistributedDataParallel, "_get_ddp_logging_data", "how many parameters it reduces"),
    (torch.nn.Module, "_compiled_call_impl", "shows that a module was compiled in place; what calls it is asked first"),
    (_A_MODULE, "_modules", "shows what torch.compile has put around a module"),
    (torch.nn.parallel.DistributedDataParallel, "_sync_buffers", "rank 0's buffers, before a forward that may fail"),
    (lightning.pytorch.trainer.call, "_call_callback_hooks", "on_before_optimizer_step, with the profiler"),
    (lightning.pytorch.trainer.call, "_call_lightning_module_hook", "the same of the module, so that it can log"),
    (automatic, "_AutomaticOptimization", "the loop of the next name"),
    (automatic._AutomaticOptimization, "_optimizer_step", "a step at an epoch's early end, counted as Lightning's own"),
    (automatic._AutomaticOptimization, "_make_closure", "what the optimizer or the loop calls for one batch"),
    (automatic._AutomaticOptimization, "_training_step", "the training step of one part of it"),
    (fit_loop, "_FitLoop", "the loop of the next name"),
    (fit_loop._FitLoop, "_should_accumulate", "whether Lightning logs after this micro-batch"),
    (fit_loop._FitLoop, "_load_combined_loader_states", "the moment before loaders load their first batch"),
    (training_epoch_loop, "_TrainingEpochLoop", "the loop of the next name"),
    (training_epoch_loop._TrainingEpochLoop, "_on_before_fetch", "the moment before a loader loads a batch"),
    (training_epoch_loop._TrainingEpochLoop, "_should_check_val_fx", "whether validation follows this batch"),
    (fabric_data, "_set_sampler_epoch", "calls set_epoch wherever a loader keeps its sampler"),
    (progress, "_ProcessedTracker", "how many epochs were begun and ended"),
    (CombinedLoader, "_state_dicts", "the states of the training loaders, as a checkpoint holds them"),
    (CombinedLoader, "_load_state_dicts", "puts them back where Lightning does not"),
    (DataLoader, "_get_iterator", "the moment in which a loader makes an iterator"),
    (DataLoader, "_index_sampler", "what gives a loader its indices"),
    (DataLoader, "_auto_collation", "whether those are indices of batches"),
    (fit_loop._FitLoop, "_results", "what a training epoch has logged so far"),
    (Precision, "_clip_gradients", "runs the module's configure_gradient_clipping hook"),
)


#: torch's own update of the loss scale, in place, on the device: scale, growth tracker, found_inf, growth factor,
#: backoff factor, growth interval.
amp_update_scale_ = torch._amp_update_scale_


def amp_unscale_(shards: Sequence[Tensor], found_inf: Tensor, inverse_scale: Tensor) -> None:
    """torch's own unscaling of plain tensors of one device and dtype, in place; sets ``found_inf`` to 1.0."""
    torch._amp_foreach_non_finite_check_and_unscale_(list(shards), found_inf, inverse_scale)


#: The norm of each tensor of a list, in one kernel where torch can: shards, order, dtype.
foreach_norm = torch._foreach_norm


def foreach_mul_(shards: Sequence[Tensor], factor: Tensor) -> None:
    """All tensors times one scalar tensor in place, in one kernel where torch can."""
    torch._foreach_mul_(list(shards), factor)


def scaled_clamp_(shard: Tensor, factor: float, bound: float) -> None:
    """``factor * clamp(shard, -bound, bound)`` in place, in one kernel: it is the derivative of Huber's loss."""
    scalar = torch.full((), factor, dtype=shard.dtype, device=shard.device)
    zero = torch.zeros((), dtype=shard.dtype, device=shard.device)
    torch.ops.aten.huber_loss_backward.out(scalar, shard, zero, 0, bound, grad_input=shard)


def foreach_copy_(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copies each source into its target, casting, in one kernel where torch can."""
    torch._foreach_copy_(list(targets), list(sources))


def autocast_knows(operation: str, device_type: str = "cuda") -> bool:
    """Whether an operation is on any list of autocast on a device type, in the torch that runs."""
    key = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA", "xpu": "AutocastXPU", "mps": "AutocastMPS"}[device_type]
    name = f"aten::{operation}"
    return name in _operation_names() and bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, key))


@cache
def _operation_names() -> frozenset[str]:
    return frozenset(torch._C._dispatch_get_all_op_names())


def foreach_clamp_(tensors: Sequence[Tensor], limit: float) -> None:
    """Limits all elements to ``[-limit, limit]`` in place, in two kernels where torch can; nan stays."""
    torch._foreach_clamp_min_(list(tensors), -limit)
    torch._foreach_clamp_max_(list(tensors), limit)


def version_of(tensor: Tensor) -> int:
    """How often a tensor was changed in place, views of it included and ``tensor.data`` left out."""
    return tensor._version


def versions_of(tensors: Sequence[Tensor]) -> list[int]:
    """:func:`version_of` each, without a call for each."""
    return [tensor._version for tensor in tensors]


def shares_memory(tensor: Tensor) -> bool:
    """Whether another tensor lies in the same memory: a view, an alias, a detached one."""
    return users_of_memory(tensor) > 1


def users_of_memory(tensor: Tensor) -> int:
    """How many tensors lie in the same memory; whatever else holds it, an array of numpy for one, counts too."""
    storage = tensor.untyped_storage()  # is a reference itself
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1


def refuse_writes(tensor: Tensor) -> None:
    """Writes to a tensor's memory raise."""
    torch._C._set_throw_on_mutable_data_ptr(tensor)


_KEEPS_NUMBERS_UNREAD = (
    *("grad", "grad_dtype", "requires_grad", "_backward_hooks", "_post_accumulate_grad_hooks", "_version"),
    *(
        "shape",
        "dtype",
        "device",
        "is_leaf",
        "grad_fn",
        "ndim",
        "layout",
        "is_cuda",
        "is_sparse",
        "is_cpu",
        "is_nested",
    ),
    *("is_meta", "is_quantized", "is_mkldnn", "is_mps", "itemsize"),
)


def functions_that_read_no_numbers() -> frozenset[Any]:
    """What ``__torch_function__`` is called with for what asks a parameter for its gradient, its size and the like."""
    attributes = [
        getattr(getattr(Tensor, name), slot)
        for name in _KEEPS_NUMBERS_UNREAD
        for slot in ("__get__", "__set__", "__delete__")
        if hasattr(getattr(Tensor, name), slot)
    ]
    methods = [Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.is_floating_point, Tensor.is_complex]
    methods += [Tensor.requires_grad_, Tensor.register_hook, Tensor.register_post_accumulate_grad_hook]
    methods += [Tensor.element_size, Tensor.__len__, torch.is_floating_point, torch.is_complex, torch.numel]
    return frozenset([*attributes, *methods])


@contextmanager
def unnoticed() -> Iterator[None]:
    """Whatever is going on: gradients, inference, transforms of torch.func, modes and subclasses of tensors."""
    with (
        torch.inference_mode(False),
        torch.no_grad(),
        pyfunctorch.temporarily_clear_interpreter_stack(),
        torch._C.DisableTorchFunction(),
    ):
        yield


def backward_outside_autocast() -> AbstractContextManager[None]:
    """While this is entered, torch.compile traces backwards without autocast.

    Otherwise it traces them under the autocast that is on around the compiled function, and what ran in fp32 inside
    (``torch.autocast(enabled=False)``) gets 16-bit gradients.
    """
    patched: AbstractContextManager[None] = functorch_config.patch(backward_pass_autocast="off")
    return patched


_Observer = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], None]


class _Observing(TorchDispatchMode):
    """Runs every operation as it is and shows it; autograd and autocast are above it, compiled code stays compiled."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.observers: list[_Observer] = []

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        # Without this torch.compile gives up, for the rest of the run, on functions first called inside the mode.
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for observer in tuple(self.observers):
            observer(func, args, kwargs or {}, result)
        return result


class _ObservingThread(threading.local):
    """A thread's only mode: torch leaves the last mode that was entered, and observers go in any order."""

    def __init__(self) -> None:
        self.mode = _Observing()


_observing = _ObservingThread()


def holds_compiled_code(module: torch.nn.Module) -> bool:
    """Whether torch.compile was called on a module, or on a method or function that it holds."""
    if compiled_call_of(module) is not None:
        return True
    own = [*vars(module).values(), *vars(type(module)).values()]
    return any(
        # how dynamo marks a function that it has wrapped; torch.compiler.disable does so, too
        hasattr(value, "_torchdynamo_orig_callable") and not getattr(value, "_torchdynamo_disable", False)
        for value in own
        if callable(value) and not isinstance(value, torch.nn.Module)
    )


@contextmanager
def observe_dispatch(observer: _Observer) -> Iterator[None]:
    """While this is entered, ``observer(operation, args, kwargs, result)`` is called after each operation of torch.

    Several may be entered in one thread, and left in any order.
    """
    mode = _observing.mode
    if not mode.observers:
        mode.__enter__()  # type: ignore[no-untyped-call]
    mode.observers.append(observer)
    try:
        yield
    finally:
        mode.observers.remove(observer)
        if not mode.observers:
            mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]


def forward_position() -> int:
    """A number that grows with each node of the autograd graph that this thread makes."""
    return torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]


def running_backward() -> tuple[str, int] | None:
    """Name of the autograd node that runs in this thread, and its :func:`forward_position`; None outside backward."""
    node = torch._C._current_autograd_node()
    return (node.name(), node._sequence_nr()) if node is not None else None


def without_function_modes() -> AbstractContextManager[None]:
    """While this is entered, no ``TorchFunctionMode`` sees calls of torch; torch.compile traces through it."""
    disabled: AbstractContextManager[None] = torch._C.DisableTorchFunction()
    return disabled


#: While an instance is entered, no ``__torch_function__`` of a subclass of ``Tensor`` is called; those of modes are.
without_function_subclasses: Callable[[], AbstractContextManager[None]] = torch._C.DisableTorchFunctionSubclass


def wrapper_tensor(
    kind: type[Tensor], size: Sequence[int], strides: Sequence[int], like: Tensor, requires_grad: bool
) -> Any:
    """A tensor of a subclass that has a size and no memory; ``like`` gives dtype and device."""
    return torch.Tensor._make_wrapper_subclass(
        kind, size, strides=strides, dtype=like.dtype, device=like.device, requires_grad=requires_grad
    )


def supports_amp_scaling(optimizer: Optimizer) -> bool:
    """Whether the optimizer's own kernel reads ``optimizer.grad_scale`` and ``optimizer.found_inf``."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def orthogonalized(update: Tensor, group: Mapping[str, Any]) -> Tensor:
    """Muon's Newton-Schulz iteration on a whole matrix, with the settings of a parameter group; bf16."""
    return _muon._zeropower_via_newtonschulz(update, group["ns_coefficients"], group["ns_steps"], group["eps"])


def muon_learning_rate(lr: float, adjust_lr_fn: str | None, shape: torch.Size) -> float:
    """The learning rate that Muon takes for a matrix of this shape."""
    return _muon._adjust_lr(lr, adjust_lr_fn, shape)


def has_gradient_hooks(parameter: Tensor) -> bool:
    """Whether Python hooks run on the gradient of a parameter."""
    return bool(parameter._backward_hooks)


def has_hooks_after_accumulation(parameter: Tensor) -> bool:
    """Whether Python hooks run after the gradient of a parameter was accumulated."""
    return bool(parameter._post_accumulate_grad_hooks)


def grad_scaler_scale(scaler: "GradScaler") -> Tensor | None:
    """The scale as a device tensor; None before the first loss was scaled."""
    return scaler._get_scale_async()


def make_grad_scale(scaler: "GradScaler", device: torch.device) -> None:
    """Makes the scale tensor, which torch makes with the first loss that is scaled."""
    scaler._lazy_init_scale_growth_tracker(device)


@contextmanager
def loss_scale_set(scaler: "GradScaler | None", scale: float) -> Iterator[None]:
    """Has ``scaler.scale`` multiply by another number for a while."""
    current = None if scaler is None else grad_scaler_scale(scaler)
    if current is None:
        yield
        return
    before = current.clone()
    current.fill_(scale)
    try:
        yield
    finally:
        current.copy_(before)


def record_found_inf(scaler: "GradScaler", optimizer: Optimizer, found_inf: Tensor) -> None:
    """Hands a scaler the decision of a step that was made outside of it; ``scaler.update()`` reads and clears it.

    Two steps of one optimizer before an update count as one that overflowed if either did.
    """
    state = scaler._per_optimizer_states[id(optimizer)]
    recorded = state["found_inf_per_device"]
    before = recorded.get(found_inf.device)
    recorded[found_inf.device] = found_inf if before is None else torch.maximum(before, found_inf)
    state["stage"] = OptState.STEPPED


def set_unscaled(scaler: "GradScaler", optimizer: Optimizer, found_inf: Tensor) -> None:
    """Tells a scaler that an optimizer's gradients are true by now, so that ``scaler.unscale_`` refuses."""
    record_found_inf(scaler, optimizer, found_inf)
    scaler._per_optimizer_states[id(optimizer)]["stage"] = OptState.UNSCALED


def unscaled_found_inf(scaler: "GradScaler", optimizers: Iterable[object]) -> list[Tensor] | None:
    """What ``scaler.unscale_`` has found in the gradients of one of these; None if it was not called."""
    for optimizer in optimizers:
        state = scaler._per_optimizer_states.get(id(optimizer))
        if state is not None and state["stage"] is OptState.UNSCALED:
            return list(state["found_inf_per_device"].values())
    return None


def has_unscaled(scaler: "GradScaler") -> bool:
    """Whether ``scaler.unscale_`` was called for any optimizer that has not stepped since."""
    states = scaler._per_optimizer_states
    return bool(states) and any(state["stage"] is OptState.UNSCALED for state in states.values())


def has_stepped(scaler: "GradScaler", optimizer: Optimizer | None = None) -> bool:
    """Whether a step was made since the last ``scaler.update()``; None means any optimizer's."""
    states = scaler._per_optimizer_states
    if not states:
        return False
    asked = states.values() if optimizer is None else [states[id(optimizer)]] if id(optimizer) in states else []
    return any(state["stage"] is OptState.STEPPED for state in asked)


def forget_optimizers(scaler: "GradScaler", optimizers: Iterable[Optimizer] | None = None) -> None:
    """Takes back what a scaler knows of optimizers; None for all."""
    for key in [id(o) for o in optimizers] if optimizers is not None else list(scaler._per_optimizer_states):
        scaler._per_optimizer_states.pop(key, None)


def call_before_optimizer_step_hooks(model: "pl.LightningModule", optimizer: Optimizer) -> None:
    """Calls ``on_before_optimizer_step`` of all callbacks and of the module, as Lightning's plugins do."""
    _call_callback_hooks(model.trainer, "on_before_optimizer_step", optimizer)
    _call_lightning_module_hook(model.trainer, "on_before_optimizer_step", optimizer)


def callbacks_of(trainer: "pl.Trainer") -> list[Callback]:
    """The Trainer's callbacks, a public attribute that a connector sets and type checkers cannot see."""
    callbacks: list[Callback] = vars(trainer)["callbacks"]
    return callbacks


def set_callbacks(trainer: "pl.Trainer", callbacks: list[Callback]) -> None:
    """Gives the Trainer a new list of callbacks."""
    vars(trainer)["callbacks"] = callbacks


def profiler_of(trainer: "pl.Trainer") -> Profiler:
    """The Trainer's profiler, a public attribute that a connector sets and type checkers cannot see."""
    profiler: Profiler = vars(trainer)["profiler"]
    return profiler


def clip_through_module(plugin: Precision, model: "pl.LightningModule", optimizer: Any) -> None:
    """Calls the module's ``configure_gradient_clipping`` with the Trainer's settings."""
    trainer = model.trainer
    plugin._clip_gradients(
        model, optimizer, trainer.gradient_clip_val, gradient_clip_algorithm=trainer.gradient_clip_algorithm
    )


def replace_clipping(plugin: Precision, replacement: Callable[..., None]) -> Patch:
    """Replaces the call by which a plugin, after the hooks that see gradients, has the module clip them."""
    return Patch(plugin, "_clip_gradients", replacement)


def is_compiled(module: "pl.LightningModule") -> bool:
    """Whether torch.compile was called on the module or a submodule: whole, in place or as a wrapper."""
    return has_compiled_steps(module) or any(map(is_compiled_module, module.modules()))


def has_compiled_steps(module: torch.nn.Module) -> bool:
    """Whether torch.compile was called on a LightningModule, which compiles its steps."""
    return getattr(module, "_compiler_ctx", None) is not None


def is_compiled_module(module: torch.nn.Module) -> bool:
    """Whether a module was compiled in place, or is what torch.compile puts around another one."""
    return compiled_call_of(module) is not None or "_orig_mod" in module._modules


def compiled_call_of(module: torch.nn.Module) -> Callable[..., Any] | None:
    """What ``module.compile()`` has made of the module's call; None if it was not compiled in place."""
    call: Any = module._compiled_call_impl
    compiled: Callable[..., Any] | None = getattr(call, "compiled_below", call)  # below an intercepted call
    return compiled


def scheduler_parts(scheduler: LRScheduler) -> tuple[Sequence[LRScheduler], Sequence[int]]:
    """The schedulers that one is made of, and after how many calls each of the later ones begins; none of others."""
    if isinstance(scheduler, SequentialLR):
        return scheduler._schedulers, scheduler._milestones
    return (scheduler._schedulers, ()) if isinstance(scheduler, ChainedScheduler) else ((), ())


def step_without_hooks(optimizer: Optimizer) -> None:
    """The optimizer's step alone: no hook before or after it, no profiler, no count of steps."""
    step: Any = type(optimizer).step
    while getattr(step, "hooked", False):
        step = step.__wrapped__
    step(optimizer)


def has_other_step_hooks(before: RemovableHandle, after: RemovableHandle) -> bool:
    """Whether more is called around an optimizer's steps than these hooks, and one before any optimizer's."""
    own = before.hooks_dict_ref(), after.hooks_dict_ref()
    return (
        any(hooks is None or len(hooks) > 1 for hooks in own)
        or len(_OPTIMIZER_MODULE._global_optimizer_pre_hooks) > 1
        or len(_OPTIMIZER_MODULE._global_optimizer_post_hooks) > 0
    )


def make_room_for_hooks(optimizer: Optimizer) -> None:
    """Lets hooks be registered where ``Optimizer.__init__`` was not called (torch_optimizer.Lookahead)."""
    Optimizer.__setstate__(optimizer, {} if hasattr(optimizer, "defaults") else {"defaults": {}})
