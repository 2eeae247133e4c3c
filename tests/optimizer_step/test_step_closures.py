"""Optimizers that evaluate their closure themselves train as under Lightning's own plugin, or are refused."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import small_models
import torch
from gloo import run_ranks
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from small_models import Regression, at, loader, quiet_trainer, regression_batches, weights
from torch import Tensor, nn

from lightning_mp import AccumulationScheduler, AutocastPrecision, LossScaler, MasterWeightsPrecision, OverflowMonitor

NUM_BATCHES = 4


class SAM(torch.optim.SGD):
    """Climbs by the gradient it has evaluated first, evaluates there, and steps from where it was."""

    rho = 0.05

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = closure()
        held = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in held]).norm()
        climbs = [p.grad * (self.rho / (norm + 1e-12)) for p in held]
        for p, climb in zip(held, climbs, strict=True):
            p.add_(climb)
        with torch.enable_grad():
            closure()
        for p, climb in zip(held, climbs, strict=True):
            p.sub_(climb)
        super().step()
        return loss


class ClimbsFirst(SAM):
    """Uses the gradients that are there; its only call of the closure comes when weights have changed."""

    def step(self, closure: Any = None) -> Any:
        calls = [lambda: None, closure]
        return super().step(lambda: calls.pop(0)())


class NeedsClosure(torch.optim.SGD):
    def step(self, closure: Any) -> Any:  # type: ignore[override]
        loss = closure()
        super().step()
        return loss


class Lookahead(torch.optim.SGD):
    """A step of its own that takes a closure and evaluates it once, as most third-party optimizers do."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def sam(parameters: Any) -> torch.optim.Optimizer:
    return SAM(parameters, lr=0.1, momentum=0.9, weight_decay=0.1)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sam": sam,
    "needs_closure": lambda parameters: NeedsClosure(parameters, lr=0.1),
    "third_party": lambda parameters: Lookahead(parameters, lr=0.1, momentum=0.9),
    "lbfgs": lambda parameters: torch.optim.LBFGS(parameters, lr=0.5, max_iter=4),
    "lbfgs_wolfe": lambda parameters: torch.optim.LBFGS(parameters, line_search_fn="strong_wolfe"),
}


class Evaluated(Regression):
    """Counts evaluations; those in ``overflows`` (counted over the run) are infinite."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.make_optimizer(self.parameters())


def fit(plugin: Any, module: pl.LightningModule, batches: int = NUM_BATCHES, **arguments: Any) -> pl.Trainer:
    return small_models.fit(module, regression_batches(batches), plugin=plugin, **arguments)


@pytest.mark.parametrize(
    ("optimizer", "clip"), [*((name, None) for name in OPTIMIZERS), ("sam", 0.1), ("needs_closure", 0.1)]
)
def test_without_a_scale_they_train_as_under_stock_to_the_last_bit(optimizer: str, clip: float | None) -> None:
    stock, ours = Evaluated(OPTIMIZERS[optimizer]), Evaluated(OPTIMIZERS[optimizer])
    fit(MixedPrecision("bf16-mixed", "cpu"), stock, gradient_clip_val=clip)
    fit(AutocastPrecision("bf16-mixed"), ours, gradient_clip_val=clip)
    assert ours.seen_batches == stock.seen_batches
    for mine, theirs in zip(weights(ours), weights(stock), strict=True):
        # Our norm is a float64 sum, and clipping by it differs in the last bits.
        assert torch.equal(mine, theirs) if clip is None else torch.allclose(mine, theirs, rtol=1e-4, atol=1e-6)


class ManualClosure(Evaluated):
    """In manual optimization the closure is the user's, and runs in the context of the training step."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        optimizer = self.optimizers()

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = Regression.training_step(self, batch, batch_idx)
            self.manual_backward(loss)
            return loss

        self.returned = optimizer.step(closure)


@pytest.mark.parametrize("optimizer", ["sam", "lbfgs"])
def test_in_manual_optimization_they_train_as_in_automatic_optimization(optimizer: str) -> None:
    automatic, manual = Evaluated(OPTIMIZERS[optimizer]), ManualClosure(OPTIMIZERS[optimizer])
    fit(AutocastPrecision("bf16-mixed"), automatic)
    fit(AutocastPrecision("bf16-mixed"), manual)
    assert isinstance(manual.returned, Tensor)
    assert manual.seen_batches == automatic.seen_batches
    for one, other in zip(weights(manual), weights(automatic), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("storage", ["fp32", "remainder"])
@pytest.mark.parametrize("optimizer", ["sam", "needs_closure"])
def test_on_masters_they_evaluate_as_often_and_come_close_to_fp32(optimizer: str, storage: Any) -> None:
    plain, ours = Evaluated(OPTIMIZERS[optimizer]), Evaluated(OPTIMIZERS[optimizer])
    quiet_trainer().fit(plain, loader(regression_batches(NUM_BATCHES)))
    fit(MasterWeightsPrecision("bf16-true", storage=storage), ours)
    assert ours.seen_batches == plain.seen_batches
    for mine, theirs in zip(weights(ours), weights(plain), strict=True):
        torch.testing.assert_close(mine.float(), theirs, rtol=0.1, atol=0.05)


def test_a_later_evaluation_that_overflows_ends_the_run() -> None:
    """Weights have changed by then, and only the optimizer knows how."""
    message = r"^SAM evaluated the loss itself and its gradients overflowed.* Resume from a checkpoint, with a lower"
    with pytest.raises(RuntimeError, match=message):
        fit(AutocastPrecision("bf16-mixed"), Evaluated(sam, overflows=(3,)))


def test_a_first_evaluation_that_overflows_never_reaches_the_optimizer() -> None:
    module, monitor = Evaluated(sam, overflows=(2,)), OverflowMonitor()
    fit(AutocastPrecision("bf16-mixed"), module, callbacks=[monitor])
    assert monitor.skipped_steps == 1
    assert module.seen_batches == 2 * NUM_BATCHES - 1
    assert all(torch.isfinite(w).all() for w in weights(module))


def test_an_optimizer_that_climbs_before_it_asks_gets_a_new_evaluation() -> None:
    module = Evaluated(lambda parameters: ClimbsFirst(parameters, lr=0.1))
    fit(AutocastPrecision("bf16-mixed"), module)
    assert module.seen_batches == 2 * NUM_BATCHES
    reference = Evaluated(lambda parameters: SAM(parameters, lr=0.1))
    fit(AutocastPrecision("bf16-mixed"), reference)
    for one, other in zip(weights(module), weights(reference), strict=True):
        assert torch.equal(one, other)


class WritesFirst(torch.optim.SGD):
    """Changes the gradients that are there, and evaluates in its parent's step."""

    write: Callable[["WritesFirst"], None]

    def step(self, closure: Any = None) -> Any:
        self.write()
        return super().step(closure)


def centralise(optimizer: torch.optim.Optimizer) -> None:
    for p in optimizer.param_groups[0]["params"]:
        p.grad.sub_(p.grad.mean())


def replace(optimizer: torch.optim.Optimizer) -> None:
    for p in optimizer.param_groups[0]["params"]:
        p.grad = p.grad - p.grad.mean()


@pytest.mark.parametrize("write", [centralise, replace])
@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_what_an_optimizer_writes_into_gradients_before_it_asks_is_stepped_with(precision: Any, write: Any) -> None:
    def made(parameters: Any) -> torch.optim.Optimizer:
        optimizer = WritesFirst(parameters, lr=0.1)
        optimizer.write = write.__get__(optimizer)
        return optimizer

    module = Evaluated(made)
    by_hand = Evaluated(made)
    optimizer = by_hand.configure_optimizers()
    for batch in regression_batches(NUM_BATCHES):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16 if precision == "bf16-mixed" else torch.float16):
            loss = by_hand.training_step(batch, 0)
        loss.backward()
        optimizer.step()
    scaler = None if precision == "bf16-mixed" else LossScaler("cpu", init_scale=1024.0)
    fit(AutocastPrecision(precision, scaler=scaler), module)
    assert module.seen_batches == NUM_BATCHES
    torch.testing.assert_close(weights(module), weights(by_hand), rtol=0, atol=0 if scaler is None else 1e-5)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_an_optimizer_that_zeroes_gradients_before_it_asks_gets_a_new_evaluation(set_to_none: bool) -> None:
    def made(parameters: Any) -> torch.optim.Optimizer:
        optimizer = WritesFirst(parameters, lr=0.1)
        optimizer.write = lambda: optimizer.zero_grad(set_to_none)
        return optimizer

    module, plain = Evaluated(made), Evaluated(lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    fit(AutocastPrecision("bf16-mixed"), module)
    fit(AutocastPrecision("bf16-mixed"), plain)
    assert module.seen_batches == 2 * NUM_BATCHES
    for one, other in zip(weights(module), weights(plain), strict=True):
        assert torch.equal(one, other)


def test_hooks_see_the_gradients_of_every_evaluation_and_what_they_write_is_checked() -> None:
    def write(_: Any, module: Any) -> None:
        module.net[0].weight.grad.fill_(torch.nan)

    module = Evaluated(sam)
    with pytest.raises(RuntimeError, match="SAM evaluated the loss itself and its gradients overflowed"):
        fit(AutocastPrecision("bf16-mixed"), module, callbacks=[at(write, "on_before_optimizer_step", call=2)])
    assert module.seen_batches == 2


def test_all_ranks_stop_together_when_a_later_evaluation_overflows_on_one() -> None:
    def rank_(rank: int) -> int:
        module = Evaluated(sam, overflows=(3,) if rank == 1 else ())
        with pytest.raises(RuntimeError, match="SAM evaluated the loss itself and its gradients overflowed"):
            fit(AutocastPrecision("bf16-mixed"), module, strategy="ddp", devices=2)
        return module.seen_batches

    assert run_ranks(rank_, 2) == [4, 4]


# -- refusals ----------------------------------------------------------------------------------------------------------


def scaled() -> AutocastPrecision:
    return AutocastPrecision("16-mixed", scaler=LossScaler("cpu", init_scale=1024.0))


@pytest.mark.parametrize("optimizer", ["needs_closure", "lbfgs"])
def test_with_a_scale_they_are_refused_at_set_up_where_that_is_known(optimizer: str) -> None:
    module = Evaluated(OPTIMIZERS[optimizer])
    with pytest.raises(
        MisconfigurationException,
        match=r"^AutocastPrecision\('16-mixed'\) cannot be used with \w+, which evaluates the loss several times in one"
        r" step: .* Use a precision without a loss scale \('bf16-mixed', 'bf16-true' or '32-true'\)",
    ):
        fit(scaled(), module)
    assert module.seen_batches == 0


@pytest.mark.parametrize("optimizer", [sam, lambda parameters: ClimbsFirst(parameters, lr=0.1)])
def test_with_a_scale_the_first_call_for_another_evaluation_is_refused(optimizer: Any) -> None:
    module = Evaluated(optimizer)
    with pytest.raises(MisconfigurationException, match=r"cannot be used with \w+, which evaluates the loss several"):
        fit(scaled(), module)
    assert module.seen_batches == 1


def test_with_a_scale_an_optimizer_that_evaluates_once_trains() -> None:
    module = Evaluated(OPTIMIZERS["third_party"])
    plain = Evaluated(lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9))
    fit(scaled(), module)
    fit(scaled(), plain)
    for one, other in zip(weights(module), weights(plain), strict=True):
        assert torch.equal(one, other)


def test_windows_that_count_what_they_evaluate_are_refused() -> None:
    with pytest.raises(
        MisconfigurationException,
        match="AccumulationScheduler, ChinchillaBudget, MFUMonitor and TokenLearningRate cannot be used with SAM, which"
        " evaluates the loss several times per step: tokens and windows would be counted more than once",
    ):
        fit(AutocastPrecision("bf16-mixed"), Evaluated(sam), callbacks=[AccumulationScheduler({0: 2})])


def test_the_guard_of_stock_plugins_refuses_a_second_evaluation() -> None:
    with pytest.raises(MisconfigurationException, match=r"guard=True\) cannot be used with SAM, which evaluates"):
        fit(MixedPrecision("bf16-mixed", "cpu"), Evaluated(sam), callbacks=[OverflowMonitor(guard=True)])


class Telling(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        super().step()
        return {"trust_ratio": 0.5}


class Manual(pl.LightningModule):
    automatic_optimization = False

    def __init__(self, optimizer: type[torch.optim.SGD]) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 1)
        self.kind = optimizer
        self.returned: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = self.layer(batch[0]).float().mean()
        self.manual_backward(loss * torch.inf if batch_idx == 1 else loss)
        self.returned.append(optimizer.step())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.kind(self.parameters(), lr=0.1)


@pytest.mark.parametrize("plugin", [scaled, lambda: AutocastPrecision("bf16-mixed")], ids=["fp16", "bf16"])
def test_what_step_returns_is_returned(plugin: Any) -> None:
    for kind, returned in ((Telling, {"trust_ratio": 0.5}), (torch.optim.SGD, None)):
        module = Manual(kind)
        fit(plugin(), module, batches=3)
        assert module.returned == [returned, None, returned]
