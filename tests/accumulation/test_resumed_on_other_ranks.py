"""A run that is resumed on another number of ranks, or with another batch size, ends as one that did not stop.

The table: {ranks that saved} x {ranks that resume} x {strategy} x {budget, target batch, schedule by tokens, partial
gradient, noise scale, learning rate by tokens}.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import pytest
import torch
from cpu_fsdp import CpuFsdp
from gloo import run_same_ranks as run_ranks
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from small_models import TokenModel, quiet_trainer, token_batches
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from lightning_mp import AccumulationScheduler, ChinchillaBudget, GradientNoiseScale, TokenLearningRate, WarmupCosine
from lightning_mp.strategies import FSDP2Strategy
from lightning_mp.training.accumulation.controller import AccumulationController
from lightning_mp.training.tokens.budget import LandingMode

# torch warns of in-place operations on a sharded layer's output; there are none here.
pytestmark = pytest.mark.filterwarnings(
    "ignore:FSDP2-wrapped module .* returned a view tensor",
    "ignore:ChinchillaBudget. the run ended after .* it was interrupted",
    "ignore:FSDP.state_dict_type:FutureWarning",
)

SAMPLES = 240
#: tokens of all data, in rows of one to six
ROWS = [
    row for batch in token_batches([2 + 3 * i % 11 for i in range(SAMPLES // 2)]) for row in zip(*batch, strict=True)
]


class Stream:
    """Data without an end, from some sample on; the ranks together see them in order, however many they are."""

    def __init__(self, rank: int, ranks: int, batch_size: int, first: int) -> None:
        self.rank, self.ranks, self.batch_size, self.first = rank, ranks, batch_size, first

    def __iter__(self) -> Iterator[list[Tensor]]:
        first = self.first
        while True:
            begin = first + self.rank * self.batch_size
            rows = [ROWS[i % len(ROWS)] for i in range(begin, begin + self.batch_size)]
            width = max(len(x) for x, _ in rows)
            yield [
                torch.stack([nn.functional.pad(x, (0, width - len(x))) for x, _ in rows]),
                torch.stack([nn.functional.pad(y, (0, width - len(y)), value=-100) for _, y in rows]),
            ]
            first += self.ranks * self.batch_size


@dataclass
class Found:
    """What a rank has seen of a leg."""

    tokens: int = 0
    samples: int = 0
    rates: list[float] = field(default_factory=list)
    batches: list[int] = field(default_factory=list)
    noise: list[tuple[float, ...]] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)


class Recorded(TokenModel):
    def __init__(self) -> None:
        super().__init__(lambda parameters: torch.optim.SGD(parameters, lr=0.5, momentum=0.9))
        self.found = Found()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer = super().configure_optimizers()
        optimizer.register_step_post_hook(lambda o, *_: self.found.rates.append(float(o.param_groups[0]["lr"])))
        return optimizer

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.begun = self.found.samples
        self.found.samples += len(batch[0]) * self.trainer.world_size

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.found.batches.append(self.begun)

    def on_train_end(self) -> None:
        wrapped = self.trainer.strategy.model
        if isinstance(wrapped, FullyShardedDataParallel):
            with FullyShardedDataParallel.summon_full_params(wrapped):
                self.found.weights = [p.detach().clone() for p in self.parameters()]
        else:
            whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in self.parameters()]
            self.found.weights = [p.detach().clone() for p in whole]


class Noise(GradientNoiseScale):
    """Notes what every step tells about the noise."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        add = self.average.add

        def noted(*numbers: float, **more: float) -> None:
            pl_module.found.noise.append(numbers)
            add(*numbers, **more)

        self.average.add = noted  # type: ignore[method-assign]


class SaveAndStop(Callback):
    def __init__(self, path: Path, micro_batches: int) -> None:
        self.path, self.micro_batches = path, micro_batches

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx + 1 == self.micro_batches:
            trainer.save_checkpoint(self.path)
            raise KeyboardInterrupt


class Recipe(NamedTuple):
    """What is asked for; the first leg ends after so many samples."""

    scheduler: Callable[[], AccumulationScheduler]
    saved_at: int
    landing: LandingMode = "ceil"
    budget: int = 500
    noise: bool = True
    keeps_batch_size: bool = False
    """Ranks go on with as large batches as before; so the run ends by steps, since a budget ends on micro-batches."""


RECIPES = {
    "target batch": Recipe(lambda: AccumulationScheduler(target_samples=16), 32, keeps_batch_size=True),
    "schedule by tokens": Recipe(lambda: AccumulationScheduler({0: 2, 100: 4, 250: 3}, unit="token"), 24),
    "partial gradient": Recipe(lambda: AccumulationScheduler({0: 4}, save_partial_gradients=True), 24),
    "partial gradient of a target batch": Recipe(
        lambda: AccumulationScheduler(target_samples=16, save_partial_gradients=True), 24, keeps_batch_size=True
    ),
    "floor": Recipe(lambda: AccumulationScheduler({0: 2}), 32, landing="floor"),
    "nearest": Recipe(lambda: AccumulationScheduler({0: 2}), 32, landing="nearest"),
    "exact": Recipe(lambda: AccumulationScheduler({0: 2}), 32, landing="exact", budget=503),
}
STRATEGIES: dict[str, Callable[[int], Any]] = {
    "ddp": lambda ranks: "ddp" if ranks > 1 else "auto",
    "fsdp2": lambda ranks: (
        FSDP2Strategy(nn.Linear, process_group_backend="gloo", save_distributed_checkpoint=False)
        if ranks > 1
        else "auto"
    ),
    "fsdp1": lambda ranks: CpuFsdp(auto_wrap_policy={nn.Linear}, state_dict_type="full") if ranks > 1 else "auto",
}


def leg(
    rank: int, ranks: int, strategy: str, name: str, path: Path | None, *, saves: bool = False, resumes: bool = False
) -> Found | str:
    """One part of a run, or the message of a refusal."""
    recipe = RECIPES[name]
    batch_size = 4 // ranks if not recipe.keeps_batch_size else 2
    module = Recorded()
    first = recipe.saved_at if resumes else 0
    limit = {"max_steps": 8} if recipe.keeps_batch_size else {}
    callbacks: list[Callback] = [
        recipe.scheduler(),
        ChinchillaBudget(tokens=recipe.budget, landing=recipe.landing, save=False),
        TokenLearningRate(WarmupCosine(warmup=0.2)),
    ]
    if recipe.noise and strategy == "ddp":
        callbacks.append(Noise(average_steps=10))
    if saves:
        assert path is not None
        callbacks.append(SaveAndStop(path, recipe.saved_at // (batch_size * ranks)))
    trainer = quiet_trainer(
        devices=ranks, strategy=STRATEGIES[strategy](ranks), callbacks=callbacks, max_epochs=-1, **limit
    )
    module.found.samples = first
    try:
        data: Any = Stream(rank, ranks, batch_size, first)
        trainer.fit(module, data, ckpt_path=path if resumes else None, weights_only=True)
    except (MisconfigurationException, ValueError) as error:
        return str(error)
    except (KeyboardInterrupt, SystemExit):
        pass
    controller = AccumulationController.of(trainer)
    assert controller is not None
    module.found.tokens = controller.counter.tokens
    return module.found


def on_ranks(ranks: int, strategy: str, wanted: Sequence[tuple[str, Path | None]], **more: Any) -> list[list[Any]]:
    """For each recipe what every rank has; all these legs are made by the same processes."""

    def legs(rank: int) -> list[Found | str]:
        return [leg(rank, ranks, strategy, name, path, **more) for name, path in wanted]

    found = run_ranks(legs, ranks, 60 + 5 * len(wanted)) if ranks > 1 else [legs(0)]
    return list(map(list, zip(*found, strict=True)))


STRAIGHT: dict[tuple[str, int], Found] = {}


def straight(names: Sequence[str], ranks: int = 1) -> list[Found]:
    """The runs that do not stop, without sharding; each is made once."""
    missing = [name for name in names if (name, ranks) not in STRAIGHT]
    if missing:
        for name, (found, *_) in zip(missing, on_ranks(ranks, "ddp", [(name, None) for name in missing]), strict=True):
            assert isinstance(found, Found), found
            STRAIGHT[name, ranks] = found
    return [STRAIGHT[name, ranks] for name in names]


def merged(a: list[float], b: list[float]) -> list[float]:
    """Numbers of either list, once each, in the order that both have."""
    found: list[float] = []
    while a and b:
        if a[0] == pytest.approx(b[0], rel=1e-3):
            found, a, b = [*found, a[0]], a[1:], b[1:]
        elif any(a[0] == pytest.approx(other, rel=1e-3) for other in b):
            found, b = [*found, b[0]], b[1:]
        else:
            found, a = [*found, a[0]], a[1:]
    return [*found, *a, *b]


def among(noise: list[tuple[float, ...]], squares: list[float]) -> list[tuple[float, ...]]:
    """Those numbers that are about one of these steps."""
    return [numbers for numbers in noise if any(numbers[1] == pytest.approx(square, rel=1e-3) for square in squares)]


class Legs(NamedTuple):
    """Of each recipe."""

    first: list[list[Any]]
    second: list[list[Any]]


@pytest.fixture(scope="module")
def both_legs(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Legs]:
    """First legs are made once, whatever goes on from them; what goes on on equally many ranks goes on in one fork."""

    @cache
    def first_legs(names: tuple[str, ...], strategy: str, ranks: int) -> tuple[list[tuple[str, Path]], list[list[Any]]]:
        folder = tmp_path_factory.mktemp("saved")
        paths = [(name, folder / f"{number}.ckpt") for number, name in enumerate(names)]
        return paths, on_ranks(ranks, strategy, paths, saves=True)

    @cache
    def second_legs(
        names: tuple[str, ...], strategy: str, saved_on: tuple[int, ...], ranks: int
    ) -> dict[int, list[list[Any]]]:
        wanted = [pair for number in saved_on for pair in first_legs(names, strategy, number)[0]]
        found = iter(on_ranks(ranks, strategy, wanted, resumes=True))
        return {number: [next(found) for _ in names] for number in saved_on}

    def legs(names: Sequence[str], strategy: str, saved_on: int, resumed_on: int, together: tuple[int, ...]) -> Legs:
        second = second_legs(tuple(names), strategy, together, resumed_on)[saved_on]
        return Legs(first_legs(tuple(names), strategy, saved_on)[1], second)

    return legs


def check(names: Sequence[str], strategy: str, saved_on: int, resumed_on: int, legs: Legs) -> None:
    first, second = legs
    if strategy == "ddp":  # where noise is measured
        for ranks in (saved_on, resumed_on):
            straight(names, ranks)
    for number, name in enumerate(names):
        check_one(name, first[number], second[number])
        if first[number][0].noise + second[number][0].noise:
            check_noise(name, saved_on, resumed_on, first[number][0], second[number][0])


def check_one(name: str, first: list[Found], second: list[Any]) -> None:
    (expected,), before = straight([name]), first[0]
    for found in second:
        assert isinstance(found, Found), (name, found)
        assert found.tokens == expected.tokens, name
        assert before.rates + found.rates == pytest.approx(expected.rates, rel=1e-12), name
        assert {*before.batches, *found.batches} == set(expected.batches), name
        if RECIPES[name].landing != "exact":  # which tokens are hidden in the last micro-batch depends on the ranks
            for ours, whole in zip(found.weights, expected.weights, strict=True):
                torch.testing.assert_close(ours, whole, rtol=1e-4, atol=1e-6, msg=lambda text: f"{name}: {text}")


def check_noise(name: str, saved_on: int, resumed_on: int, first: Found, second: Found) -> None:
    """A gradient of each rank is the smaller one of the two that are compared."""
    noise = first.noise + second.noise
    (on_old,), (on_new,), (alone,) = (straight([name], ranks) for ranks in (saved_on, resumed_on, 1))
    # Not every step has a number: a last window of one micro-batch has no smaller gradient on one process, and in
    # the first step one of four ranks has no target tokens. The whole batch's square tells which step it is of.
    squares: list[float] = []
    for run in (alone, on_old, on_new):
        squares = merged(squares, [numbers[1] for numbers in run.noise])
    begun, inside = len(first.batches), RECIPES[name].scheduler().save_partial_gradients
    # The window that was saved open is left out.
    wanted = among(on_old.noise, squares[: begun - inside]) + among(on_new.noise, squares[begun:])
    assert len(alone.rates) - 2 - inside <= len(noise) == len(wanted), name
    for ours, theirs in zip(noise, wanted, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-3), name


QUICK = [("target batch", 1, 2), ("partial gradient of a target batch", 2, 1)]


@pytest.mark.full
@pytest.mark.filterwarnings(
    "ignore:ChinchillaBudget. the run ended after", "ignore:ChinchillaBudget. max_steps=8 ends before the budget"
)
@pytest.mark.parametrize(("name", "saved_on", "resumed_on"), [*QUICK, *((name, 1, 1) for name in RECIPES)])
def test_a_resumed_run_ends_as_one_that_did_not_stop(
    name: str, saved_on: int, resumed_on: int, both_legs: Callable[..., Legs]
) -> None:
    check([name], "ddp", saved_on, resumed_on, both_legs([name], "ddp", saved_on, resumed_on, (saved_on,)))


CHANGES = [
    # one rank alone has no strategy, and is above; nothing but the weights depends on the strategy
    *(("ddp", a, b) for a in (1, 2, 4) for b in (1, 2, 4) if 1 < a * b < 16),
    *(("fsdp2", a, b) for a, b in [(1, 2), (2, 1), (2, 4), (4, 2)]),
    *(("fsdp1", a, b) for a, b in [(2, 1), (1, 2)]),
]


@pytest.mark.full
@pytest.mark.filterwarnings(
    "ignore:ChinchillaBudget. the run ended after", "ignore:ChinchillaBudget. max_steps=8 ends before the budget"
)
@pytest.mark.parametrize(("strategy", "saved_on", "resumed_on"), CHANGES)
def test_on_any_ranks_a_resumed_run_ends_as_one_that_did_not_stop(
    strategy: str, saved_on: int, resumed_on: int, both_legs: Callable[..., Legs]
) -> None:
    names = [name for name in RECIPES if strategy == "ddp" or "partial" not in name]
    together = tuple(a for other, a, b in CHANGES if (other, b) == (strategy, resumed_on))
    check(names, strategy, saved_on, resumed_on, both_legs(names, strategy, saved_on, resumed_on, together))


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks")
def test_a_partial_gradient_is_refused_where_it_cannot_be_put_back(tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    leg(0, 1, "ddp", "partial gradient", path, saves=True)

    def resume(rank: int) -> str:
        trainer = quiet_trainer(
            devices=2, strategy=STRATEGIES["fsdp2"](2), callbacks=[AccumulationScheduler({0: 4})], max_epochs=-1
        )
        with pytest.raises(
            ValueError, match="gradient of the first 2 of 4 micro-batches of a window, which cannot"
        ) as e:
            trainer.fit(Recorded(), Stream(rank, 2, 2, 24), ckpt_path=path, weights_only=True)  # type: ignore[arg-type]
        return str(e.value)

    for message in run_ranks(resume, 2):
        assert (
            "which cannot be restored here: FSDP2Strategy keeps the unsharded gradients of an open window inside of it"
            in message
        )
        assert message.endswith("or from a checkpoint at the end of a window.")


@pytest.mark.quick_cases(1)
@pytest.mark.filterwarnings("ignore:ChinchillaBudget. max_steps=.* ends before the budget")
@pytest.mark.parametrize("landing", ["exact", "floor"])
def test_a_landing_holds_when_batches_become_many_times_as_large(landing: Any, tmp_path: Path) -> None:
    """The end must be looked for from the first micro-batch on: it holds 32 times as many tokens as any before."""
    batches = token_batches([4] * 64)

    def budget() -> ChinchillaBudget:
        return ChinchillaBudget(tokens=200, landing=landing, save=False)

    saved = quiet_trainer(callbacks=[budget()], max_steps=40, max_epochs=-1)
    with pytest.warns(UserWarning, match="the run ended after 160 of 200"):
        saved.fit(TokenModel(), Batches(batches, 1))  # type: ignore[arg-type]
    saved.save_checkpoint(tmp_path / "x.ckpt")

    def resume(rank: int) -> tuple[bool, int]:
        resumed = budget()
        trainer = quiet_trainer(callbacks=[resumed], max_epochs=-1, devices=2, strategy="ddp")
        data: Any = Batches(batches[rank::2], 16)
        trainer.fit(TokenModel(), data, ckpt_path=tmp_path / "x.ckpt", weights_only=True)
        return resumed.reached, resumed.tokens_seen

    assert run_ranks(resume, 2) == [(True, 200 if landing == "exact" else 160)] * 2


class Batches:
    """Several ready batches in one."""

    def __init__(self, batches: list[list[Tensor]], together: int) -> None:
        self.batches, self.batch_size = batches, together

    def __iter__(self) -> Iterator[list[Tensor]]:
        for i in range(0, len(self.batches), self.batch_size):
            yield [torch.cat(parts) for parts in zip(*self.batches[i : i + self.batch_size], strict=True)]


# -- budgets -----------------------------------------------------------------------------------------------------------


def spend(tokens: int, path: Path, *, resumes: bool = False, **arguments: Any) -> tuple[pl.Trainer, ChinchillaBudget]:
    budget = ChinchillaBudget(tokens=tokens, save=False, **arguments)
    trainer = quiet_trainer(callbacks=[budget], max_epochs=-1)
    trainer.fit(TokenModel(), Stream(0, 1, 4, 0), ckpt_path=path if resumes else None, weights_only=True)  # type: ignore[arg-type]
    trainer.save_checkpoint(path)
    return trainer, budget


@pytest.mark.parametrize("landing", ["exact", "floor", "ceil", "nearest"])
def test_a_finished_run_goes_on_with_a_larger_budget_and_not_with_the_same(landing: Any, tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    first, _ = spend(300, path, landing=landing)
    same, budget = spend(300, path, resumes=True, landing=landing)
    assert same.global_step == first.global_step
    assert budget.reached
    larger, budget = spend(400, path, resumes=True, landing=landing)
    assert larger.global_step > first.global_step
    if landing == "exact":
        assert budget.tokens_seen == 400


def test_a_smaller_budget_than_was_spent_ends_the_run_with_the_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "x.ckpt"
    first, _ = spend(300, path)
    with caplog.at_level("INFO"):
        again, budget = spend(200, path, resumes=True)
    assert (again.global_step, budget.tokens_seen) == (first.global_step, 300)
    assert "ChinchillaBudget: the budget was spent before this fit, which made no step: 300 tokens" in caplog.text


# -- the controller's state -------------------------------------------------------------------------------------------


SPOILT: list[tuple[str, Callable[[dict[str, Any]], Any]]] = [
    ("it has no 'reference_items'", lambda state: state.pop("reference_items")),
    ("'reference_items' is nan; it must be a positive number or None", lambda s: s.update(reference_items=torch.nan)),
    ("'micro_batch_samples' is -1; it must be a whole number from 0", lambda s: s.update(micro_batch_samples=-1)),
    ("'budget_reached' is 'no'; it must be True or False", lambda s: s.update(budget_reached="no")),
    ("'tokens' is 1.5; it must be a whole number from 0", lambda s: s["counter"].update(tokens=1.5)),
    ("the token counter cannot be loaded: it has no 'windows'", lambda s: s["counter"].pop("windows")),
    ("'skipped_tokens' is 999,999, more than its", lambda s: s["counter"].update(skipped_tokens=999_999)),
    ("'data_ranks' is 0; it must be a positive number", lambda s: s["layout"].update(data_ranks=0)),
]


@pytest.mark.parametrize(("message", "spoil"), SPOILT, ids=[message for message, _ in SPOILT])
def test_spoilt_state_is_refused_before_anything_is_changed(
    message: str, spoil: Callable[[dict[str, Any]], Any], tmp_path: Path
) -> None:
    trainer, _ = spend(100, tmp_path / "x.ckpt")
    saved = AccumulationController.of(trainer)
    assert saved is not None
    state, controller = saved.state_dict(), AccumulationController()
    before = controller.state_dict()
    controller.load_state_dict(saved.state_dict())
    assert controller.state_dict() == state
    controller = AccumulationController()
    spoil(state)
    with pytest.raises(ValueError, match="cannot be loaded") as error:
        controller.load_state_dict(state)
    assert message in str(error.value)
    assert "Nothing was changed" in str(error.value)
    assert controller.state_dict() == before


@pytest.mark.parametrize(
    ("message", "spoil"),
    [
        ("'totals' is [1.0]; it must be a list of 8 times", lambda p: p.update(totals=[1.0])),
        ("it has no 'loss_scale'", lambda p: p.pop("loss_scale")),
        (
            "'head.bias' is a tensor of shape [3] and float32",
            lambda p: p["gradients"].update({"head.bias": torch.ones(3)}),
        ),
    ],
)
def test_a_spoilt_partial_gradient_is_refused(
    message: str, spoil: Callable[[dict[str, Any]], Any], tmp_path: Path
) -> None:
    path = tmp_path / "x.ckpt"
    leg(0, 1, "ddp", "partial gradient", path, saves=True)
    checkpoint = torch.load(path, weights_only=True)
    spoil(checkpoint["lightning_mp_partial_window"])
    torch.save(checkpoint, path)
    refusal = leg(0, 1, "ddp", "partial gradient", path, resumes=True)
    assert isinstance(refusal, str)
    assert message in refusal
