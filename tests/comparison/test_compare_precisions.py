"""Promise: a pair differs in the precision and in nothing else, and the verdict is right where the truth is planted."""

import copy
import json
import math
import random
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from compared_models import CoarseWeights, Pictures, ThirstyPrecision, TinyClassifier, pictures
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.demos.boring_classes import BoringModel
from small_models import Trained
from torch import nn
from torch.utils.data import DataLoader

from lightning_mp import AutocastPrecision, LossScaler, compare_precisions
from lightning_mp.monitors.comparison.precisions import plugin_factories
from lightning_mp.monitors.comparison.trial import Experiment, TrainingData, run_trial

PRECISIONS = {
    "fp32": "32-true",
    "thirsty": ThirstyPrecision,
    "coarse": CoarseWeights(),
    "bf16": AutocastPrecision("bf16-mixed"),
}
STEPS = 13  # two and a half epochs


def compare(**others):
    """Costs are measured in one round, since they are looked at elsewhere."""
    arguments = {"steps": STEPS, "seeds": 3, "monitor": "val/loss", "rounds": 1, "accelerator": "cpu"}
    return compare_precisions(TinyClassifier, Pictures(), **{"precisions": PRECISIONS, **arguments, **others})


@pytest.fixture(scope="module")
def found():
    return compare()


@pytest.mark.full
def test_the_same_arithmetic_differs_by_exactly_nothing(found):
    """The one beside fp32 draws random numbers of its own; seeded once, shuffling and dropout would go other ways."""
    difference = found.quality["thirsty"].difference
    assert difference.differences == (0.0,) * 3
    assert difference.interval == (0.0, 0.0)
    assert found.verdict("thirsty") == "not worse"


class MadeLate(TinyClassifier):
    """Its weights are drawn after the plugin is made, and something else has drawn numbers before each run."""

    def __init__(self) -> None:
        super().__init__()
        self.head = None
        MadeLate.made = getattr(MadeLate, "made", 0) + 1

    def configure_model(self) -> None:
        if self.head is None:
            self.head = nn.Linear(4 * 36, 2)


def made_late():
    module = MadeLate()
    torch.rand(MadeLate.made)
    return module


def test_weights_made_by_configure_model_are_paired():
    precisions = {"fp32": "32-true", "thirsty": ThirstyPrecision}
    found = compare_precisions(
        made_late, Pictures(), precisions, steps=2, seeds=[0, 1], rounds=1, monitor="val/loss", accelerator="cpu"
    )
    assert found.quality["thirsty"].difference.differences == (0.0, 0.0)


def test_a_planted_worse_precision_is_found(found):
    assert found.verdict("coarse") == "worse"
    assert found.quality["coarse"].difference.interval[0] > 0.05
    assert "coarse does not pay here: its loss is higher by " in found.advice[1]


def test_bf16_is_close_but_not_the_same(found):
    differences = found.quality["bf16"].difference.differences
    assert all(0 < abs(each) < 0.05 for each in differences)


def test_seeds_have_weights_and_data_of_their_own(found):
    runs = {(run.precision, run.seed): run for run in found.runs}
    assert len({runs["fp32", seed].weights_digest for seed in range(3)}) == 3
    assert len({runs["fp32", seed].data_digest for seed in range(3)}) == 3
    assert {len(run.train_losses) for run in found.runs} == {STEPS}
    assert runs["fp32", 0].items == STEPS * 4


def test_a_run_is_that_of_a_plain_loop():
    """Without dropout and shuffling nothing is random: from the module's own weights, the same losses to the bit."""
    module = TinyClassifier()
    module.net[3] = nn.Identity()
    before = copy.deepcopy(module.state_dict())
    data = DataLoader(pictures(), batch_size=4)
    found = compare_precisions(
        module, data, ["32-true", "bf16-mixed"], steps=12, seeds=[7], rounds=1, accelerator="cpu"
    )
    assert all(torch.equal(weight, before[name]) for name, weight in module.state_dict().items())
    optimizer = module.configure_optimizers()
    losses = []
    for batch in [*data, *data, *data][:12]:
        optimizer.zero_grad()
        out = module.head(module.net(batch[0]))
        loss = nn.functional.cross_entropy(out, batch[1])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert found.runs[0].train_losses == tuple(losses)
    assert found.runs[0].final_loss == losses[-1]
    assert str(found.quality["bf16-mixed"].difference) == "cannot tell yet: 2 more seeds"


def test_losses_are_undivided_under_accumulation():
    def losses(steps, **options):
        precisions = plugin_factories(["32-true", "bf16-mixed"], "cpu")
        experiment = Experiment(TinyClassifier, TrainingData(Pictures()), precisions, "cpu", options)
        return run_trial(experiment, "32-true", seed=0, steps=steps).train_losses

    whole, accumulated = losses(2), losses(2, accumulate_grad_batches=2)
    assert (len(whole), len(accumulated)) == (2, 4)
    assert whole[0] == accumulated[0]


class KilledAt(Callback):
    """Stands for Ctrl-C in the middle of one run."""

    def __init__(self, at):
        self.at = at

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.max_steps == STEPS:
            self.at[0] -= 1
            if self.at[0] == 0:
                raise KeyboardInterrupt

    def __deepcopy__(self, memo):
        return self

    def __repr__(self):
        return "KilledAt()"


@pytest.mark.full
def test_a_comparison_goes_on_after_an_interrupt_to_the_same_bits(found, tmp_path):
    path = tmp_path / "runs.jsonl"
    handler, state = signal.getsignal(signal.SIGINT), torch.get_rng_state()
    batches_left = [3 * STEPS + 5]
    arguments = {
        "precisions": {name: PRECISIONS[name] for name in ("fp32", "bf16")},
        "file": path,
        "trainer_options": {"callbacks": [KilledAt(batches_left)]},
    }
    with pytest.raises(KeyboardInterrupt):
        compare(**arguments)
    assert signal.getsignal(signal.SIGINT) is handler
    assert torch.equal(torch.get_rng_state(), state)
    kept = path.read_text()
    assert len(kept.splitlines()) == 1 + 3
    path.write_text(kept + '{"comparison": "half a li')
    batches_left[0] = 10**9
    resumed = compare(seeds=[2, 1, 0, 9], **arguments)
    assert path.read_text().startswith(kept)
    assert len(path.read_text().splitlines()) == 1 + 8
    expected = {(run.precision, run.seed): (run.final_loss, run.train_losses) for run in found.runs}
    losses = {(run.precision, run.seed): (run.final_loss, run.train_losses) for run in resumed.runs}
    assert {pair: losses[pair] for pair in losses if pair[1] != 9} == {
        pair: expected[pair] for pair in expected if pair[0] in ("fp32", "bf16")
    }
    assert resumed.as_dict()["precisions"]["bf16"]["seeds"] == [2, 1, 0, 9]
    assert resumed.quality["bf16"].difference.differences[2::-1] == found.quality["bf16"].difference.differences
    before = path.read_bytes()
    for others, what in (
        ({"steps": 26}, "steps was 13 and is now 26"),
        ({"trainer_options": {}}, "trainer_options was .* and is now {}"),
        ({"monitor": None}, "monitor was 'val/loss' and is now None"),
    ):
        with pytest.raises(ValueError, match="its runs belong to another comparison: " + what):
            compare(**{**arguments, **others})
    assert path.read_bytes() == before


def test_random_generators_stand_where_they_stood():
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    compare_precisions(BoringModel, torch.randn(2, 32, generator=torch.Generator()), rounds=1, accelerator="cpu")
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert (np.random.get_state()[1] == before[2]).all()


def wide():
    """Nearly all of its memory is weights and their gradients; with dropout, whose masks differ between formats."""
    return Trained(
        lambda module, batch: module.net(batch).square().float().mean(),
        net=lambda: nn.Sequential(nn.Linear(32, 512), nn.Dropout(0.5), nn.Linear(512, 32)),
    )


def costs_of(names):
    """Clipping by norm makes the gradient 1,000 times smaller, after it was looked at."""
    options = {"gradient_clip_val": 0.001}
    batch = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
    module = wide()
    found = compare_precisions(module, batch, names, rounds=1, accelerator="cpu", trainer_options=options)
    assert found.gradient_reference == "64-true"
    return found.costs, 4 * sum(weight.numel() for weight in module.parameters())


def test_costs_of_one_batch():
    """Gradients before clipping: fp64 is exact, fp32 nearly, bf16 has 8 bits. Memory by hand."""
    costs, weight_bytes = costs_of(["32-true", "64-true", "bf16-mixed"])
    assert costs["64-true"].gradient_error == 0.0
    assert 0 < costs["32-true"].gradient_error < 1e-6
    assert 1e-3 < costs["bf16-mixed"].gradient_error < 0.02
    peak = costs["32-true"].peak_bytes
    # weights and gradients, and what the step adds to them: activations, clipping by norm
    assert 2 * weight_bytes <= peak <= 2.5 * weight_bytes
    assert costs["64-true"].peak_bytes == pytest.approx(2 * peak, rel=0.1)
    for cost in costs.values():
        assert cost.time_ratio_range[0] <= cost.time_ratio <= cost.time_ratio_range[1]
        assert cost.items_per_second * cost.batch_seconds == pytest.approx(4)
    assert costs["32-true"].time_ratio_range == (1.0, 1.0)


@pytest.mark.full
def test_gradients_are_unscaled_in_every_precision():
    names = [
        "32-true",
        "16-mixed",
        "lightning:16-mixed",
        "bf16-true",
        "bf16-true+remainder",
        "bf16-true+24bit",
        "16-true",
    ]
    costs, _ = costs_of(names)
    errors = {name: cost.gradient_error for name, cost in costs.items()}
    for name in ("16-mixed", "lightning:16-mixed", "16-true"):
        assert 1e-5 < errors[name] < 2e-3, errors
    for name in ("bf16-true", "bf16-true+remainder", "bf16-true+24bit"):
        assert 1e-3 < errors[name] < 0.02, errors


@pytest.mark.full
def test_results_in_words_numbers_and_a_picture(found, tmp_path):
    text = str(found)
    assert "val/loss, 3 paired seeds of 13 steps, margin 0.004" in text
    assert text.splitlines()[1].split()[:6] == ["precision", "time", "ratio", "from", "to", "samples/s"]
    values = json.loads(json.dumps(found.as_dict(), allow_nan=False))
    assert values["precisions"]["coarse"]["verdict"] == "worse"
    assert values["precisions"]["thirsty"]["differences"] == [0.0] * 3
    assert values["precisions"]["fp32"]["final_losses"] == [run.final_loss for run in found.runs[::4]]
    found.plot(tmp_path / "comparison.svg")
    drawn = (tmp_path / "comparison.svg").read_text()
    assert drawn.startswith("<?xml")
    with pytest.raises(ValueError, match="cannot be drawn: its name must end with one of .png, .pdf, .svg"):
        found.plot("comparison.txt")


class NaNPrecision(CoarseWeights):
    """A run that diverges."""

    def pre_backward(self, tensor, module):
        return super().pre_backward(tensor * math.nan, module)


@pytest.mark.full
def test_a_candidate_that_diverges_is_worse(tmp_path):
    both = {"fp32": "32-true", "lost": NaNPrecision}
    found = compare(precisions=both, file=tmp_path / "runs.jsonl", seeds=2, monitor=None, steps=4)
    assert found.verdict("lost") == "worse"
    assert found.costs["lost"].gradient_error is None
    assert "worse: 2 of 2 runs diverged" in str(found)
    json.dumps(found.as_dict(), allow_nan=False)
    found.plot(tmp_path / "lost.svg")


@pytest.mark.full
def test_skipped_steps_are_said():
    def high():
        return AutocastPrecision("16-mixed", scaler=LossScaler(init_scale=2.0**20))

    found = compare(precisions={"fp32": "32-true", "fp16": high}, seeds=1, monitor=None, steps=6)
    skipped = {name: values["skipped_steps"] for name, values in found.as_dict()["precisions"].items()}
    assert skipped["fp32"] == [None]
    assert 0 < skipped["fp16"][0] < 6
    assert f"\nOptimizer steps skipped after an overflow: fp16 {skipped['fp16'][0]} of 6.\n" in str(found)


class OneShot(Pictures):
    """Data that differs in every run."""

    calls = 0

    def train_dataloader(self):
        type(self).calls += 1
        return DataLoader(pictures(seed=self.calls), batch_size=4)


def weights_of_their_own():
    module = TinyClassifier()
    torch.nn.init.constant_(module.head.bias, next(COUNTER))
    return module


COUNTER = iter(range(1000))


@pytest.mark.full
def test_pairs_that_are_none_are_refused(tmp_path):
    arguments = {"steps": 2, "rounds": 1, "accelerator": "cpu", "file": tmp_path / "runs.jsonl"}
    with pytest.raises(ValueError, match="pair the runs of seed 0: bf16-mixed had other data than 32-true. Pass"):
        compare_precisions(TinyClassifier, OneShot(), **arguments)
    arguments["file"] = tmp_path / "others.jsonl"
    with pytest.raises(ValueError, match="bf16-mixed had other initial weights than 32-true. Let the function"):
        compare_precisions(weights_of_their_own, Pictures(), **arguments)


class NoBatches:
    def __iter__(self):
        return iter(())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"precisions": "bf16-mixed"}, r'must be several, got .bf16-mixed.. Pass \("32-true", .bf16-mixed.\)'),
        ({"precisions": ["32-true"]}, "must be two or more, the baseline first, got 1"),
        (
            {"precisions": ["32-true", "bf16"]},
            "has 'bf16'. Did you mean 'bf16-mixed'\\? Known names are 64-true, 32-true",
        ),
        ({"precisions": ["32-true", "32-true"]}, "has '32-true' twice. Leave one out"),
        ({"precisions": ["32-true", 16]}, "has 16 of type int. Pass a name, a precision plugin, or a function"),
        ({"steps": 0}, "`steps` must be a whole number, 1 or more, got 0"),
        ({"seeds": 0}, "`seeds` must be a positive number of pairs, or different whole numbers, got 0"),
        ({"seeds": [1, 1]}, "`seeds` must be a positive number of pairs, or different whole numbers"),
        ({"rounds": 2.5}, "`rounds` must be a whole number, 1 or more, got 2.5"),
        ({"margin": -1}, "`margin` must be a positive finite number"),
        ({"accelerator": "tpu"}, "`accelerator` 'tpu' is not available here. Use 'auto' or one of 'cpu'"),
        (
            {"trainer_options": {"devices": 2}},
            r"has 'devices', which compare_precisions\(\) sets: it runs on one device",
        ),
        ({"trainer_options": {"precision": 16}}, "has 'precision', which .* sets: pass precisions= instead"),
        (
            {"data": [torch.zeros(2, 1, 8, 8)]},
            "`steps` is 13, and `data` is a single batch, on which a loss says nothing",
        ),
        ({"data": iter([])}, "of type list_iterator cannot be trained on several times"),
        (
            {"data": DataLoader(pictures(), batch_size=4)},
            "`monitor` needs data to validate on. Pass `val_data`, or a Light",
        ),
        ({"steps": None, "file": Path("x")}, "`file` x keeps paired runs, and there are none without steps"),
        ({"steps": None, "file": None}, "`monitor` 'val/loss' is of paired runs, and there are none without"),
        ({"module": nn.Linear(1, 1)}, "must be a lightning.pytorch.LightningModule or a function .*got torch.nn"),
        ({"module": lambda: 3}, "must be a lightning.pytorch.LightningModule or a function .*got builtins.int"),
        ({"monitor": "val_loss"}, "`monitor` 'val_loss' was not logged in validation; logged were .*val/loss"),
        ({"data": NoBatches()}, "`data` is empty: compare_precisions.. trained on no batch"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_written(arguments, message, tmp_path):
    file = tmp_path / "runs.jsonl"
    given = {"module": TinyClassifier, "data": Pictures(), "steps": STEPS, "monitor": "val/loss", "file": file}
    with pytest.raises(ValueError, match=message):
        compare_precisions(**{**given, "accelerator": "cpu", **arguments})
    assert not file.exists()
    assert list(Path.cwd().iterdir()) == []


class NoisyModel(BoringModel):
    """Random numbers in the step that differ between formats."""

    def training_step(self, batch, batch_idx):
        noise = torch.rand_like(self.layer.weight).to(batch) * 3
        return ((batch @ (self.layer.weight * noise).T) ** 2).sum()


def test_gradients_that_differ_by_chance_are_not_compared():
    found = compare_precisions(NoisyModel, torch.ones(2, 32), rounds=1, accelerator="cpu")
    assert found.gradient_reference.startswith("none (fp32 differs by ")
    assert {cost.gradient_error for cost in found.costs.values()} == {None}
