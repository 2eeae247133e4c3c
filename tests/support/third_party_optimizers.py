"""Small optimizers in the ways of those that other packages have: what they keep, where, and when they make it."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn


class _Optimizer(torch.optim.Optimizer):
    def __init__(self, parameters: Iterable[nn.Parameter], **defaults: Any) -> None:
        super().__init__(parameters, defaults)

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, p.grad, self.state[p], group)
        return loss


class Lion(_Optimizer):
    """Signs of an interpolated momentum; its moment is made at the first step."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float = 1e-3) -> None:
        super().__init__(parameters, lr=lr)

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        momentum = state.setdefault("exp_avg", torch.zeros_like(p))
        p.add_(torch.sign(momentum * 0.9 + grad * 0.1), alpha=-group["lr"])
        momentum.lerp_(grad, 0.01)


class Adan(_Optimizer):
    """Three moments and the gradient before, all made in the constructor, some of them in a list."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float = 1e-3) -> None:
        super().__init__(parameters, lr=lr)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p] = {"moments": [torch.zeros_like(p) for _ in range(3)], "before": torch.zeros_like(p)}

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        first, difference, second = state["moments"]
        change = grad - state["before"]
        first.lerp_(grad, 0.02)
        difference.lerp_(change, 0.08)
        second.lerp_((grad + 0.92 * change).square(), 0.01)
        p.addcdiv_(first + 0.92 * difference, second.sqrt() + 1e-8, value=-group["lr"])
        state["before"].copy_(grad)


class Lamb(_Optimizer):
    """Adam with a step as long as the weights are; a tensor counts the steps."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float = 1e-3) -> None:
        super().__init__(parameters, lr=lr)
        for group in self.param_groups:
            group["step"] = torch.zeros(())

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        first = state.setdefault("exp_avg", torch.zeros_like(p))
        second = state.setdefault("exp_avg_sq", torch.zeros_like(p))
        first.lerp_(grad, 0.1)
        second.lerp_(grad.square(), 0.001)
        direction = first / (second.sqrt() + 1e-6)
        trust = torch.where(p.norm() > 0, p.norm() / direction.norm().clamp(min=1e-12), torch.ones(()))
        p.sub_(direction * trust.clamp(max=10.0), alpha=group["lr"])
        group["step"] = group["step"] + 1


class ScheduleFree(_Optimizer):
    """SGD whose second sequence starts as a copy of the weights, made in the constructor.

    ``eval`` puts the average into the weights and ``train`` takes it out again, both outside of steps.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float = 1e-2) -> None:
        super().__init__(parameters, lr=lr, train_mode=True, k=0)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["z"] = p.detach().clone()

    @torch.no_grad()
    def _move(self, *, to_train: bool) -> None:
        for group in self.param_groups:
            if group["train_mode"] != to_train:
                for p in group["params"]:
                    p.lerp_(self.state[p]["z"], 0.1 if to_train else 1 - 1 / 0.9)
                group["train_mode"] = to_train

    def train(self) -> None:
        self._move(to_train=True)

    def eval(self) -> None:
        self._move(to_train=False)

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["k"] += 1
        return super().step(closure)

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        weight = 1 / group["k"]
        p.lerp_(state["z"], weight)
        p.add_(grad, alpha=group["lr"] * (0.9 * (1 - weight) - 1))
        state["z"].sub_(grad, alpha=group["lr"])


class Sophia(_Optimizer):
    """A moment over a clipped estimate of the curvature, which is refreshed every few steps."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float = 1e-3) -> None:
        super().__init__(parameters, lr=lr)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p] = {"step": 0, "exp_avg": torch.zeros_like(p), "hessian": torch.full_like(p, 0.125)}

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if state["step"] % 4 == 0:
            state["hessian"].lerp_(grad.square(), 0.01)
        state["step"] += 1
        state["exp_avg"].lerp_(grad, 0.04)
        p.add_((state["exp_avg"] / (0.05 * state["hessian"] + 1e-12)).clamp_(-1.0, 1.0), alpha=-group["lr"])


THIRD_PARTY = {"lion": Lion, "adan": Adan, "lamb": Lamb, "schedule_free": ScheduleFree, "sophia": Sophia}
