"""Policies under Float8Precision: a loop by hand with explicit casts, which layers stay out of fp8, and the ends."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from gloo import FLOAT8, run_ranks
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from policy_models import LOW, dtypes_of_operations, failing, nothing_is_left
from small_models import StepsByHand, adamw, fit, weights
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_mp import Float8Precision, PrecisionPolicy
from lightning_mp.training.policy.float8_layers import choose_float8_layers
from lightning_mp.training.precision.fp8.conversion import RECIPES, convert_to_float8, float8_config

WIDTH, CLASSES = 32, 5
DEFAULT = PrecisionPolicy.default()
# Of the layers that could be fp8 `up` and `down`, `gate` is kept in fp32; `head` is none of them.
RULES = [("gate", "fp32"), ("up", "low"), ("head", "fp32"), *DEFAULT.rules]


class Net(pl.LightningModule):
    """Calls its norm, softmax and loss as functions; two or three of its layers can be fp8."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(8, WIDTH)
        self.up, self.gate, self.down = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, CLASSES)
        self.dtypes: dict[str, torch.dtype] = {}

    def mix(self, x: Tensor) -> Tensor:
        x = F.layer_norm(x + self.down(F.gelu(self.up(x)) * self.gate(x)), (WIDTH,))
        return x + F.softmax(x @ x.mT, -1) @ x

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.mix(self.stem(x)))
        return logits

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits.flatten(0, 1), y.flatten())
        self.dtypes = dtypes_of_operations(x, self.stem.weight, logits, loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return adamw(self.parameters())


class Manual(StepsByHand, Net):
    pass


def batches(num_batches: int = 2) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        [torch.randn(2, 8, 8, generator=generator), torch.randint(CLASSES, (2, 8), generator=generator)]
        for _ in range(num_batches)
    ]


def plugin(policy: Any = RULES, recipe: str = "rowwise", **arguments: Any) -> Float8Precision:
    return Float8Precision(
        recipe,
        skip_first_and_last=False,
        skip_small=False,
        policy=PrecisionPolicy(policy) if isinstance(policy, list) else policy,
        **arguments,
    )


def train(module: Any = None, ours: Any = None, data: Any = None, **arguments: Any) -> Any:
    module = Net() if module is None else module
    fit(module, batches() if data is None else data, plugin=ours or plugin(), **arguments)
    return module


def equal(first: nn.Module, second: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(weights(first), weights(second), strict=True))


def linear(layer: nn.Linear, x: Tensor, dtype: torch.dtype) -> Tensor:
    return F.linear(x.to(dtype), layer.weight.to(dtype), layer.bias.to(dtype))


def in_fp8(layer: nn.Linear, x: Tensor) -> Tensor:
    with torch.autocast("cpu", LOW):
        return layer(x)


def loss_by_hand(module: Net, batch: Any, kept: torch.dtype | None) -> Tensor:
    """What a policy says, written out: no autocast but around fp8 layers. ``kept`` is the dtype of gate and head."""
    x, y = batch
    x = linear(module.stem, x, LOW)
    up = F.gelu(in_fp8(module.up, x))
    gate = linear(module.gate, x, kept) if kept is not None else in_fp8(module.gate, x)
    x = x + in_fp8(module.down, up * gate)
    x = F.layer_norm(x.float(), (WIDTH,))
    x = x + F.softmax((x.to(LOW) @ x.mT.to(LOW)).float(), -1).to(LOW) @ x.to(LOW)
    logits = linear(module.head, x, kept or LOW)
    return F.cross_entropy(logits.float().flatten(0, 1), y.flatten())


@pytest.mark.parametrize("kept", [None, torch.float32, LOW], ids=["default", "fp32-modules", "bf16-modules"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_training_equals_a_loop_by_hand_with_explicit_casts(recipe: str, kept: torch.dtype | None) -> None:
    """A model that calls layer_norm, softmax and cross_entropy itself gets what the policy says, bit for bit."""
    by_hand = Net()
    skip = ["gate"] if kept is not None else []
    convert_to_float8(choose_float8_layers(by_hand, skip, skip_first_and_last=False), float8_config(recipe))
    optimizer = adamw(by_hand.parameters())
    for batch in batches():
        optimizer.zero_grad()
        loss_by_hand(by_hand, batch, kept).backward()
        optimizer.step()
    rules = DEFAULT if kept is None else [("gate", kept), ("head", kept), *DEFAULT.rules]
    module = train(ours=plugin(rules, recipe))
    assert equal(module, by_hand)
    assert not equal(module, train(ours=plugin(None, recipe)))
    fp32 = dict.fromkeys(["softmax", "layer_norm", "loss"], torch.float32)
    assert module.dtypes == {"linear": LOW, "logits": kept or LOW} | fp32
    assert {p.dtype for p in module.parameters()} == {torch.float32}


def test_layers_that_a_rule_keeps_from_low_are_left_out_of_fp8() -> None:
    def reasons(rules: Any, **arguments: Any) -> dict[str, str | None]:
        ours = plugin(rules, **arguments)
        train(ours=ours)
        return {layer.name: layer.skipped_because for layer in ours.layers if layer.name not in ("stem", "head")}

    assert reasons({"gate": "fp32"}) == {"up": None, "gate": "rule 1 of the policy, 'gate': fp32", "down": None}
    assert reasons([("up", "low"), ("class:Linear", "bf16")]) == {
        "up": None,
        "gate": "rule 2 of the policy, 'class:Linear': bf16",
        "down": "rule 2 of the policy, 'class:Linear': bf16",
    }
    assert reasons([("down", "low"), ("gate", "fp32"), ("*", "low")])["gate"] == "rule 2 of the policy, 'gate': fp32"
    assert reasons({"gate": "fp32"}, skip=["gate"])["gate"] == "skip='gate'"
    assert set(reasons(DEFAULT).values()) == {None}
    layers = choose_float8_layers(Net(), policy=PrecisionPolicy(RULES).resolve(Net()))
    assert layers[-1].skipped_because == "rule 3 of the policy, 'head': fp32", "though its size would not do either"


def test_a_rule_about_the_product_of_layers_leaves_nothing_for_fp8() -> None:
    module = Net()
    with pytest.raises(
        MisconfigurationException, match=r"multiply nothing in fp8.*rule 1 of the policy, 'linear': fp32"
    ):
        train(module, plugin({"linear": "fp32"}))
    assert nothing_is_left(module)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("emulate", [None, True], ids=["real", "emulated"])
def test_rules_about_operations_do_not_reach_into_fp8_layers(recipe: str, emulate: bool | None) -> None:
    """Their products, transposes and additions are no calls of the model's."""
    inner = [(f"op:{name}", "fp32") for name in ("mm", "t", "add", "abs", "amax", "clamp", "reshape", "div", "mul")]
    expected = train(ours=plugin({"softmax": "fp32"}, recipe, emulate=emulate))

    class NoneOfThem(Net):
        """Calls none of these operations where it would matter."""

        def mix(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", enabled=False):
                gate = F.gelu(self.in_autocast(self.up, x)) * self.in_autocast(self.gate, x)
                x = x + self.in_autocast(self.down, gate)
            x = F.layer_norm(x, (WIDTH,))
            shares = F.softmax(x @ x.mT, -1) @ x
            with torch.autocast("cpu", enabled=False):
                return x + shares

        def in_autocast(self, layer: nn.Linear, x: Tensor) -> Tensor:
            with torch.autocast("cpu", LOW):
                return layer(x)

    module = train(NoneOfThem(), plugin([("softmax", "fp32"), *inner], recipe, emulate=emulate))
    assert equal(module, expected)


def test_ddp_equals_one_process() -> None:
    def run(rank: int) -> list[Tensor]:
        strategy = DDPStrategy(process_group_backend="gloo")
        return weights(train(devices=2, strategy=strategy, data=[batches()[rank]]))

    first, second = run_ranks(run, 2, imports=FLOAT8)
    alone = train(accumulate_grad_batches=2)
    for ours, other, theirs in zip(first, second, weights(alone), strict=True):
        assert torch.equal(ours, other)
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_tied_and_frozen_weights_stay_so() -> None:
    """D26, where one of two layers that share a weight is kept in fp32."""
    module = Net()
    module.gate.weight = module.up.weight
    module.down.requires_grad_(False)
    before = weights(module.down)
    ours = plugin()
    train(module, ours)
    assert [layer.name for layer in ours.layers if layer.skipped_because is None] == ["up", "down"]
    assert module.gate.weight is module.up.weight
    assert all(torch.equal(a, b) for a, b in zip(weights(module.down), before, strict=True))
    assert not module.down.weight.requires_grad


@pytest.mark.parametrize("kind", [Net, Manual], ids=["automatic", "manual"])
@pytest.mark.parametrize("where", ["forward", "backward", "on_before_optimizer_step"])
def test_after_an_exception_nothing_is_left(where: str, kind: Any) -> None:
    module = failing(kind, where, lambda m: (m.up.weight, m.down))
    with pytest.raises(ArithmeticError, match=where):
        train(module)
    assert nothing_is_left(module)
    assert {type(layer) for layer in module.children()} == {nn.Linear}


def test_a_rule_that_matches_nothing_stops_the_run_before_any_layer_is_converted() -> None:
    module = Net()
    with pytest.raises(ValueError, match=r"Rule 1 of the policy, 'gaet': fp32, matches none.*Near misses: gate"):
        train(module, plugin({"gaet": "fp32"}))
    assert {type(layer) for layer in module.children()} == {nn.Linear}
