"""A module's own ``optimizer_step`` that calls its closure itself finds true gradients, as in a plain fp32 loop."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fsdp2_runs import runs_in_a_weighted_window
from small_models import Regression, StepsByHand, TokenModel, fit, regression_batches, weights
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_mp import AutocastPrecision, LossScaler, MasterWeightsPrecision

LIMIT = 0.02


def scaler() -> LossScaler:
    return LossScaler("cpu", init_scale=64.0)


PLUGINS: dict[str, Callable[[], Any]] = {
    "bf16-mixed": lambda: AutocastPrecision("bf16-mixed"),
    "16-mixed": lambda: AutocastPrecision("16-mixed", scaler=scaler()),
    "torch's scaler": lambda: AutocastPrecision("16-mixed", scaler=torch.amp.GradScaler("cpu", init_scale=64.0)),
    "16-true": lambda: MasterWeightsPrecision("16-true", scaler=scaler()),
    "remainder": lambda: MasterWeightsPrecision("bf16-true", storage="remainder"),
}
OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "fused": lambda parameters: torch.optim.SGD(parameters, lr=0.1, fused=True),
}


def clips(module: Any, optimizer: Any) -> None:
    module.norms.append(float(nn.utils.clip_grad_norm_(module.parameters(), LIMIT)))


def clips_values(module: Any, optimizer: Any) -> None:
    nn.utils.clip_grad_value_(module.parameters(), LIMIT)


def clips_by_lightning(module: Any, optimizer: Any) -> None:
    module.clip_gradients(optimizer, LIMIT, "norm")


def clips_twice(module: Any, optimizer: Any) -> None:
    module.clip_gradients(optimizer, 5 * LIMIT, "value")
    clips(module, optimizer)


def adds_noise(module: Any, optimizer: Any) -> None:
    for parameter in module.parameters():
        parameter.grad.add_(LIMIT)


def unscales_and_clips(module: Any, optimizer: Any) -> None:
    """torch's recipe."""
    of_plugin = getattr(module.trainer.precision_plugin, "scaler", None)
    if of_plugin is not None:
        of_plugin.unscale_(optimizer)
    clips(module, optimizer)


WRITES = [clips, clips_values, clips_by_lightning, clips_twice, adds_noise, unscales_and_clips]


class ClosureFirst(Regression):
    """Calls the closure, works on gradients, and steps."""

    def __init__(self, write: Any, optimizer: Any) -> None:
        super().__init__(optimizer)
        self.write, self.norms = write, list[float]()

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer_closure()
        self.write(self, optimizer)
        optimizer.step()


class ClosureInside(ClosureFirst):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        def closure() -> Any:
            loss = optimizer_closure()
            self.write(self, optimizer)
            return loss

        optimizer.step(closure=closure)


class EverySecond(ClosureFirst):
    """Accumulates over two batches by itself."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer_closure()
        if batch_idx % 2:
            self.write(self, optimizer)
            optimizer.step()

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        if batch_idx % 2 == 0:
            optimizer.zero_grad()


class Climbs(ClosureFirst):
    """Sharpness-aware minimisation by hand: two closures in a step."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer_closure()
        climbs = [0.01 * p.grad for p in self.parameters()]
        with torch.no_grad():
            torch._foreach_add_(list(self.parameters()), climbs)
        optimizer_closure()
        with torch.no_grad():
            torch._foreach_sub_(list(self.parameters()), climbs)
        self.write(self, optimizer)
        optimizer.step()


@pytest.mark.quick_cases(30)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("kind", [ClosureFirst, ClosureInside, EverySecond, Climbs])
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("precision", PLUGINS)
def test_gradients_are_true_after_the_closure(precision: str, write: Any, kind: Any, optimizer: str) -> None:
    """Against the same module in fp32."""
    ours, reference = (kind(write, OPTIMIZERS[optimizer]) for _ in range(2))
    before, batches = weights(reference), regression_batches(8)
    fit(ours, batches, plugin=PLUGINS[precision]())
    fit(reference, batches)
    assert ours.norms == pytest.approx(reference.norms, rel=2e-2)
    for one, other, start in zip(weights(ours), weights(reference), before, strict=True):
        moved = (other - start).abs().max()
        assert moved > 0
        torch.testing.assert_close(one.float(), other, rtol=0, atol=float(0.05 * moved))


class Twice(ClosureFirst):
    """Steps again with the gradients of its last step."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer.step(closure=optimizer_closure)
        optimizer.step()


class TwiceByHand(StepsByHand, Regression):
    def __init__(self, write: Any, optimizer: Any) -> None:
        super().__init__(optimizer)

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        super().training_step(batch, batch_idx)
        self.optimizers().step()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("kind", [Twice, TwiceByHand])
@pytest.mark.parametrize("precision", PLUGINS)
def test_two_steps_after_one_backward_are_refused_under_a_scale(precision: str, kind: Any, optimizer: str) -> None:
    """Else they are those of the module in fp32."""
    ours, reference = (kind(clips, OPTIMIZERS[optimizer]) for _ in range(2))
    if precision in ("bf16-mixed", "remainder"):
        fit(ours, regression_batches(4), plugin=PLUGINS[precision]())
        fit(reference, regression_batches(4))
        for one, other in zip(weights(ours), weights(reference), strict=True):
            torch.testing.assert_close(one.float(), other, rtol=0, atol=1e-2)
    else:
        with pytest.raises(RuntimeError, match=r"of SGD .* not scaled by 64, or its last step has used them"):
            fit(ours, regression_batches(4), plugin=PLUGINS[precision]())


@pytest.mark.parametrize("kind", [ClosureFirst, ClosureInside])
@pytest.mark.parametrize("precision", ["16-mixed", "16-true"])
def test_an_overflow_that_the_module_clips_away_is_skipped(precision: str, kind: Any) -> None:
    module, plugin = kind(clips_values, OPTIMIZERS["fused"]), PLUGINS[precision]()
    module.overflows = {0}
    before = weights(module)
    fit(module, regression_batches(1), plugin=plugin)
    assert all(map(torch.equal, weights(module), before))
    assert plugin.scaler.get_scale() == 32.0


class ClipsTokens(TokenModel):
    def __init__(self) -> None:
        super().__init__()
        self.norms: list[float] = []

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer_closure()
        norm: Any = nn.utils.clip_grad_norm_(self.parameters(), LIMIT)
        self.norms.append(float(norm.full_tensor() if isinstance(norm, DTensor) else norm))
        optimizer.step()


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_over_ranks_and_in_a_weighted_window(strategy: str) -> None:
    """The norm is that of the mean over all tokens, on one process with one large batch."""

    (norms, whole), *both = runs_in_a_weighted_window(ClipsTokens, strategy, by_trainer=True)
    for ours, state in both:
        assert ours == pytest.approx(norms, rel=1e-3)
        for name, value in whole.items():
            torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-5)
