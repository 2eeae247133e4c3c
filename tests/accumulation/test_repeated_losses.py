"""Optimizers that evaluate the loss several times in one step, beside callbacks that count micro-batches."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fuzz_reference import SharpnessAware
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from small_models import Regression, fit, regression_batches, sgd, weights
from torch import Tensor

from lightning_mp import AccumulationScheduler, AutocastPrecision, ChinchillaBudget, LossScaler, MFUMonitor
from lightning_mp.training.optimizers.evaluations import requires_closure


class Evaluating(torch.optim.SGD):
    """Calls its closure as often as ``times`` says; it can do without."""

    times = 2

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        with torch.enable_grad():
            for _ in range(self.times if closure is not None else 0):
                loss = closure()
        super().step()
        return loss


class EvaluatingOnce(Evaluating):
    times = 1


class Counting(Regression):
    steps = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.steps += 1
        return super().training_step(batch, batch_idx)


PRECISIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "stock fp32": dict,
    "stock bf16": lambda: {"precision": "bf16-mixed"},
    "ours": lambda: {"plugins": [AutocastPrecision("bf16-mixed")]},
}
CALLBACKS: dict[str, Callable[[], Callback]] = {
    "scheduler": lambda: AccumulationScheduler({0: 2}),
    "budget": lambda: ChinchillaBudget(tokens=20, count=lambda batch: 4, landing="ceil"),
    "monitor": lambda: MFUMonitor(unit="sample"),
}
REFUSED: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "LBFGS": torch.optim.LBFGS,
    "SharpnessAware": SharpnessAware,
    "Evaluating": lambda parameters: Evaluating(parameters, lr=0.1),
}


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("callback", CALLBACKS)
@pytest.mark.parametrize("name", REFUSED)
def test_one_refusal_whatever_the_precision(name: str, callback: str, precision: str) -> None:
    """At the start of the fit where it is known by then, else in the first step that evaluates again."""
    module = Counting(REFUSED[name])
    expected = (
        f"AccumulationScheduler, ChinchillaBudget, MFUMonitor and TokenLearningRate cannot be used with {name}, which"
        " evaluates the loss several times per step: tokens and windows would be counted more than once. Use another"
        " optimizer, or remove these callbacks."
    )
    with pytest.raises(MisconfigurationException) as error:
        fit(module, regression_batches(6), CALLBACKS[callback](), **PRECISIONS[precision]())
    assert str(error.value) == expected
    assert (module.steps > 0) is (name == "Evaluating")


@pytest.mark.parametrize("precision", PRECISIONS)
def test_an_optimizer_that_evaluates_once_trains_as_sgd_does(precision: str) -> None:
    found = []
    for make in (lambda parameters: EvaluatingOnce(parameters, lr=0.1), lambda p: torch.optim.SGD(p, lr=0.1)):
        module = Regression(make)
        fit(module, regression_batches(5), AccumulationScheduler({0: 2}), **PRECISIONS[precision]())
        found.append(weights(module))
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("name", ["SharpnessAware", "Evaluating"])
def test_without_the_callbacks_they_train(name: str) -> None:
    for precision in PRECISIONS:
        module = Counting(REFUSED[name])
        fit(module, regression_batches(3), **PRECISIONS[precision]())
        assert module.steps == 6


def test_what_is_known_before_the_first_step() -> None:
    parameters = [torch.nn.Parameter(torch.ones(2))]
    known = {make: requires_closure(make(parameters)) for make in (sgd, SharpnessAware, EvaluatingOnce)}
    assert known == {sgd: False, SharpnessAware: True, EvaluatingOnce: False}
    scaled = AutocastPrecision("16-mixed", scaler=LossScaler(init_scale=4.0))
    with pytest.raises(MisconfigurationException, match=r"^AutocastPrecision\('16-mixed'"):
        fit(Regression(SharpnessAware), regression_batches(2), plugin=scaled)
