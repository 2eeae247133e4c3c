"""Policies under MasterWeightsPrecision: a loop by hand with explicit casts, and what master weights promise."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from gloo import run_ranks
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from master_loops import DTYPES, counted_casts, master_weights, scale_of
from policy_models import CLASSES, RULES, WIDTH, Classifier, batches, failing, nothing_is_left
from small_models import Regression, StepsByHand, adamw, loader, quiet_trainer, regression_batches, weights
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_mp import MasterWeightsPrecision, PrecisionPolicy
from lightning_mp.training.precision.masters import checks

DEFAULT = PrecisionPolicy.default()
WITH_HEAD = PrecisionPolicy(RULES)


class Trained(Classifier):
    """The classifier whose functions a policy is about, with an optimizer that has a state."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return adamw(self.parameters())


class Manual(StepsByHand, Trained):
    pass


def train(
    policy: Any = WITH_HEAD, module: Any = None, precision: str = "bf16-true", data: Any = None, **arguments: Any
) -> Any:
    module = Trained() if module is None else module
    trainer = quiet_trainer(plugins=[master_weights(precision, policy=policy)], **arguments)
    trainer.fit(module, loader(batches() if data is None else data))
    return module


def loss_by_hand(module: Classifier, batch: Any, low: torch.dtype, head: torch.dtype) -> Tensor:
    """What a policy says, written out: no autocast, every cast in its place."""
    x, y = batch
    body = module.body
    x = module.stem(x.to(low))
    x = x + body.down(F.gelu(body.up(x)))
    x = F.layer_norm(x.float(), (WIDTH,), body.gain.float())
    shares = F.softmax((x.to(low) @ x.mT.to(low)).float(), -1)
    x = x + shares.to(low) @ x.to(low)
    logits = module.head(x.to(head))
    return F.cross_entropy(logits.float().flatten(0, 1), y.flatten())


class LoopByHand:
    """Weights in 16 bit but for the head in ``head``; an optimizer over fp32 copies, or over the weight itself."""

    def __init__(self, precision: str, *, head_in_fp32: bool) -> None:
        self.module, self.low = Trained(), DTYPES[precision]
        self.head = torch.float32 if head_in_fp32 else self.low
        start = {name: p.detach().clone() for name, p in self.module.named_parameters()}
        self.module.to(self.low)
        self.module.head.to(self.head)
        if head_in_fp32:
            for name, p in self.module.head.named_parameters():
                p.data.copy_(start[f"head.{name}"])
        self.masters = {
            p: nn.Parameter(start[name]) for name, p in self.module.named_parameters() if p.dtype == self.low
        }
        self.write()
        self.optimizer = adamw([self.masters.get(p, p) for p in self.module.parameters()])

    def step(self, gradients: Iterable[Tensor], scale: float) -> None:
        for p, gradient in zip(self.module.parameters(), gradients, strict=True):
            self.masters.get(p, p).grad = gradient.float() / scale
        self.optimizer.step()
        self.write()

    def write(self) -> None:
        with torch.no_grad():
            for p, master in self.masters.items():
                p.copy_(master)

    def gradients(self, batch: Any, scale: float) -> tuple[Tensor, ...]:
        loss = loss_by_hand(self.module, batch, self.low, self.head)
        return torch.autograd.grad(loss * scale, list(self.module.parameters()))

    def train(self, scale: float) -> None:
        for batch in batches():
            self.step(self.gradients(batch, scale), scale)


@pytest.mark.parametrize("policy", [DEFAULT, WITH_HEAD], ids=["default", "fp32-head"])
@pytest.mark.parametrize("precision", DTYPES)
def test_training_equals_a_loop_by_hand_with_explicit_casts(precision: str, policy: PrecisionPolicy) -> None:
    """A model that calls layer_norm, softmax and cross_entropy itself gets what the policy says, bit for bit."""
    by_hand = LoopByHand(precision, head_in_fp32=policy is WITH_HEAD)
    by_hand.train(scale_of(precision))
    module = train(policy, precision=precision)
    for ours, theirs in zip(module.parameters(), by_hand.module.parameters(), strict=True):
        assert ours.dtype == torch.float32
        assert torch.equal(ours, by_hand.masters.get(theirs, theirs))
    low = DTYPES[precision]
    fp32 = dict.fromkeys(["softmax", "layer_norm", "loss"], torch.float32)
    logits = torch.float32 if policy is WITH_HEAD else low
    assert module.dtypes == {"linear": low, "logits": logits} | fp32
    without = train(None, precision=precision, data=[[x, y] for x, y in batches()])
    assert not all(
        torch.equal(a.float(), b.float()) for a, b in zip(module.parameters(), without.parameters(), strict=True)
    )


def test_validation_follows_the_policy() -> None:
    class Validated(Trained):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.step(batch)

    module = Validated()
    trainer = quiet_trainer(plugins=[master_weights(policy=WITH_HEAD)])
    trainer.validate(module, loader(batches()), verbose=False)
    assert (module.dtypes["logits"], module.dtypes["linear"]) == (torch.float32, torch.bfloat16)
    assert nothing_is_left(module)


class WithNorm(Regression):
    def __init__(self, optimizer: Callable[..., Any] = adamw) -> None:
        super().__init__(optimizer)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 16), nn.Linear(16, 1))


@pytest.mark.parametrize("fused", [False, True])
def test_a_weight_is_cast_once_per_step_however_many_micro_batches(fused: bool) -> None:
    """D22; one that is computed with in fp32 is not cast."""
    module = WithNorm(lambda p: torch.optim.AdamW(p, lr=1e-2, fused=fused))
    policy = PrecisionPolicy([("net.4", "fp32"), *DEFAULT.rules])
    with counted_casts() as casts:
        trainer = quiet_trainer(plugins=[master_weights(policy=policy)], accumulate_grad_batches=4)
        trainer.fit(module, loader(regression_batches(12)))
    counted = {name: casts[id(p)] for name, p in module.named_parameters()}
    assert counted == {name: 0 if name.startswith(("net.1.", "net.4.")) else 3 for name in counted}


@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("kind", [Trained, Manual], ids=["automatic", "manual"])
@pytest.mark.parametrize("reentrant", [None, False, True], ids=["plain", "not-reentrant", "reentrant"])
def test_manual_and_checkpointed_training_equal_plain_training(kind: Any, reentrant: Any, precision: str) -> None:
    expected = train(precision=precision)
    for ours, theirs in zip(
        weights(train(module=kind(reentrant), precision=precision)), weights(expected), strict=True
    ):
        assert torch.equal(ours, theirs)


def test_ddp_equals_one_process() -> None:
    """What is 16 bit is averaged in 16 bit, what the policy keeps in fp32."""

    def run(rank: int) -> list[Tensor]:
        strategy = DDPStrategy(process_group_backend="gloo", gradient_as_bucket_view=True)
        return weights(train(devices=2, strategy=strategy, data=[batches(4)[rank], batches(4)[rank + 2]]))

    first, second = run_ranks(run, 2)
    by_hand = LoopByHand("bf16-true", head_in_fp32=True)
    for pair in (batches(4)[:2], batches(4)[2:]):
        gradients = [by_hand.gradients(batch, 1.0) for batch in pair]
        by_hand.step([a / 2 + b / 2 for a, b in zip(*gradients, strict=True)], 1.0)
    for ours, other, theirs in zip(first, second, by_hand.module.parameters(), strict=True):
        assert torch.equal(ours, other)
        expected = by_hand.masters.get(theirs, theirs).detach()
        torch.testing.assert_close(ours, expected, rtol=2**-8, atol=2e-5)


def test_a_weight_shared_with_an_fp32_module_stays_tied_and_fp32() -> None:
    class Tied(Trained):
        def __init__(self) -> None:
            super().__init__()
            self.second = nn.Linear(WIDTH, CLASSES)
            self.second.weight = self.head.weight

        def forward(self, x: Tensor) -> Tensor:
            x = self.body(self.stem(x))
            first, second = self.head(x), self.second(x)
            self.seen = first.dtype, second.dtype
            return first + second

    module = train(module=Tied())
    assert module.head.weight is module.second.weight
    assert (module.head.weight.dtype, module.second.bias.dtype) == (torch.float32, torch.float32)
    assert module.seen == (torch.float32, torch.bfloat16)


@pytest.mark.parametrize("kind", [Trained, Manual], ids=["automatic", "manual"])
@pytest.mark.parametrize("where", ["forward", "backward", "on_before_optimizer_step"])
def test_after_an_exception_nothing_is_left(where: str, kind: Any) -> None:
    module = failing(kind, where, lambda m: (m.body.gain, m.body.down))
    with pytest.raises(ArithmeticError, match=where):
        train(module=module)
    assert nothing_is_left(module)
    assert torch.get_default_dtype() == torch.float32


def test_fp16_without_a_loss_scale_is_refused() -> None:
    with pytest.raises(
        MisconfigurationException, match=r"rules set fp16 \('head': fp16\).*MasterWeightsPrecision\('16-true'\)"
    ):
        MasterWeightsPrecision("bf16-true", policy={"head": "fp16"})
    MasterWeightsPrecision("16-true", policy={"head": "fp16"})


def test_a_device_without_autocast_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(checks, "why_no_autocast", lambda *device: asked.append(device) or "No. Do this.")
    module = Trained()
    with pytest.raises(MisconfigurationException, match=r"\('16-true'\) cannot run on 'cpu': No. Do this."):
        train(module=module, precision="16-true")
    assert asked == [("cpu", torch.float16)]
    assert {p.dtype for p in module.parameters()} == {torch.float32}


def test_an_operation_that_autocast_leaves_alone_gets_a_hint() -> None:
    """torch's CPU kernel takes no 16-bit weights beside an fp32 input."""
    with pytest.raises(RuntimeError, match="mixed dtype") as caught:
        train({"body": "low", "stem": "fp32"})
    assert "Give its module a rule in fp32" in caught.value.__notes__[0]
    train({"norms": "fp32", "stem": "fp32"})
