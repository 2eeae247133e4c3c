"""Optimizers of other packages, and one that makes its state where none of them does."""

from collections.abc import Callable
from typing import Any

import lion_pytorch
import pytorch_optimizer
import schedulefree
import torch
from torch import Tensor

__all__ = ["THIRD_PARTY", "ScheduleFree", "StateInConstructor"]


class StateInConstructor(torch.optim.Optimizer):
    """SGD with momentum, whose two buffers are made in the constructor, in a list, and are a gradient behind."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["buffers"] = [torch.zeros_like(parameter), torch.zeros_like(parameter)]

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    momentum, before = self.state[parameter]["buffers"]
                    momentum.mul_(0.9).add_(before)
                    before.copy_(parameter.grad)
                    parameter.sub_(momentum + parameter.grad, alpha=group["lr"])
        return loss


def ScheduleFree(params: Any, lr: float = 1e-3) -> torch.optim.Optimizer:
    """SGD without a schedule, in the mode in which it trains."""
    optimizer = schedulefree.SGDScheduleFree(params, lr=lr)
    optimizer.train()
    return optimizer


THIRD_PARTY: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "state in constructor": StateInConstructor,
    "lion": lion_pytorch.Lion,
    "adan": pytorch_optimizer.Adan,
    "lamb": pytorch_optimizer.Lamb,
    "schedule_free": ScheduleFree,
}
