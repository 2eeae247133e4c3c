"""The loss scale of manual optimization, where optimizers may step at different rates."""

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_mp.core import private_api
from lightning_mp.gradients import gradient_ops

__all__ = ["note_gradients", "note_step", "update_scale"]

# Of each optimizer that has stepped in this batch, as they were before the next backward: what its step left behind.
_left_by_step: WeakKeyDictionary[Optimizer, dict[Tensor, tuple[Tensor, int]]] = WeakKeyDictionary()


def note_gradients(scaler: "torch.amp.GradScaler", optimizers: Sequence[Optimizer]) -> None:
    """Before a backward: takes note of the gradients that steps of this batch have left, to tell new ones from them."""
    if not private_api.has_stepped(scaler):
        return
    for optimizer in optimizers:
        if optimizer not in _left_by_step and private_api.has_stepped(scaler, optimizer):
            with_gradient = gradient_ops.parameters_with_gradient(optimizer)
            _left_by_step[optimizer] = {p: (p.grad, _version(p.grad)) for p in with_gradient if p.grad is not None}


def note_step(optimizer: Optimizer) -> None:
    """After a step: what was waiting for it has been used."""
    _left_by_step.pop(optimizer, None)


def update_scale(scaler: "torch.amp.GradScaler", optimizers: Sequence[Optimizer]) -> None:
    """Updates the scale after a batch, if one of the optimizers has stepped in it.

    Gradients that wait for a step of their optimizer change with the scale, so that its window has one scale. That may
    be an optimizer that has stepped in this batch, and then seen another backward.
    """
    if not private_api.has_stepped(scaler):
        return
    waiting = list(dict.fromkeys(p for optimizer in optimizers for p in _waiting(scaler, optimizer)))
    before = private_api.grad_scaler_scale(scaler)
    before = before.clone() if before is not None else None
    scaler.update()
    now = private_api.grad_scaler_scale(scaler)
    if waiting and before is not None and now is not None:
        gradient_ops.multiply_(gradient_ops.local_shards(waiting), now / before)


def _waiting(scaler: "torch.amp.GradScaler", optimizer: Optimizer) -> list[Tensor]:
    """The parameters whose gradients no step has used yet."""
    left = _left_by_step.pop(optimizer, None)
    with_gradient = gradient_ops.parameters_with_gradient(optimizer)
    if not private_api.has_stepped(scaler, optimizer):
        return with_gradient
    if left is None:
        return []  # no backward has come since the step
    return [p for p in with_gradient if not _is_left(p, left)]


def _is_left(parameter: Tensor, left: dict[Tensor, tuple[Tensor, int]]) -> bool:
    gradient, version = left.get(parameter, (None, 0))
    return gradient is not None and gradient is parameter.grad and _version(gradient) == version


def _version(gradient: Tensor) -> int:
    # FSDP2 adds to the local part of a gradient.
    return private_api.version_of(gradient if gradient.is_sparse else gradient_ops.local_shard(gradient))
