"""The one file that touches what is not public in Lightning or torch.

Each entry of :data:`PRIVATE_NAMES` says which private name the pack relies on and why; a guard test fails when an
upgrade takes one away.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import lightning.pytorch.trainer.call
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.profilers import Profiler
from lightning.pytorch.trainer.call import _call_callback_hooks, _call_lightning_module_hook
from torch import Tensor
from torch._functorch import config as functorch_config
from torch.optim import Optimizer

if TYPE_CHECKING:
    from torch.amp.grad_scaler import GradScaler

__all__ = [
    "PRIVATE_NAMES",
    "amp_unscale_",
    "amp_update_scale_",
    "backward_outside_autocast",
    "call_before_optimizer_step_hooks",
    "callbacks_of",
    "clip_through_module",
    "has_found_inf",
    "foreach_copy_",
    "foreach_mul_",
    "foreach_norm",
    "grad_scaler_scale",
    "profiler_of",
    "record_found_inf",
    "scaled_clamp_",
    "set_callbacks",
    "version_of",
]

#: (owner, private name, why it is needed)
PRIVATE_NAMES: tuple[tuple[object, str, str], ...] = (
    (torch, "_amp_update_scale_", "torch's own scale update, so that ours is bit-identical"),
    (torch, "_amp_foreach_non_finite_check_and_unscale_", "torch's own unscaling with its check, in one kernel"),
    (torch, "_foreach_norm", "the norm of all gradients in one kernel"),
    (torch, "_foreach_mul_", "all gradients multiplied in one kernel"),
    (torch, "_foreach_copy_", "all weights or gradients cast in one kernel"),
    (torch.Tensor, "_version", "tells that a weight was changed in place by somebody else"),
    (torch.ops.aten, "huber_loss_backward", "gradients scaled and clamped in one kernel"),
    (torch.amp.GradScaler, "_unscale_grads_", "both GradScaler paths, fused and not, check gradients here"),
    (torch.amp.GradScaler, "_check_scale_growth_tracker", "the scale tensor with torch's error if there is none"),
    (torch.amp.GradScaler, "_lazy_init_scale_growth_tracker", "where the scale tensor is made"),
    (torch.amp.GradScaler, "_get_scale_async", "the scale without waiting for the device"),
    (functorch_config, "backward_pass_autocast", "a compiled backward runs outside of autocast, as an eager one does"),
    (lightning.pytorch.trainer.call, "_call_callback_hooks", "on_before_optimizer_step, with the profiler"),
    (lightning.pytorch.trainer.call, "_call_lightning_module_hook", "the same of the module, so that it can log"),
    (Precision, "_clip_gradients", "runs the module's configure_gradient_clipping hook"),
)


def amp_update_scale_(
    scale: Tensor,
    growth_tracker: Tensor,
    found_inf: Tensor,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
) -> None:
    """torch's own update of the loss scale, in place, on the device."""
    torch._amp_update_scale_(scale, growth_tracker, found_inf, growth_factor, backoff_factor, growth_interval)


def amp_unscale_(shards: Sequence[Tensor], found_inf: Tensor, inverse_scale: Tensor) -> None:
    """torch's own unscaling of plain tensors of one device and dtype, in place; sets ``found_inf`` to 1.0."""
    torch._amp_foreach_non_finite_check_and_unscale_(list(shards), found_inf, inverse_scale)


def foreach_norm(shards: Sequence[Tensor], order: float, dtype: torch.dtype | None = None) -> Sequence[Tensor]:
    """The norm of each tensor, in one kernel where torch can."""
    return torch._foreach_norm(list(shards), order, dtype=dtype)


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


def version_of(tensor: Tensor) -> int:
    """How often a tensor was changed in place, views of it included and ``tensor.data`` left out."""
    return tensor._version


def backward_outside_autocast() -> AbstractContextManager[None]:
    """While this is entered, torch.compile traces backwards without autocast.

    Otherwise it traces them under the autocast that is on around the compiled function, and what ran in fp32 inside
    (``torch.autocast(enabled=False)``) gets 16-bit gradients.
    """
    patched: AbstractContextManager[None] = functorch_config.patch(backward_pass_autocast="off")
    return patched


def grad_scaler_scale(scaler: "GradScaler") -> Tensor | None:
    """The scale as a device tensor; None before the first loss was scaled."""
    return scaler._get_scale_async()


def record_found_inf(scaler: "GradScaler", optimizer: Optimizer, found_inf: Tensor) -> None:
    """Hands a scaler the decision of a step that was made outside of it; ``scaler.update()`` reads and clears it.

    Two steps of one optimizer before an update count as one that overflowed if either did.
    """
    recorded = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
    before = recorded.get(found_inf.device)
    recorded[found_inf.device] = found_inf if before is None else torch.maximum(before, found_inf)


def has_found_inf(scaler: "GradScaler") -> bool:
    """Whether a decision was recorded since the last ``scaler.update()``."""
    return any(state["found_inf_per_device"] for state in scaler._per_optimizer_states.values())


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
