"""Whatever the gradients are, weights and moments are those of a run in which the bad steps were never tried.

Every optimizer of torch.optim, by its loop, its foreach and its fused kernel, under a ``LossScaler`` in a hand-written
loop and under the plugin's epilogue. The loss scale wanders from its floor to its ceiling meanwhile. Scales are powers
of two, so that scaling and unscaling are exact and everything is compared bit for bit.
"""

import inspect
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import fit
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer, SparseAdam

from lightning_mp import AutocastPrecision, LossScaler

INF, NAN = float("inf"), float("nan")
SHAPES = [(3, 4), (2, 5)]  # Muon takes matrices only
KINDS: dict[str, list[float]] = {
    "finite": [1.0, -1e-3, 1e6],
    "zero": [0.0],
    "tiny": [1e-30, 1e-41, 1e-45],  # squares vanish; subnormal numbers; the smallest one
    "huge": [1e25, -3e38],  # finite, but their squares are not
    "inf": [INF, -INF],
    "nan": [NAN],
}
BAD = ("huge", "inf", "nan")
#: After so many steps gradients of a kind come again: of 16 draws, 12 and 10 elements, and at most 3 values of a kind.
PERIOD = 240
MORE_ARGUMENTS: dict[str, dict[str, Any]] = {
    "SGD": {"momentum": 0.9, "weight_decay": 0.1},
    "RMSprop": {"momentum": 0.9, "centered": True},
    "Adam": {"amsgrad": True},
}


def every_optimizer() -> Iterator[tuple[type[Optimizer], str]]:
    for optimizer in vars(torch.optim).values():
        if inspect.isclass(optimizer) and issubclass(optimizer, Optimizer) and optimizer not in (Optimizer, LBFGS):
            yield optimizer, "loop"
            for kernel in ("foreach", "fused"):
                if kernel in inspect.signature(optimizer.__init__).parameters:
                    yield optimizer, kernel


Drive = Callable[[type[Optimizer], str, "Sequence"], tuple[Optimizer, list[Tensor]]]

WAYS = list(every_optimizer())
ways = pytest.mark.parametrize(("optimizer", "kernel"), WAYS, ids=[f"{o.__name__}-{kernel}" for o, kernel in WAYS])


def make(optimizer: type[Optimizer], kernel: str, parameters: list[nn.Parameter]) -> Optimizer:
    arguments = {"lr": 0.01} | MORE_ARGUMENTS.get(optimizer.__name__, {})
    possible = inspect.signature(optimizer.__init__).parameters
    if "foreach" in possible:
        arguments["foreach"] = kernel == "foreach"
    return optimizer(parameters, **arguments, **({"fused": True} if kernel == "fused" else {}))


def new_parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


@cache
def noise() -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [[torch.randn(shape, generator=generator) for shape in SHAPES] for _ in range(16)]


@cache
def true_gradients(kind: str, step: int) -> list[Tensor]:
    """A bad one is bad in one element. Nobody writes to them."""
    grads = [g.clone() for g in noise()[step % 16]]
    value = KINDS[kind][step % len(KINDS[kind])]
    if kind in BAD:
        bad = grads[step % 2].view(-1)
        bad[step % bad.numel()] = value
    else:
        torch._foreach_mul_(grads, value)
    return grads


@dataclass
class Sequence:
    """What the gradients of each step are; the same for whoever asks, but for the loss scale."""

    kinds: list[str]
    sparse: bool = False

    def raw(self, step: int, scale: Tensor) -> list[Tensor]:
        """True gradients times the scale."""
        scaled = [g * scale for g in true_gradients(self.kinds[step], step % PERIOD)]
        return [g.to_sparse(1) for g in scaled] if self.sparse else scaled


def reference(optimizer: type[Optimizer], kernel: str, sequence: Sequence, scales: list[Tensor]) -> Optimizer:
    """The bad steps left out; true gradients."""
    parameters = new_parameters()
    stepping = make(optimizer, kernel, parameters)
    for step, kind in enumerate(sequence.kinds):
        if kind not in BAD:
            for parameter, raw in zip(parameters, sequence.raw(step, scales[step]), strict=True):
                parameter.grad = raw * scales[step].reciprocal()
            stepping.step()
    return stepping


def new_scaler() -> LossScaler:
    """Its scale gets from floor to ceiling within 7 changes."""
    return LossScaler(
        "cpu", growth_factor=2.0**7, backoff_factor=2.0**-7, growth_interval=2, hysteresis=2, on_floor="ignore"
    )


def by_hand(optimizer: type[Optimizer], kernel: str, sequence: Sequence) -> tuple[Optimizer, list[Tensor]]:
    parameters, scaler = new_parameters(), new_scaler()
    stepping = make(optimizer, kernel, parameters)
    scales = []
    for step in range(len(sequence.kinds)):
        scales.append(scaler.scale(torch.ones(())).clone())
        for parameter, raw in zip(parameters, sequence.raw(step, scales[-1]), strict=True):
            parameter.grad = raw
        if step % 3 == 0:
            scaler.unscale_(stepping)
        scaler.step(stepping)
        scaler.update()
    return stepping, scales


class Driver(pl.LightningModule):
    """Makes all steps of a sequence in its only batch, through the plugin."""

    def __init__(self, optimizer: type[Optimizer], kernel: str, sequence: Sequence) -> None:
        super().__init__()
        self.weights = nn.ParameterList(new_parameters())
        self.make_optimizer, self.kernel, self.sequence = optimizer, kernel, sequence
        self.scales: list[Tensor] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int:
        plugin, optimizer = self.trainer.precision_plugin, self.optimizers(use_pl_optimizer=False)
        for step in range(len(self.sequence.kinds)):
            self.scales.append(plugin.scaler.scale(torch.ones(())).clone())

            def closure(step: int = step) -> None:
                raw = self.sequence.raw(step, self.scales[-1])
                for parameter, grad in zip(self.weights, raw, strict=True):
                    parameter.grad = grad

            plugin.optimizer_step(optimizer, self, closure)
        return -1

    def training_step(self, batch: Any, batch_idx: int) -> None:
        raise AssertionError("the batch was to be left out")

    def configure_optimizers(self) -> Optimizer:
        return make(self.make_optimizer, self.kernel, list(self.weights))


def by_plugin(optimizer: type[Optimizer], kernel: str, sequence: Sequence) -> tuple[Optimizer, list[Tensor]]:
    module = Driver(optimizer, kernel, sequence)
    trainer = fit(module, [torch.zeros(1)], plugin=AutocastPrecision("16-mixed", scaler=new_scaler()))
    return trainer.optimizers[0], module.scales


def weights_and_moments(optimizer: Optimizer) -> list[tuple[str, Tensor]]:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    named = [("weight", p.detach()) for p in parameters]
    for parameter in parameters:
        named += [(k, v) for k, v in sorted(optimizer.state[parameter].items()) if isinstance(v, Tensor)]
    return named


def check(drives: tuple[Drive, ...], optimizer: type[Optimizer], kernel: str, kinds: list[str]) -> list[Tensor]:
    """Each drive against the same run without the bad steps; their loss scales, which are alike."""
    sequence = Sequence(kinds, sparse=optimizer is SparseAdam)
    driven = [drive(optimizer, kernel, sequence) for drive in drives]
    scales = driven[0][1]
    theirs = reference(optimizer, kernel, sequence, scales)
    ran = any(kind not in BAD for kind in kinds)
    for ours, own_scales in driven:
        assert own_scales == scales
        for (name, value), (_, expected) in zip(
            weights_and_moments(ours) if ran else [("weight", p.detach()) for p in ours.param_groups[0]["params"]],
            weights_and_moments(theirs) if ran else [("weight", p.detach()) for p in theirs.param_groups[0]["params"]],
            strict=True,
        ):
            assert torch.isfinite(value).all(), name
            assert torch.equal(value, expected), name
    return scales


def random_kinds(steps: int, seed: int) -> list[str]:
    """Healthy and bad steps come in streaks; the very first step is bad."""
    chance = random.Random(seed)
    kinds = ["inf"]
    while len(kinds) < steps:
        family = chance.choice([BAD, ("finite", "finite", "zero", "tiny")])
        kinds += [chance.choice(family) for _ in range(chance.randint(1, 12))]
    return kinds[:steps]


@ways
def test_bad_steps_leave_no_trace(optimizer: type[Optimizer], kernel: str) -> None:
    """D01, D47: the first step included, whatever the loss scale is."""
    scales = check((by_hand, by_plugin), optimizer, kernel, random_kinds(60, seed=2))
    assert len({scale.item() for scale in scales}) > 4


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:The last 10 steps of .* had no gradient, or zeros")  # some of them are zeros
@ways
def test_bad_steps_leave_no_trace_in_2_000_steps_of_an_optimizer(optimizer: type[Optimizer], kernel: str) -> None:
    """D01, D47. By each of its kernels, in equal shares of different sequences, by hand and under the plugin."""
    kernels = [other for each, other in WAYS if each is optimizer]
    share = -(-2_000 // (2 * len(kernels)))
    scales = check((by_hand, by_plugin), optimizer, kernel, random_kinds(share, seed=3 + kernels.index(kernel)))
    assert {2.0**-24, 2.0**24} <= {scale.item() for scale in scales}


@settings(max_examples=12, deadline=None)
@given(way=st.sampled_from(WAYS), kinds=st.lists(st.sampled_from(list(KINDS)), min_size=1, max_size=14))
def test_any_short_sequence_leaves_no_trace(way: tuple[type[Optimizer], str], kinds: list[str]) -> None:
    check((by_hand, by_plugin), *way, kinds)
