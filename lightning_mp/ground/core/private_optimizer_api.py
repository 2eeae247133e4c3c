"""What is not public of optimizers, GradScaler, and a step as Lightning makes it."""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import lightning.pytorch.trainer.call
import torch
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.call import _call_callback_hooks, _call_lightning_module_hook
from torch import Tensor
from torch.amp.grad_scaler import GradScaler, OptState
from torch.optim import Optimizer, _muon
from torch.utils.hooks import RemovableHandle

from lightning_mp.ground.core.patches import Patch

_OPTIMIZER_MODULE: Any = sys.modules[Optimizer.__module__]

#: (owner, private name, why it is needed)
PRIVATE_NAMES: tuple[tuple[object, str, str], ...] = (
    (torch, "_amp_update_scale_", "torch's own scale update, so that ours is bit-identical"),
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
    (lightning.pytorch.trainer.call, "_call_callback_hooks", "on_before_optimizer_step, with the profiler"),
    (lightning.pytorch.trainer.call, "_call_lightning_module_hook", "the same of the module, so that it can log"),
    (Precision, "_clip_gradients", "runs the module's configure_gradient_clipping hook"),
)


#: torch's own update of the loss scale, in place, on the device: scale, growth tracker, found_inf, growth factor,
#: backoff factor, growth interval.
amp_update_scale_ = torch._amp_update_scale_


def supports_amp_scaling(optimizer: Optimizer) -> bool:
    """Whether the optimizer's own kernel reads ``optimizer.grad_scale`` and ``optimizer.found_inf``."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def orthogonalized(update: Tensor, group: Mapping[str, Any]) -> Tensor:
    """Muon's Newton-Schulz iteration on a whole matrix, with the settings of a parameter group; bf16."""
    return _muon._zeropower_via_newtonschulz(update, group["ns_coefficients"], group["ns_steps"], group["eps"])


def muon_learning_rate(lr: float, adjust_lr_fn: str | None, shape: torch.Size) -> float:
    """The learning rate that Muon takes for a matrix of this shape."""
    return _muon._adjust_lr(lr, adjust_lr_fn, shape)


def grad_scaler_scale(scaler: "GradScaler") -> Tensor | None:
    """The scale as a device tensor; None before the first loss was scaled."""
    return scaler._get_scale_async()


def loss_scale_of(trainer: "pl.Trainer") -> Tensor | None:
    """The present loss scale on its device; None in a run without, or before the first loss was scaled."""
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    return grad_scaler_scale(scaler) if scaler is not None and scaler.is_enabled() else None


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
    requested = states.values() if optimizer is None else [states[id(optimizer)]] if id(optimizer) in states else []
    return any(state["stage"] is OptState.STEPPED for state in requested)


def forget_optimizers(scaler: "GradScaler", optimizers: Iterable[Optimizer] | None = None) -> None:
    """Takes back what a scaler knows of optimizers; None for all."""
    for key in [id(o) for o in optimizers] if optimizers is not None else list(scaler._per_optimizer_states):
        scaler._per_optimizer_states.pop(key, None)


def call_before_optimizer_step_hooks(model: "pl.LightningModule", optimizer: Optimizer) -> None:
    """Calls ``on_before_optimizer_step`` of all callbacks and of the module, as Lightning's plugins do."""
    _call_callback_hooks(model.trainer, "on_before_optimizer_step", optimizer)
    _call_lightning_module_hook(model.trainer, "on_before_optimizer_step", optimizer)


def clip_through_module(plugin: Precision, model: "pl.LightningModule", optimizer: Any) -> None:
    """Calls the module's ``configure_gradient_clipping`` with the Trainer's settings."""
    trainer = model.trainer
    plugin._clip_gradients(
        model, optimizer, trainer.gradient_clip_val, gradient_clip_algorithm=trainer.gradient_clip_algorithm
    )


def replace_clipping(plugin: Precision, replacement: Callable[..., None]) -> Patch:
    """Replaces the call by which a plugin, after the hooks that see gradients, has the module clip them."""
    return Patch(plugin, "_clip_gradients", replacement)


def step_without_hooks(optimizer: Optimizer) -> None:
    """The optimizer's step alone: no hook before or after it, no profiler, no count of steps."""
    step: Any = type(optimizer).step
    while getattr(step, "hooked", False):
        step = step.__wrapped__
    step(optimizer)


def has_other_step_hooks(before: RemovableHandle, after: RemovableHandle, *, besides: type) -> bool:
    """Whether more is called around a step than these hooks, instances of ``besides``, and one before every step."""
    own = before.hooks_dict_ref(), after.hooks_dict_ref()
    return (
        any(hooks is None or sum(not isinstance(hook, besides) for hook in hooks.values()) > 1 for hooks in own)
        or len(_OPTIMIZER_MODULE._global_optimizer_pre_hooks) > 1
        or len(_OPTIMIZER_MODULE._global_optimizer_post_hooks) > 0
    )


def make_room_for_hooks(optimizer: Optimizer) -> None:
    """Lets hooks be registered where ``Optimizer.__init__`` was not called (torch_optimizer.Lookahead)."""
    Optimizer.__setstate__(optimizer, {} if hasattr(optimizer, "defaults") else {"defaults": {}})
