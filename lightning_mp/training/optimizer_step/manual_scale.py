"""The loss scale of manual optimization, where optimizers may step at different rates."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_mp.ground.core import private_optimizer_api, private_tensor_api
from lightning_mp.training.gradients import gradient_ops

Gradients = Mapping[Tensor, tuple[Tensor, int]]
"""The gradients of parameters, and their versions."""

GradientsBeforeBackward = Mapping[Optimizer, Gradients]
"""What the step of an optimizer left behind, as it was before the next backward."""


def gradients_before_backward(
    scaler: "torch.amp.GradScaler", optimizers: Sequence[Optimizer], known: GradientsBeforeBackward
) -> GradientsBeforeBackward:
    """Before a backward: the gradients that steps of this batch have left, to distinguish new ones from them."""
    if not private_optimizer_api.has_stepped(scaler):
        return known
    new = (o for o in optimizers if o not in known and private_optimizer_api.has_stepped(scaler, o))
    return {**known, **{optimizer: gradients_of(optimizer) for optimizer in new}}


def gradients_of(optimizer: Optimizer) -> Gradients:
    """Those that its parameters hold."""
    with_gradient = gradient_ops.parameters_with_gradient(optimizer)
    return {p: (p.grad, _version(p.grad)) for p in with_gradient if p.grad is not None}


def has_new_gradients(optimizer: Optimizer, left: Gradients) -> bool:
    """Whether a parameter's gradient is another one since, or was added to."""
    return any(not _is_left(p, left) for p in gradient_ops.parameters_with_gradient(optimizer))


def update_scale(
    scaler: "torch.amp.GradScaler", optimizers: Sequence[Optimizer], left: GradientsBeforeBackward
) -> None:
    """Updates the scale after a batch in which an optimizer has stepped.

    Gradients that wait for a step of their optimizer change with the scale, so that its window has one scale. That may
    be an optimizer that has stepped in this batch, and then seen another backward.
    """
    waiting = list(dict.fromkeys(p for optimizer in optimizers for p in _waiting(scaler, optimizer, left)))
    before = private_optimizer_api.grad_scaler_scale(scaler)
    before = before.clone() if before is not None else None
    scaler.update()
    now = private_optimizer_api.grad_scaler_scale(scaler)
    if waiting and before is not None and now is not None:
        gradient_ops.multiply_(gradient_ops.local_shards(waiting), now / before)


def _waiting(scaler: "torch.amp.GradScaler", optimizer: Optimizer, left: GradientsBeforeBackward) -> list[Tensor]:
    """The parameters whose gradients no step has used yet."""
    with_gradient = gradient_ops.parameters_with_gradient(optimizer)
    if not private_optimizer_api.has_stepped(scaler, optimizer):
        return with_gradient
    if optimizer not in left:
        return []  # no backward has come since the step
    return [p for p in with_gradient if not _is_left(p, left[optimizer])]


def _is_left(parameter: Tensor, left: Gradients) -> bool:
    gradient, version = left.get(parameter, (None, 0))
    return gradient is not None and gradient is parameter.grad and _version(gradient) == version


def _version(gradient: Tensor) -> int:
    # FSDP2 adds to the local part of a gradient.
    return private_tensor_api.version_of(gradient if gradient.is_sparse else gradient_ops.local_shard(gradient))
