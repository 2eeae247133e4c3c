"""What is not public of a Trainer and its schedulers, or unseen by type checkers: callbacks, settings, the step."""

from collections.abc import Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loops import fit_loop
from lightning.pytorch.profilers import Profiler
from lightning.pytorch.strategies import DDPStrategy
from torch.optim.lr_scheduler import ChainedScheduler, LRScheduler, SequentialLR

#: (owner, private name, why it is needed)
PRIVATE_NAMES: tuple[tuple[object, str, str], ...] = (
    (fit_loop, "_FitLoop", "the loop of the next name"),
    (fit_loop._FitLoop, "_should_accumulate", "whether Lightning logs after this micro-batch"),
)


def callbacks_of(trainer: "pl.Trainer") -> list[Callback]:
    """The Trainer's callbacks, a public attribute that a connector sets and type checkers cannot see."""
    callbacks: list[Callback] = vars(trainer)["callbacks"]
    return callbacks


def set_callbacks(trainer: "pl.Trainer", callbacks: list[Callback]) -> None:
    """Gives the Trainer a new list of callbacks."""
    vars(trainer)["callbacks"] = callbacks


def profiler_of(trainer: "pl.Trainer") -> Profiler:
    """The Trainer's profiler, a public attribute that a connector sets and type checkers cannot see."""
    profiler: Profiler = vars(trainer)["profiler"]
    return profiler


def set_max_steps(trainer: "pl.Trainer", steps: int) -> None:
    """Moves the optimizer step after which the fit loop ends."""
    trainer.fit_loop.epoch_loop.max_steps = steps


def logger_step(trainer: "pl.Trainer") -> int:
    """Where loggers are on their x axis: batches before this one that ended in an optimizer step."""
    step: int = trainer.fit_loop.epoch_loop._batches_that_stepped
    return step


def is_accumulating(trainer: "pl.Trainer") -> bool:
    """Whether no step was made after this micro-batch; Lightning logs nothing then."""
    return trainer.lightning_module.automatic_optimization and trainer.fit_loop._should_accumulate()


def detects_anomalies(trainer: "pl.Trainer") -> bool:
    """Whether the Trainer runs under ``torch.autograd.set_detect_anomaly``."""
    return bool(trainer._detect_anomaly)


def ddp_arguments(strategy: DDPStrategy) -> Mapping[str, Any]:
    """Keyword arguments that a strategy will give ``DistributedDataParallel``."""
    return strategy._ddp_kwargs


def uses_distributed_sampler(trainer: "pl.Trainer") -> bool:
    """What ``Trainer(use_distributed_sampler=...)`` was given."""
    return bool(trainer._accelerator_connector.use_distributed_sampler)


def set_device_property(module: "pl.LightningModule", device: torch.device) -> None:
    """What ``module.device`` says from now on; its tensors stay where they are."""
    module._device = device


def average_model_of(callback: Callback) -> torch.nn.Module | None:
    """What ``WeightAveraging`` or ``StochasticWeightAveraging`` averages into; None outside of a fit."""
    average: torch.nn.Module | None = vars(callback)["_average_model"]
    return average


def scheduler_parts(scheduler: LRScheduler) -> tuple[Sequence[LRScheduler], Sequence[int]]:
    """The schedulers that one is made of, and after how many calls each of the later ones begins; none of others."""
    if isinstance(scheduler, SequentialLR):
        return scheduler._schedulers, scheduler._milestones
    return (scheduler._schedulers, ()) if isinstance(scheduler, ChainedScheduler) else ((), ())
