"""Optimizers that wrap others, under masters: the state of both lasts, and is what it is over fp32 weights."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from master_loops import KINDS, master_weights, masters_of, scale_of, train_by_hand
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

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "base": self.inner.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.inner.param_groups = self.param_groups
        self.inner.load_state_dict(state_dict["base"])
        self.param_groups = self.inner.param_groups


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
@pytest.mark.parametrize(("precision", "storage"), KINDS)
def test_weights_and_both_states_are_those_of_the_loop_by_hand(
    precision: str, storage: str, depth: int, base: str, kind: type[Sharing]
) -> None:
    module, reference = (Regression(makes(kind, base, depth), overflows=(3,)) for _ in range(2))
    trainer = fit(module, BATCHES, plugin=master_weights(precision, storage))
    expected = train_by_hand(reference, BATCHES, precision, scale=scale_of(precision))
    for ours, theirs in zip(masters_of(trainer), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6 if "fused" in base or precision == "16-true" else 0)
    outer: Any = trainer.optimizers[0]
    innermost = outer.inner if depth == 1 else outer.inner.inner
    assert set(map(id, innermost.state)) == set(map(id, outer.state)) == set(map(id, module.parameters()))


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize(("precision", "storage"), KINDS)
def test_a_wrapper_that_saves_both_states_resumes_exactly(
    precision: str, storage: str, base: str, tmp_path: Path
) -> None:
    def run(epochs: int, **settings: Any) -> Any:
        plugin = master_weights(precision, storage)
        return fit(Regression(makes(Sharing, base)), BATCHES, plugin=plugin, max_epochs=epochs, **settings)

    straight = masters_of(run(2))
    run(1).save_checkpoint(tmp_path / "x.ckpt")
    resumed = masters_of(run(2, ckpt_path=tmp_path / "x.ckpt"))
    assert all(torch.equal(a, b) for a, b in zip(resumed, straight, strict=True))
