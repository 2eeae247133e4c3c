"""A loss whose gradients are known already: backward assigns them instead of computing them.

All of a batch's forwards and backwards can so be over before Lightning's own backward begins. Yet it passes through
everything that a backward passes through: the division by the window, the loss scale, hooks, ``p.grad``, DDP's
reduction.
"""

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from typing_extensions import override

from lightning_mp.training.gradients import gradient_ops


def loss_with_gradients(
    loss: Tensor,
    parameters: Sequence[nn.Parameter],
    computed: list[Tensor],
    factor: Tensor,
) -> Tensor:
    r"""The value of ``loss``, with given gradients.

    Where backward passes down :math:`u`, parameter :math:`p` gets :math:`G_p \, u / \text{factor}`. The gradients are
    multiplied in place (two passes) and moved, not copied, into ``p.grad`` where it is empty. If ``factor`` is what
    backward passes down, the multiplication is by exactly 1.

    >>> import torch
    >>> from lightning_mp.pipelining.ready_gradients import loss_with_gradients
    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> loss = loss_with_gradients(torch.tensor(5.0), [weight], [torch.tensor([4.0, 8.0])], torch.tensor(4.0))
    >>> (loss / 2).backward()
    >>> weight.grad
    tensor([0.5000, 1.0000])
    """
    if not computed:
        return loss.detach().clone().requires_grad_()
    result: Tensor = _ReadyGradients.apply(loss.detach(), factor, computed, *parameters)  # type: ignore[no-untyped-call]
    return result


def factor_of_backward(trainer: "pl.Trainer", loss: Tensor) -> Tensor:
    """What Lightning's backward will pass down to a loss: the loss scale over the length of the window."""
    one = torch.ones_like(loss, requires_grad=False)
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    scaled: Tensor = one if scaler is None else scaler.scale(one)
    return scaled.to(loss.dtype) / int(trainer.accumulate_grad_batches)


class _ReadyGradients(torch.autograd.Function):
    @staticmethod
    @override
    def forward(ctx: Any, loss: Tensor, factor: Tensor, computed: list[Tensor], *parameters: Tensor) -> Tensor:
        ctx.factor = factor
        ctx.computed = [computed.pop(0) for _ in parameters]
        return loss.clone()

    @staticmethod
    @once_differentiable
    @override
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        computed, ctx.computed = ctx.computed, []
        ready = [gradient.coalesce() if gradient.is_sparse else gradient for gradient in computed]
        shards = [gradient_ops.local_shard(gradient) for gradient in ready]
        gradient_ops.multiply_(shards, (upstream / ctx.factor).reshape(()))  # a loss may have shape [1]
        return None, None, None, *ready
