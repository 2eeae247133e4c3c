"""What a user imports is in one place, has a `repr` that evaluates to the same part, and is built from YAML.

Promises: `dir` shows the public names and nothing else; jsonargparse, and so LightningCLI, builds every part.
"""

import dataclasses
import datetime
import importlib
import inspect

import jsonargparse
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins import CheckpointIO, Precision
from lightning.pytorch.strategies import Strategy
from torch import nn
from torchmetrics import Metric

import lightning_mp
from lightning_mp import (
    ChinchillaBudget,
    LossScaler,
    PrecisionPolicy,
    RankWatchdog,
    WarmupCosine,
)
from lightning_mp.pipelining import PipelineLayer

PACKAGES = ("checkpoints", "diagnostics", "metrics", "pipelining", "planning")


def half_the_batch(batch, size):
    return [batch]


# Arguments other than the defaults, and how they are shown where that is not as they were given.
SETTINGS = {
    "AccumulationScheduler": ({"schedule": {"4": 2}, "unit": "step", "sync": "micro_batch"}, {"schedule": {4: 2}}),
    "ActivationCheckpointing": ({"modules": "blocks.*", "every": 2}, {"modules": ("blocks.*",)}),
    "AtomicCheckpointIO": ({}, {}),
    "AtomicCheckpoints": ({}, {}),
    "AutocastPrecision": (
        {"precision": "bf16-mixed", "policy": {"head": "fp32"}},
        {"policy": PrecisionPolicy({"head": "fp32"})},
    ),
    "BudgetForecast": ({"metric": "loss", "every_n_steps": 7, "confidence": 0.8}, {}),
    "ChinchillaBudget": ({"tokens": "1.5M", "landing": "floor", "save": False}, {"tokens": 1_500_000}),
    "ExactResume": ({"on_unsupported": "error", "record": "bits.jsonl"}, {}),
    "FSDP2Strategy": (
        {"shard": "blocks.*", "replicate_size": 2, "timeout": datetime.timedelta(seconds=9)},
        {"shard": ("blocks.*",)},
    ),
    "Float8Precision": ({"recipe": "tensorwise", "emulate": True, "skip": ["head"]}, {}),
    "GradientNoiseScale": ({"average_steps": 30}, {}),
    "LossScaler": ({"device": "cpu", "init_scale": 4.0, "growth_interval": 3, "on_floor": "warn"}, {}),
    "MFUMonitor": ({"flops_per_token": "6N", "peak_flops": 1e12, "window": 3}, {}),
    "MasterWeightsPrecision": ({"precision": "bf16-true", "storage": "remainder", "fp32_gradients": True}, {}),
    "MicroBatchOnOOM": ({"split": half_the_batch, "min_size": 2}, {"split": "half_the_batch"}),
    "OverflowMonitor": ({"count_real_steps": True, "stop_after_skips": 9, "guard": True}, {}),
    "OverflowPostMortem": ({"replay": True, "max_replays": 2, "dirpath": "skips"}, {"dirpath": "skips"}),
    "PipelineLayer": (None, {}),
    "PipelineParallelStrategy": (
        {"stages": 2, "schedule": "gpipe", "split_points": ["head"]},
        {"split_points": ("head",)},
    ),
    "PrecisionAudit": ({"batch": 3}, {}),
    "Preflight": ({"raise_on": "never"}, {}),
    "PrecisionPolicy": ({"rules": [("head", "fp32")]}, {}),
    "RankWatchdog": ({"timeout_seconds": 30}, {}),
    "ReducedPrecisionDDPStrategy": ({"dtype": "bf16", "bucket_cap_mb": 5}, {}),
    "StopAtBoundary": ({"signals": ["SIGUSR1"], "max_seconds": 60}, {"signals": ("SIGUSR1",)}),
    "TF32Precision": ({}, {}),
    "TokenLearningRate": ({"schedule": WarmupCosine(0.2), "tokens": "2k"}, {"tokens": 2_000}),
    "UnderflowMonitor": ({"format": "bf16", "scale": 8.0, "watch": "activations"}, {"watch": ("activations",)}),
}


def public_classes() -> dict[str, type]:
    packages = [lightning_mp, *(importlib.import_module(f"lightning_mp.{name}") for name in PACKAGES)]
    named = {name: getattr(package, name) for package in packages for name in package.__all__}
    return {name: value for name, value in named.items() if inspect.isclass(value)}


def test_every_public_class_shows_its_settings():
    """Data classes, torchmetrics and optimizers show theirs already; errors and protocols have none."""
    shows_them_already = {
        name
        for name, kind in public_classes().items()
        if dataclasses.is_dataclass(kind)
        or issubclass(kind, Metric | Exception | torch.optim.Optimizer)
        or getattr(kind, "_is_protocol", False)
    }
    assert public_classes().keys() - shows_them_already == SETTINGS.keys()


@pytest.mark.parametrize("name", sorted(SETTINGS.keys() - {"PipelineLayer"}))
def test_a_repr_is_the_call_that_makes_the_part(name):
    arguments, read = SETTINGS[name]
    text = repr(public_classes()[name](**arguments))
    shown = {
        key: value if isinstance(value, str) and key == "split" else repr(value)
        for key, value in (arguments | read).items()
    }
    assert {key: value for key, value in shown.items() if value not in text} == {}
    names = {**vars(lightning_mp), **public_classes(), "datetime": datetime, "half_the_batch": half_the_batch}
    assert repr(eval(text, names)) == text


def test_what_was_found_at_construction_is_shown():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    assert f"device='{device}', init_scale=65536.0" in repr(LossScaler())
    assert "tokens_per_parameter=20" in repr(ChinchillaBudget())


def test_functions_and_modules_have_their_names():
    assert (
        repr(PipelineLayer(half_the_batch, nn.Linear(2, 2), nn.Dropout()))
        == "PipelineLayer(half_the_batch, Linear, Dropout)"
    )


def test_a_part_whose_constructor_failed_has_a_repr():
    assert repr(object.__new__(RankWatchdog)) == "RankWatchdog()"


PUBLIC = ["lightning_mp", *(f"lightning_mp.{name}" for name in PACKAGES)]


@pytest.mark.parametrize("package", PUBLIC)
def test_dir_shows_the_public_names_only(package):
    module = importlib.import_module(package)
    assert dir(module) == sorted(set(module.__all__))
    assert all(getattr(module, name) is not None for name in module.__all__)


def test_a_public_name_has_one_place():
    owners = {}
    for package in PUBLIC:
        for name in importlib.import_module(package).__all__:
            owners.setdefault(name, []).append(package)
    assert {name: places for name, places in owners.items() if len(places) > 1} == {}


@pytest.mark.parametrize("package", ["lightning_mp.callbacks", "lightning_mp.strategies"])
def test_what_a_trainer_is_given_is_flat(package):
    assert set(importlib.import_module(package).__all__) <= set(lightning_mp.__all__)


def test_questions_before_a_run_are_flat_names():
    for name in ("compare_precisions", "estimate_memory", "preflight", "recommend"):
        function = getattr(lightning_mp, name)
        assert function is getattr(importlib.import_module(function.__module__), name)
    # in the message itself, as jsonargparse shows no traceback, to which Python would add it
    with pytest.raises(AttributeError, match=r"has no attribute 'preflights'\. Did you mean 'preflight'\?"):
        lightning_mp.preflights  # noqa: B018


BASES = (Callback, Strategy, Precision, CheckpointIO, Metric, torch.amp.GradScaler)
PARTS = {
    name: part
    for name, part in public_classes().items()
    if issubclass(part, BASES) and not dataclasses.is_dataclass(part)
}
#: As YAML has what SETTINGS have as objects of Python, and numbers as they are read.
IN_YAML = {
    "FSDP2Strategy": {"timeout": "0:00:09"},
    "MicroBatchOnOOM": {"split": None},
    "TokenLearningRate": {"schedule": {"class_path": "lightning_mp.WarmupCosine", "init_args": {"warmup": 0.2}}},
}
IN_PYTHON = {
    "MicroBatchOnOOM": {"split": None},
    "RankWatchdog": {"timeout_seconds": 30.0},
    "StopAtBoundary": {"max_seconds": 60.0},
}


@pytest.mark.parametrize("name", sorted(PARTS))
def test_jsonargparse_builds_it(name: str) -> None:
    part, (arguments, _) = PARTS[name], SETTINGS.get(name, ({}, {}))
    base = next(base for base in BASES if issubclass(part, base))
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--part", type=base)
    (package,) = (package for package in PUBLIC if name in importlib.import_module(package).__all__)
    described = {"class_path": f"{package}.{name}", "init_args": arguments | IN_YAML.get(name, {})}
    made = parser.instantiate(parser.parse_object({"part": described})).part
    assert type(made) is part
    arguments = {key: value for key, value in arguments.items() if key != "bucket_cap_mb"}  # one of DDP's own
    by_hand = part(**arguments | IN_PYTHON.get(name, {}))
    assert str(made).startswith(str(by_hand).removesuffix(")"))  # options of DDP follow, each with its default


@pytest.mark.parametrize(("plugin", "precision"), [("Autocast", "16-mixed"), ("MasterWeights", "16-true")])
def test_a_scaler_without_a_class_path_is_a_loss_scaler(plugin: str, precision: str) -> None:
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--part", type=Precision)
    init_args = {"precision": precision, "scaler": {"init_scale": 1024.0}}
    described = {"class_path": f"lightning_mp.{plugin}Precision", "init_args": init_args}
    scaler = parser.instantiate(parser.parse_object({"part": described})).part.scaler
    assert type(scaler) is LossScaler
    assert scaler.get_scale() == 1024.0


def test_an_option_of_ddp_that_is_set_is_refused_still() -> None:
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--part", type=Strategy)
    described = {
        "class_path": "lightning_mp.PipelineParallelStrategy",
        "init_args": {"stages": 2, "find_unused_parameters": True},
    }
    config = parser.parse_object({"part": described})
    with pytest.raises(ValueError, match=r"find_unused_parameters=...\) is not known; options of DDP have no effect"):
        parser.instantiate(config)
