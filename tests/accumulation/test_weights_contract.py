"""Losses from a grammar, in windows on one and two ranks: exact, or Lightning's equal weights, and a line says which.

Each loss comes with its parts and what each is a mean over, so that one large batch in float64 is known without reading
a graph. Learning rates are 0: all windows of a run see the same weights.
"""

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from random import Random
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from gloo import run_same_ranks
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler
from lightning.pytorch.strategies import DDPStrategy
from lightning_utilities.core import rank_zero
from small_models import fit
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_mp import AccumulationScheduler, AutocastPrecision
from lightning_mp.training.accumulation.controller import AccumulationController

Part = tuple[Tensor, float]  # a mean, and how many items it is over
Term = Callable[[Tensor, "Batch"], Part]
CLASS_WEIGHTS = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
WINDOWS = 4


@dataclass
class Batch:
    x: Tensor
    labels: Tensor
    targets: Tensor
    index: int

    @property
    def mask(self) -> Tensor:
        return self.labels >= 0

    @property
    def labelled(self) -> int:
        return int(self.mask.sum())

    @classmethod
    def drawn(cls, random: Random, index: int, least: int) -> "Batch":
        rows = random.randint(1, 6)
        generator = torch.Generator().manual_seed(random.randint(0, 10**9))
        labels = torch.randint(0, 4, (rows,), generator=generator)
        labels[random.randint(min(least, rows), rows) :] = -100
        x = torch.randn(rows, 5, generator=generator, dtype=torch.float64)
        return cls(x, labels, torch.randn(rows, 4, generator=generator, dtype=torch.float64), index)


def each(o: Tensor, b: Batch) -> Tensor:
    return F.cross_entropy(o, b.labels.clamp(min=0), reduction="none") * b.mask


def zero_if_empty(o: Tensor, b: Batch) -> Part:
    return (F.cross_entropy(o, b.labels) if b.labelled else o.sum() * 0.0), b.labelled


def per_row(o: Tensor, b: Batch) -> Tensor:
    losses = [F.cross_entropy(x[None], y[None]) for x, y in zip(o, b.labels, strict=True) if y >= 0]
    return sum(losses, 0 * o.sum()) / max(1, len(losses))


TERMS: dict[str, Term] = {
    "ce": zero_if_empty,
    "smoothed": lambda o, b: (F.cross_entropy(o, b.labels.clamp(min=0), label_smoothing=0.1), len(o)),
    "class weights": lambda o, b: (
        F.cross_entropy(o, b.labels.clamp(min=0), weight=CLASS_WEIGHTS),
        float(CLASS_WEIGHTS[b.labels.clamp(min=0)].sum()),
    ),
    "mse": lambda o, b: (F.mse_loss(o, b.targets), o.numel()),
    "rows": lambda o, b: (o.square().sum(1).mean(), len(o)),
    "masked": lambda o, b: (each(o, b).sum() / b.mask.sum().clamp(min=1), b.labelled),
    "masked by Python": lambda o, b: (each(o, b).sum() / max(1, b.labelled), b.labelled),
    "loop": lambda o, b: (per_row(o, b), b.labelled),
}
Joined = tuple[Tensor, list[Part] | None]  # a loss, and its parts; None where it is no sum of means


def added(a: Part, b: Part) -> Joined:
    """Terms over the same items are one mean, also where one of them joins inside of a window."""
    value = a[0] + b[0]
    return value, [(value, a[1])] if a[1] == b[1] else [a, b]


def times(factor: float, part: Part) -> Part:
    return factor * part[0], part[1]


JOINED: dict[str, Callable[[Part, Part, int, int], Joined]] = {
    "first": lambda a, b, i, turn: (a[0], [a]),
    "halved": lambda a, b, i, turn: (a[0] / 2, [times(0.5, a)]),
    "sum": lambda a, b, i, turn: added(a, times(0.3, b)),
    "stack": lambda a, b, i, turn: (torch.stack([a[0], b[0]]).mean(), added(times(0.5, a), times(0.5, b))[1]),
    "times 0": lambda a, b, i, turn: (a[0] + 0.0 * b[0], [a]),
    "joins": lambda a, b, i, turn: added(a, b) if i >= turn else (a[0], [a]),
    "leaves": lambda a, b, i, turn: added(a, b) if i < turn else (a[0], [a]),
    "alternates": lambda a, b, i, turn: (a[0], [a]) if i % 2 else (b[0], [b]),
    "factor changes": lambda a, b, i, turn: ((1 + 0.1 * i) * a[0], [times(1 + 0.1 * i, a)]),
    "product": lambda a, b, i, turn: (a[0] * b[0], None),
    "root": lambda a, b, i, turn: ((a[0] + 1).sqrt(), None),
}


@dataclass
class Program:
    """One run: its loss, its windows, and who sets the number of micro-batches."""

    terms: tuple[str, str]
    joined: str
    turn: int
    planned: int
    driver: str
    seed: int

    @classmethod
    def drawn(cls, random: Random, *, ranks: int) -> "Program":
        return cls(
            (random.choice(list(TERMS)), random.choice(list(TERMS))),
            random.choice(list(JOINED)),
            random.randint(1, 6),
            random.choice([2, 3] if ranks == 1 else [1, 2]),
            random.choice(["plugin", "scheduler", "stock scheduler"]),
            random.randint(0, 10**9),
        )

    def batches(self, ranks: int) -> list[list[Batch]]:
        """Of each rank; the last window is short."""
        random = Random(self.seed)
        least = random.choice([0, 1, 6])
        if {*self.terms} <= {"ce", "smoothed", "class weights"}:
            least = max(least, 1)  # a limit: two heads of one kind that take turns are taken for one task
        length = self.planned * (WINDOWS - 1) + random.randint(1, self.planned)
        return [[Batch.drawn(random, i, least) for i in range(length)] for _ in range(ranks)]

    def loss(self, o: Tensor, b: Batch) -> Joined:
        first, second = (TERMS[name](o, b) for name in self.terms)
        return JOINED[self.joined](first, second, b.index, self.turn)


class Exact(AutocastPrecision):
    def forward_context(self) -> AbstractContextManager[Any]:
        return nullcontext()


class Model(pl.LightningModule):
    def __init__(self, program: Program) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net, self.program = nn.Linear(5, 4).double(), program
        self.gradients: list[Tensor] = []
        self.equal: list[bool] = []

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self.program.loss(self.net(batch.x), batch)[0]

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.gradients.append(flat([p.grad for p in self.net.parameters()]))
        controller = AccumulationController.of(self.trainer)
        self.equal.append(controller is not None and controller.losses.is_equal)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def flat(gradients: list[Tensor | None]) -> Tensor:
    return torch.cat([torch.zeros(20) if g is None else g.detach().flatten() for g in gradients])


def gradient(model: Model, value: Tensor) -> Tensor:
    parameters = list(model.net.parameters())
    found = torch.autograd.grad(value, parameters, retain_graph=True, allow_unused=True)
    return torch.cat(
        [(torch.zeros_like(p) if g is None else g).flatten() for g, p in zip(found, parameters, strict=True)]
    )


@contextmanager
def lines() -> Iterator[list[str]]:
    """What is said: to the logger of ``rank_zero_info``, which is that of the Lightning imported last; and warnings."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = rank_zero.log
    logger.addHandler(handler)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        yield said
    logger.removeHandler(handler)
    said += [str(one.message) for one in warned]


def trained(program: Program, batches: list[Batch], ranks: int) -> tuple[list[Tensor], list[bool], list[str]]:
    model = Model(program)
    callbacks: list[Callback] = []
    arguments: dict[str, Any] = {"plugin": Exact("bf16-mixed")}
    if program.driver == "scheduler":
        callbacks = [AccumulationScheduler({0: program.planned})]
    elif program.driver == "stock scheduler":
        callbacks = [GradientAccumulationScheduler({0: program.planned})]
    else:
        arguments["accumulate_grad_batches"] = program.planned
    if ranks > 1:
        arguments |= {"devices": ranks, "strategy": DDPStrategy(process_group_backend="gloo")}
    with lines() as said:
        fit(model, batches, *callbacks, **arguments)
    return model.gradients, model.equal, [line for line in said if "Gradient accumulation" in line]


def check(program: Program, results: list[tuple[list[Tensor], list[bool], list[str]]], ranks: int) -> list[str]:
    """The verdict on each window: exact, or stock's; asserts the contract."""
    model, all_batches = Model(program), program.batches(ranks)
    found, equal, said = results[0]
    for gradients, is_equal, _ in results[1:]:
        assert is_equal == equal
        torch.testing.assert_close(gradients, found)
    assert sum("equal weights" in line for line in said) == any(equal) == equal[-1]
    assert len(found) == WINDOWS
    verdicts = []
    for window in range(WINDOWS):
        chosen = slice(window * program.planned, (window + 1) * program.planned)
        stock, parts_of, has_parts = torch.zeros(24, dtype=torch.float64), {}, True  # type: ignore[var-annotated]
        for batches in all_batches:
            for batch in batches[chosen]:
                value, parts = program.loss(model.net(batch.x), batch)
                divisor = len(batches[chosen]) if program.driver == "scheduler" else program.planned
                stock += gradient(model, value) / divisor / ranks
                has_parts = has_parts and parts is not None
                for index, (part, number) in enumerate(parts or []):
                    parts_of.setdefault(index, []).append((gradient(model, part), number))
        exact = torch.zeros(24, dtype=torch.float64)
        for entries in parts_of.values():
            total = sum(number for _, number in entries)
            for g, number in entries:
                exact += g * (number / total if total else 0.0)
        size = max(float(exact.norm()), float(stock.norm()), 1e-9)
        off, apart = (float((found[window] - other).norm()) / size for other in (exact, stock))
        was_equal = equal[window - 1] if window else equal[0] and len(said) == 1
        if has_parts and off < 1e-6:
            verdicts.append("exact")
        elif equal[window]:
            # In the window of the change the others keep their weights.
            assert apart < 1e-6 or not was_equal, (program, window, apart)
            verdicts.append("stock" if apart < 1e-6 else "changed")
        else:
            raise AssertionError((program, window, f"{off:.2g} off, {apart:.2g} from stock, {said}"))
    return verdicts


@settings(max_examples=25, deadline=None)
@given(st.randoms(use_true_random=False))
def test_a_window_is_exact_or_lightnings_and_says_so(random: Random) -> None:
    program = Program.drawn(random, ranks=1)
    check(program, [trained(program, program.batches(1)[0], 1)], 1)


@pytest.mark.full
@settings(max_examples=400, deadline=None)
@given(st.randoms(use_true_random=False))
def test_many_windows_are_exact_or_lightnings(random: Random) -> None:
    program = Program.drawn(random, ranks=1)
    check(program, [trained(program, program.batches(1)[0], 1)], 1)


@pytest.mark.parametrize("runs", [8, pytest.param(120, marks=pytest.mark.full)])
def test_so_it_is_on_two_ranks(runs: int) -> None:
    programs = [Program.drawn(Random(seed), ranks=2) for seed in range(runs)]

    def on_rank(rank: int) -> list[tuple[list[Tensor], list[bool], list[str]]]:
        return [trained(program, program.batches(2)[rank], 2) for program in programs]

    first, second = run_same_ranks(on_rank, 2)
    verdicts = [v for program, *both in zip(programs, first, second, strict=True) for v in check(program, both, 2)]
    assert {"exact", "stock"} <= set(verdicts)
