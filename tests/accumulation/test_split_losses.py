"""Losses whose batches do not fit: the whole's gradient, or a refusal with numbers, or equal weights and a line."""

import logging
import math
import random
import warnings
from collections.abc import Callable
from random import Random
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from gloo import run_same_ranks
from hypothesis import HealthCheck, currently_in_test_context, given, note, settings
from hypothesis import strategies as st
from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from planted_oom import out_of_memory
from small_models import fit
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_mp import AccumulationScheduler, AutocastPrecision, MicroBatchOnOOM
from lightning_mp.training.accumulation import loss_probe
from lightning_mp.training.accumulation.controller import AccumulationController

Loss = Callable[[Tensor, Any], Tensor]
CLASS_WEIGHTS = torch.tensor([0.2, 1.0, 3.0, 8.0], dtype=torch.float64)
FITS = 10**9


@pytest.fixture(autouse=True)
def exact_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    """All is computed in float64, also under the plugin."""
    monkeypatch.setattr(loss_probe, "_TOLERANCE_16_BIT", 1e-3)


class Model(pl.LightningModule):
    """A net in float64 that runs out of memory with more than ``limit`` rows; keeps the gradients of its steps."""

    def __init__(self, loss: Loss, limit: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 4)).double()
        self.loss, self.limit = loss, limit
        self.gradients: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if len(batch["x"]) > self.limit and torch.is_grad_enabled():
            out_of_memory()
        with torch.autocast("cpu", enabled=False):
            loss = self.loss(self.net(batch["x"]), batch)
        self.log("loss", loss, on_step=True, on_epoch=True, batch_size=len(batch["x"]))
        return loss

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.gradients.append(torch.cat([p.grad.flatten() for p in self.parameters() if p.grad is not None]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def batches(rows: tuple[int, ...] = (8, 8, 7, 8), seed: int = 3) -> list[dict[str, Any]]:
    """Classes of which some are -100; real targets; how many labels the window has, as a Hugging Face batch says it."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for index, number in enumerate(rows):
        labels = torch.randint(0, 4, (number,), generator=generator)
        labels[torch.rand(number, generator=generator) < 0.15 * (index + 1)] = -100
        labels[0] = 1
        x = torch.randn(number, 5, generator=generator, dtype=torch.float64)
        y = torch.randn(number, 4, generator=generator, dtype=torch.float64)
        made.append({"x": x, "labels": labels, "y": y, "num_items_in_batch": 11})
    return made


def masked(out: Tensor, batch: Any) -> Tensor:
    return (out.square().mean(1) * (batch["labels"] >= 0)).sum()


def number(batch: Any) -> Tensor:
    return (batch["labels"] >= 0).sum()


def mined(out: Tensor) -> Tensor:
    violations = F.relu(out[:, 0] + 1.0)
    return violations[violations > 0]


def selected(out: Tensor, batch: Any) -> Tensor:
    """The samples of a part may all be left out, also those of a run's first one."""
    chosen = batch["y"][:, 0] > 0.5
    return F.mse_loss(out[chosen], batch["y"][chosen]) if chosen.any() else 0 * out.sum()


#: Means and sums over samples, tokens, elements or class weights: exact.
EXACT: dict[str, Loss] = {
    "cross-entropy over labels that are not -100": lambda out, b: F.cross_entropy(out, b["labels"]),
    "weighted by class": lambda out, b: F.cross_entropy(out, b["labels"], CLASS_WEIGHTS),
    "masked sum over its number": lambda out, b: masked(out, b) / number(b),
    "masked sum over a clamped number": lambda out, b: masked(out, b) / number(b).clamp(min=1),
    "summed labels over a clamped number": lambda out, b: (
        F.cross_entropy(out, b["labels"], reduction="sum") / number(b).clamp(min=1)
    ),
    "mean over hard examples": lambda out, b: mined(out).mean(),
    "sum over hard examples": lambda out, b: mined(out - 0.5).sum() / max(1, len(mined(out - 0.5))),
    "zero without a sample": selected,
    "mean of squares": lambda out, b: F.mse_loss(out, b["y"]),
    "mean and a term of weights": lambda out, b: F.mse_loss(out, b["y"]),
    "two means over one number": lambda out, b: F.mse_loss(out, b["y"]) + 0.1 * F.smooth_l1_loss(out, b["y"]),
    "sum": lambda out, b: 0.1 * F.mse_loss(out, b["y"], reduction="sum"),
    "sum over a constant": lambda out, b: F.mse_loss(out, b["y"], reduction="sum") / 16,
    "mean times the number of rows": lambda out, b: 0.1 * len(out) * F.mse_loss(out, b["y"]),
    "sum over num_items_in_batch": lambda out, b: (
        F.cross_entropy(out, b["labels"], reduction="sum") / b["num_items_in_batch"]
    ),
}

#: Losses that compare samples with each other.
JOINED: dict[str, Loss] = {
    "in-batch negatives": lambda out, b: F.cross_entropy(out @ out.T, torch.arange(len(out))),
    "variance over the batch": lambda out, b: out.var(0, correction=0).mean(),
    "distances of pairs": lambda out, b: F.pdist(out).mean(),
    "dice over the batch": lambda out, b: (
        1 - 2 * (out.sigmoid() * (b["y"] > 0)).sum() / (out.sigmoid() + (b["y"] > 0)).sum()
    ),
    "exponential of a mean": lambda out, b: F.mse_loss(out, b["y"]).exp(),
}


def set_up(kind: str, window: int) -> dict[str, Any]:
    """Who sets the number of micro-batches."""
    callbacks: dict[str, list[Callback]] = {
        "scheduler": [AccumulationScheduler({0: window})],
        "stock scheduler": [GradientAccumulationScheduler({0: window})],
    }
    arguments = {} if kind in callbacks else {"accumulate_grad_batches": window}
    plugins = [] if kind == "stock" else [AutocastPrecision("bf16-mixed")]
    return {"callbacks": callbacks.get(kind, []), "plugins": plugins, **arguments}


def trained(loss: Loss, data: list[Any], limit: int, kind: str = "stock", window: int = 1) -> tuple[Model, Any]:
    model = Model(loss, limit)
    arguments = set_up(kind, window)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Gradient accumulation: micro-batches have equal weights")
        trainer = fit(model, data, MicroBatchOnOOM(), *arguments.pop("callbacks"), **arguments)
    return model, trainer


def farthest(model: Model, other: Model) -> float:
    """The largest difference of two gradients, relative to the largest number in one; 0 / 0 is none."""
    assert len(model.gradients) == len(other.gradients) > 0
    pairs = [((a - b).abs().max(), b.abs().max()) for a, b in zip(model.gradients, other.gradients, strict=True)]
    return max(0.0 if off == size == 0 else float(off / size) for off, size in pairs)


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("kind", ["stock", "plugin", "scheduler", "stock scheduler"])
@pytest.mark.parametrize("limit", [4, 1])
def test_means_and_sums_have_the_gradient_and_the_logs_of_the_whole(limit: int, kind: str, window: int) -> None:
    data = batches()[: 3 if window == 3 else 4]  # stock's weights are not exact in a shorter window
    for name, loss in EXACT.items():
        whole, whole_trainer = trained(loss, data, FITS, kind, window)
        split, split_trainer = trained(loss, data, limit, kind, window)
        assert farthest(split, whole) < 1e-9, name
        for key, value in whole_trainer.callback_metrics.items():
            assert float(split_trainer.callback_metrics[key]) == pytest.approx(float(value), rel=1e-5), (name, key)


@pytest.mark.filterwarnings("ignore:Gradient accumulation. micro-batches have equal weights")
@pytest.mark.filterwarnings("ignore:It is recommended to use .*sync_dist")
@pytest.mark.parametrize(
    ("seed", "names"),
    [
        (8, ["mean times the number of rows", "zero without a sample", "sum over num_items_in_batch"]),
        pytest.param(11, list(EXACT), marks=pytest.mark.full),
    ],
)
def test_parts_of_other_sizes_on_another_rank(seed: int, names: list[str]) -> None:
    """Where no rank's first part has items, ranks settle on equal weights, as a line says."""

    def on_rank(rank: int) -> dict[str, tuple[float, bool]]:
        found = {}
        for name in names:
            models = [Model(EXACT[name], FITS), Model(EXACT[name], (1, 3)[rank])]
            for model in models:
                arguments = {"plugin": AutocastPrecision("bf16-mixed"), "accumulate_grad_batches": 2, "devices": 2}
                strategy = DDPStrategy(process_group_backend="gloo")
                trainer = fit(model, batches(seed=seed + 100 * rank), MicroBatchOnOOM(), strategy=strategy, **arguments)
            controller = AccumulationController.of(trainer)
            assert controller is not None
            found[name] = farthest(models[1], models[0]), controller.losses.is_equal
        return found

    for of_rank in zip(*(found.items() for found in run_same_ranks(on_rank, 2)), strict=True):
        (name, (off, is_equal)), (_, (_, is_equal_there)) = of_rank
        assert is_equal == is_equal_there, name
        assert off < 1e-6 or (is_equal and name in ("sum over hard examples", "zero without a sample")), name


@pytest.mark.parametrize(("limit", "window"), [(4, 1), (4, 3), (1, 1)])
def test_losses_that_do_not_add_up_are_refused_with_numbers_before_a_step(limit: int, window: int) -> None:
    for name, loss in JOINED.items():
        model = Model(loss, limit)
        with pytest.raises(
            MisconfigurationException, match=r"the loss of [24] samples is .* neither their mean nor"
        ) as e:
            fit(model, batches(), MicroBatchOnOOM(), accumulate_grad_batches=window)
        assert "(over " in str(e.value), name
        assert not model.gradients, name


def test_a_mean_that_counts_nothing_in_every_second_half_is_refused_beside_a_sum() -> None:
    """Also in batches with ``num_items_in_batch``, by which this loss is not divided."""
    data = batches((8,))
    data[0]["labels"] = torch.tensor([1, 2, -100, -100] * 2)
    loss = added([("summed labels over a clamped number", 1.0), ("sum over a constant", 1.0)])
    with pytest.raises(MisconfigurationException, match="neither their mean nor their sum"):
        fit(Model(loss, 4), data, MicroBatchOnOOM(), plugin=AutocastPrecision("bf16-mixed"))


def test_a_loss_that_does_not_add_up_trains_where_it_fits() -> None:
    model, _ = trained(JOINED["in-batch negatives"], batches(), FITS)
    assert len(model.gradients) == 4


@pytest.mark.parametrize(
    ("whole", "halves", "form"),
    [
        (2.75, [(1, 2.0), (3, 3.0)], "mean"),
        (5.0, [(1, 2.0), (3, 3.0)], "sum"),
        (2.5, [(1, 2.0), (3, 3.0)], "neither"),
        (3.0, [(2, 3.0), (0, 9.0)], None),
        (0.5, [(0, 0.5), (0, 0.5)], None),
        (0.5, [(0, 0.5), (0, 0.7)], "neither"),
        (3.0, [(2, 3.0), (2, 0.0)], "neither"),
        (0.0, [(2, 0.0), (2, 0.0)], None),
        (math.nan, [(0, math.nan), (0, math.nan)], None),
        (math.inf, [(2, math.inf), (2, 3.0)], None),
    ],
)
def test_how_a_loss_is_made_of_those_of_its_halves(whole: float, halves: list[Any], form: str | None) -> None:
    compared = loss_probe.Comparison(4, whole, [loss_probe.PartLoss(*half) for half in halves])
    assert compared.form(1e-3) == form


# -- what cannot be compared -------------------------------------------------------------------------------------------


class Draws(Model):
    """Noise in each step, as diffusion models and in-step augmentations have it."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch | {"x": batch["x"] + 0.01 * torch.randn_like(batch["x"])}, batch_idx)


class DrawsAFactor(Model):
    """One number for the whole batch, from NumPy or Python, as mixup does."""

    draw: Callable[[], float]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch | {"x": batch["x"] * type(self).draw()}, batch_idx)


class NoEval(Model):
    """Returns no loss in eval mode, as torchvision's detection models."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss if self.training else [loss]  # type: ignore[return-value]


@pytest.mark.parametrize(("loss", "form"), [("mean of squares", "mean"), ("sum", "sum")])
def test_a_step_that_draws_random_numbers_is_taken_for_the_likelier_form(loss: str, form: str, caplog: Any) -> None:
    callback = MicroBatchOnOOM()
    fit(Draws(EXACT[loss], 4), batches(), callback)
    assert callback.state_dict() == {"size": 4, "form": form}
    assert f"draws random numbers: the loss of a batch is taken for their {form}" in caplog.text


OWN = np.random.default_rng(5)


@pytest.mark.parametrize(
    "draw", [lambda: np.random.uniform(0.9, 1.1), lambda: random.uniform(0.9, 1.1), lambda: OWN.uniform(0.9, 1.1)]
)
def test_numbers_of_numpy_python_and_an_own_generator_are_drawn_too(draw: Callable[[], float], caplog: Any) -> None:
    kind = type("Draws", (DrawsAFactor,), {"draw": staticmethod(draw)})
    callback = MicroBatchOnOOM()
    fit(kind(EXACT["mean of squares"], 4), batches(), callback)
    assert callback.state_dict()["form"] == "mean"
    assert "draws random numbers" in caplog.text


@pytest.mark.filterwarnings("ignore:Gradient accumulation. micro-batches have equal weights")
def test_a_small_term_that_joins_samples_is_said_with_the_numbers(caplog: Any) -> None:
    """Within the tolerance, so it may be rounding; a mean over samples is silent."""
    fit(Model(EXACT["mean of squares"], 4), batches(), MicroBatchOnOOM())
    assert "taken for rounding" not in caplog.text
    small = added([("mean of squares", 1.0), ("variance over the batch", 0.1)])
    fit(Model(small, 4), batches(), MicroBatchOnOOM())
    assert "MicroBatchOnOOM: the loss of 4 samples is" in caplog.text
    assert "off their mean. Up to 0.001 is taken for rounding" in caplog.text


class SometimesNone(Model):
    """No loss without a sample that is chosen."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        chosen = batch["y"][:, 0] > 0.5
        if len(batch["x"]) > self.limit and torch.is_grad_enabled():
            out_of_memory()
        return self.loss(self.net(batch["x"])[chosen], {"y": batch["y"][chosen]}) if chosen.any() else None  # type: ignore[return-value]


@pytest.mark.filterwarnings("ignore:.training_step. returned .None.")
def test_a_part_without_a_loss_is_left_out() -> None:
    for limit in (4, 2, 1):
        whole, split = SometimesNone(EXACT["mean of squares"], FITS), SometimesNone(EXACT["mean of squares"], limit)
        for model in (whole, split):
            fit(model, batches(), MicroBatchOnOOM())
        assert farthest(split, whole) < 1e-9


def test_a_step_without_a_loss_in_eval_mode_is_compared_in_training_mode(caplog: Any) -> None:
    callback = MicroBatchOnOOM()
    model = NoEval(EXACT["sum"], 4)
    fit(model, batches(), callback)
    assert callback.state_dict()["form"] == "sum"
    assert "draws random numbers" not in caplog.text
    assert model.training


def test_parts_of_one_sample_are_compared_without_a_graph() -> None:
    """Two samples do not fit with their graph."""
    callback = MicroBatchOnOOM()
    fit(Model(EXACT["sum"], 1), batches(), callback)
    assert callback.state_dict() == {"size": 1, "form": "sum"}
    with pytest.raises(MisconfigurationException, match="the loss of 2 samples is"):
        fit(Model(JOINED["in-batch negatives"], 1), batches(), MicroBatchOnOOM())


def test_a_loss_that_cannot_be_compared_is_refused_with_the_reason() -> None:
    """Two samples run without a graph, where one alone fits with it."""

    class NeedsGraph(Model):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            loss.register_hook(lambda gradient: gradient)
            return loss

    fit(NeedsGraph(EXACT["sum"], 2), batches(), MicroBatchOnOOM())
    with pytest.raises(MisconfigurationException, match=r"run once more, raised RuntimeError: cannot register a hook"):
        fit(NeedsGraph(EXACT["sum"], 1), batches(), MicroBatchOnOOM())


def test_a_size_that_is_set_by_hand_is_checked_too() -> None:
    callback = MicroBatchOnOOM()
    callback.size = 4
    with pytest.raises(MisconfigurationException, match="neither their mean nor their sum"):
        fit(Model(JOINED["in-batch negatives"], FITS), batches(), callback)


# -- a grammar ---------------------------------------------------------------------------------------------------------


def drawn_loss(random: Random) -> Loss:
    """One to three terms with factors, maybe divided or clamped."""
    names = [*EXACT] + [*JOINED] * (random.random() < 0.3)
    chosen = [(random.choice(names), random.choice([0.1, 1.0, 1.0, 3.0])) for _ in range(random.choice([1, 1, 2, 3]))]
    outer: Callable[[Tensor], Tensor] = random.choice([lambda v: v, lambda v: v, lambda v: v / 4, lambda v: v.exp()])
    note(" + ".join(f"{factor} * {name}" for name, factor in chosen) + f", {outer(torch.tensor(2.0))} of 2")
    return lambda out, batch: outer(added(chosen)(out, batch))


def added(chosen: list[tuple[str, float]]) -> Loss:
    """Terms with their factors."""
    terms = [(factor, (EXACT | JOINED)[name]) for name, factor in chosen]
    return lambda out, batch: torch.stack([factor * term(out, batch) for factor, term in terms]).sum()


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.randoms(use_true_random=False))
def test_a_split_batch_is_exact_or_refused_or_said(caplog: pytest.LogCaptureFixture, random: Random) -> None:
    check(drawn_loss(random), random, caplog.records)


@pytest.mark.full
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.randoms(use_true_random=False))
def test_many_split_batches_are_exact_or_refused_or_said(caplog: pytest.LogCaptureFixture, random: Random) -> None:
    check(drawn_loss(random), random, caplog.records)


#: Terms of which one counts nothing in some parts, or is a sum over another number.
HALF_COUNTED = [
    ("sum over num_items_in_batch", "mean times the number of rows"),
    ("sum over num_items_in_batch", "zero without a sample"),
    ("sum over hard examples", "sum over num_items_in_batch"),
    ("mean and a term of weights", "masked sum over a clamped number"),
    ("mean and a term of weights", "summed labels over a clamped number"),
    ("summed labels over a clamped number", "sum over a constant"),
]


@pytest.mark.parametrize("names", HALF_COUNTED)
def test_a_term_that_counts_nothing_in_a_part_is_seen(names: tuple[str, str], caplog: pytest.LogCaptureFixture) -> None:
    for seed in range(15):
        check(added([(name, 1.0) for name in names]), Random(seed), caplog.records)


def check(loss: Loss, random: Random, lines: list[logging.LogRecord]) -> None:
    kind, window = random.choice(["stock", "plugin", "scheduler", "stock scheduler"]), random.choice([1, 1, 2, 4])
    data = batches(tuple(random.randint(5, 9) for _ in range(4)), random.randint(0, 10**6))
    whole, _ = trained(loss, data, FITS, kind, window)
    if currently_in_test_context():
        note(f"{kind}, window {window}, rows {[len(batch['x']) for batch in data]}")
    split, refusal = Model(loss, random.choice([4, 3, 2, 1])), ""
    lines.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        arguments = set_up(kind, window)
        try:
            fit(split, data, MicroBatchOnOOM(), *arguments.pop("callbacks"), **arguments)
        except MisconfigurationException as error:
            refusal = str(error)
    if refusal:  # by the first batch that shows it, after steps on batches that did not
        assert "neither their mean nor their sum" in refusal
        del whole.gradients[len(split.gradients) :]
    said = [str(one.message) for one in caught] + [record.getMessage() for record in lines]
    if split.gradients:
        assert any("equal weights" in line for line in said) or farthest(split, whole) < 1e-9
    else:
        assert refusal
