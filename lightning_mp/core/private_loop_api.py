"""The part of the seams that is about Lightning's loops and settings: where a run stands, its limits, its samplers."""

from collections.abc import Callable, Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor

__all__ = [
    "ddp_arguments",
    "is_accumulating",
    "logger_step",
    "min_steps_of",
    "replace_end_of_epoch",
    "set_device_property",
    "set_max_steps",
    "set_min_steps",
    "step_without_a_batch",
    "take_back_a_logged_step",
    "uses_distributed_sampler",
]


def min_steps_of(trainer: "pl.Trainer") -> int | None:
    """Optimizer steps before which the fit loop ignores ``trainer.should_stop``."""
    return trainer.fit_loop.epoch_loop.min_steps


def set_min_steps(trainer: "pl.Trainer", steps: int | None) -> None:
    """Moves the step before which the fit loop ignores ``trainer.should_stop``."""
    trainer.fit_loop.epoch_loop.min_steps = steps


def set_max_steps(trainer: "pl.Trainer", steps: int) -> None:
    """Moves the optimizer step after which the fit loop ends."""
    trainer.fit_loop.epoch_loop.max_steps = steps


def replace_end_of_epoch(trainer: "pl.Trainer", end: tuple[float, bool]) -> tuple[float, bool]:
    """Puts (batches of this epoch, whether this batch is its last) in place of what the loop knows; returns that."""
    loop, progress = trainer.fit_loop, trainer.fit_loop.epoch_loop.batch_progress
    known = loop.max_batches, progress.is_last_batch
    loop.max_batches, progress.is_last_batch = end
    return known


def take_back_a_logged_step(trainer: "pl.Trainer") -> None:
    """The x axis of loggers counts steps; Lightning is about to count one at an epoch's end that was not made."""
    trainer.fit_loop.epoch_loop._batches_that_stepped -= 1


def step_without_a_batch(trainer: "pl.Trainer", batch_idx: int, closure: Callable[[], Tensor]) -> None:
    """An optimizer step as automatic optimization makes it, with the gradients that are there."""
    epoch_loop = trainer.fit_loop.epoch_loop
    epoch_loop.automatic_optimization._optimizer_step(batch_idx, closure)
    epoch_loop._batches_that_stepped += 1


def logger_step(trainer: "pl.Trainer") -> int:
    """Where loggers are on their x axis: batches before this one that ended in an optimizer step."""
    step: int = trainer.fit_loop.epoch_loop._batches_that_stepped
    return step


def is_accumulating(trainer: "pl.Trainer") -> bool:
    """Whether no step was made after this micro-batch; Lightning logs nothing then."""
    return trainer.lightning_module.automatic_optimization and trainer.fit_loop._should_accumulate()


def ddp_arguments(strategy: DDPStrategy) -> Mapping[str, Any]:
    """Keyword arguments that a strategy will give ``DistributedDataParallel``."""
    return strategy._ddp_kwargs


def uses_distributed_sampler(trainer: "pl.Trainer") -> bool:
    """What ``Trainer(use_distributed_sampler=...)`` was given."""
    return bool(trainer._accelerator_connector.use_distributed_sampler)


def set_device_property(module: "pl.LightningModule", device: torch.device) -> None:
    """What ``module.device`` says from now on; its tensors stay where they are."""
    module._device = device
