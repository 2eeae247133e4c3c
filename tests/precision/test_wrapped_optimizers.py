"""Optimizers that wrap others, under masters: the state of both is what it is over fp32 weights."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from master_loops import DTYPES, master_weights, masters_of, scale_of, train_by_hand
from small_models import Regression, fit, regression_batches

BATCHES = regression_batches(6)


class Sharing(torch.optim.Optimizer):
    """Steps a base optimizer over its own groups, as Lookahead and SAM do."""

    def __init__(self, parameters: Any, make_base: Callable[..., torch.optim.Optimizer]) -> None:
        super().__init__(parameters, {})
        self.base = make_base(self.param_groups)
        self.param_groups = self.base.param_groups

    @property
    def inner(self) -> torch.optim.Optimizer:
        return self.base

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p].setdefault("slow", p.clone())
        self.inner.step()
        for group in self.param_groups:
            for p in group["params"]:
                p.lerp_(self.state[p]["slow"], 0.25)
                self.state[p]["slow"].copy_(p)
        return loss


class Hiding(Sharing):
    """Keeps its base optimizer where nobody finds it."""

    def __init__(self, parameters: Any, make_base: Callable[..., torch.optim.Optimizer]) -> None:
        super().__init__(parameters, make_base)
        self.bases = [self.base]
        del self.base

    @property
    def inner(self) -> torch.optim.Optimizer:
        return self.bases[0]


BASES: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "adamw_foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, initial_accumulator_value=0.1),  # state in its constructor
}


def makes(kind: type[Sharing], base: str, depth: int = 1) -> Callable[..., Sharing]:
    return lambda p: kind(p, BASES[base] if depth == 1 else lambda q: Sharing(q, BASES[base]))


@pytest.mark.parametrize("kind", [Sharing, Hiding])
@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("precision", DTYPES)
def test_weights_and_both_states_are_those_of_the_loop_by_hand(
    precision: str, depth: int, base: str, kind: type[Sharing]
) -> None:
    module, reference = (Regression(makes(kind, base, depth), overflows=(3,)) for _ in range(2))
    trainer = fit(module, BATCHES, plugin=master_weights(precision))
    expected = train_by_hand(reference, BATCHES, precision, scale=scale_of(precision))
    for ours, theirs in zip(masters_of(trainer), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6 if "fused" in base or precision == "16-true" else 0)
    outer: Any = trainer.optimizers[0]
    innermost = outer.inner if depth == 1 else outer.inner.inner
    assert set(map(id, innermost.state)) == set(map(id, outer.state)) == set(map(id, module.parameters()))
