"""The loss scale of manual optimization, where optimizers may step at different rates."""

from collections.abc import Sequence

import torch
from torch.optim import Optimizer

from lightning_mp.core import private_api
from lightning_mp.gradients import gradient_ops

__all__ = ["update_scale"]


def update_scale(scaler: "torch.amp.GradScaler", optimizers: Sequence[Optimizer]) -> None:
    """Updates the scale after a batch, if one of the optimizers has stepped in it.

    Gradients that wait for a step of their optimizer change with the scale, so that its window has one scale.
    """
    if not private_api.has_stepped(scaler):
        return
    waiting = [
        parameter
        for optimizer in optimizers
        if not private_api.has_stepped(scaler, optimizer)
        for parameter in gradient_ops.parameters_with_gradient(optimizer)
    ]
    before = private_api.grad_scaler_scale(scaler)
    before = before.clone() if before is not None else None
    scaler.update()
    now = private_api.grad_scaler_scale(scaler)
    if waiting and before is not None and now is not None:
        gradient_ops.multiply_(gradient_ops.local_shards(waiting), now / before)
