"""Promise: jsonargparse, and so LightningCLI, builds every public part from a class_path and arguments."""

import dataclasses
import datetime
import inspect
from typing import Any

import jsonargparse
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins import CheckpointIO, Precision
from lightning.pytorch.strategies import Strategy
from torchmetrics import Metric

import lightning_mp
from lightning_mp import checkpoints, diagnostics, metrics, pipelining, planning

BASES = (Callback, Strategy, Precision, CheckpointIO, Metric, torch.amp.GradScaler)
#: Arguments as YAML has them, where a part cannot do without or others than the defaults are worth a look.
ARGUMENTS: dict[str, dict[str, Any]] = {
    "AccumulationScheduler": {"schedule": {0: 1, 4: 2}, "unit": "step"},
    "ActivationCheckpointing": {"modules": ["blocks.*"], "every": 2},
    "AutocastPrecision": {"precision": "bf16-mixed", "policy": {"head": "fp32"}},
    "BudgetForecast": {"metric": "loss", "confidence": 0.8},
    "ChinchillaBudget": {"tokens": "1.5M", "landing": "floor"},
    "FSDP2Strategy": {"shard": ["blocks.*"], "replicate_size": 2, "timeout": "0:10:00"},
    "MasterWeightsPrecision": {"precision": "bf16-true", "storage": "remainder"},
    "PipelineParallelStrategy": {"stages": 2, "microbatches": 4, "split_points": ["head"]},
    "ReducedPrecisionDDPStrategy": {"dtype": "bf16"},
    "TokenLearningRate": {
        "schedule": {"class_path": "lightning_mp.WarmupCosine", "init_args": {"warmup": 0.1}},
        "tokens": 1000,
    },
}
IN_PYTHON: dict[str, dict[str, Any]] = {
    "FSDP2Strategy": {"timeout": datetime.timedelta(minutes=10)},
    "RankWatchdog": {"timeout_seconds": 600.0},
    "TokenLearningRate": {"schedule": lightning_mp.WarmupCosine(0.1)},
}


def public_parts() -> dict[str, tuple[str, type]]:
    packages = (lightning_mp, checkpoints, diagnostics, metrics, pipelining, planning)
    named = {name: (package.__name__, getattr(package, name)) for package in packages for name in package.__all__}
    return {
        name: (package, part)
        for name, (package, part) in named.items()
        if inspect.isclass(part) and issubclass(part, BASES) and not dataclasses.is_dataclass(part)
    }


PARTS = public_parts()


@pytest.mark.parametrize("name", sorted(PARTS))
def test_jsonargparse_builds_it(name: str) -> None:
    package, part = PARTS[name]
    base = next(base for base in BASES if issubclass(part, base))
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--part", type=base)
    described = {"class_path": f"{package}.{name}", "init_args": ARGUMENTS.get(name, {})}
    made = parser.instantiate(parser.parse_object({"part": described})).part
    assert type(made) is part
    by_hand = part(**ARGUMENTS.get(name, {}) | IN_PYTHON.get(name, {}))
    assert str(made).startswith(str(by_hand).removesuffix(")"))  # options of DDP follow, each with its default


@pytest.mark.parametrize(("plugin", "precision"), [("Autocast", "16-mixed"), ("MasterWeights", "16-true")])
def test_a_scaler_without_a_class_path_is_a_loss_scaler(plugin: str, precision: str) -> None:
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--part", type=Precision)
    init_args = {"precision": precision, "scaler": {"init_scale": 1024.0}}
    described = {"class_path": f"lightning_mp.{plugin}Precision", "init_args": init_args}
    scaler = parser.instantiate(parser.parse_object({"part": described})).part.scaler
    assert type(scaler) is lightning_mp.LossScaler
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
