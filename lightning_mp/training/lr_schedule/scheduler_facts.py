"""For how many calls learning-rate schedulers were planned, read off what ``configure_optimizers`` returned."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import lightning.pytorch as pl
from torch.optim import lr_scheduler

from lightning_mp.ground.core import private_trainer_api

AfterItsEnd = Literal["raises", "rises", "zero", "stays"]
# Attribute with the number of calls, and what torch's code does after it (torch/optim/lr_scheduler.py).
_PLANNED: tuple[tuple[type, str, AfterItsEnd], ...] = (
    (lr_scheduler.OneCycleLR, "total_steps", "raises"),
    (lr_scheduler.CosineAnnealingLR, "T_max", "rises"),
    (lr_scheduler.PolynomialLR, "total_iters", "zero"),
    (lr_scheduler.LinearLR, "total_iters", "stays"),
    (lr_scheduler.ConstantLR, "total_iters", "stays"),
)
# Hugging Face's get_*_schedule_with_warmup make a LambdaLR of a partial with this keyword.
_HUGGING_FACE_KEYWORD = "num_training_steps"


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundScheduler:
    """A learning-rate scheduler that was planned for a number of calls."""

    name: str  # its class
    setting: str  # the argument that was read
    planned: int | float  # how many calls it was planned for; `math.inf` where the length of the run was not known
    interval: str  # what Lightning calls it after: "step" or "epoch"
    frequency: int = 1  # after every how many of these
    after_its_end: AfterItsEnd = "stays"  # what it does when it is called more often


def schedulers_in(configured: Any) -> Iterator[tuple[Any, str, int]]:
    """Scheduler, interval and frequency of all that Lightning lets ``configure_optimizers`` return."""
    if isinstance(configured, Mapping):
        if configured.get("lr_scheduler") is not None:
            yield _entry(configured["lr_scheduler"])
    elif isinstance(configured, tuple) and len(configured) == 2 and isinstance(configured[0], Sequence):
        yield from (_entry(one) for one in configured[1])
    elif isinstance(configured, Sequence):
        for one in configured:
            yield from schedulers_in(one)


def _entry(given: Any) -> tuple[Any, str, int]:
    if isinstance(given, Mapping):
        return given["scheduler"], str(given.get("interval", "epoch")), int(given.get("frequency", 1))
    return given, "epoch", 1


def read_schedulers(configured: Any) -> tuple[FoundScheduler, ...]:
    """Those that were planned for a number of calls."""
    return tuple(
        FoundScheduler(
            name=type(part).__name__,
            setting=setting,
            planned=planned + offset if planned == math.inf else int(planned + offset),
            interval=interval,
            frequency=frequency,
            after_its_end=after,
        )
        for scheduler, interval, frequency in schedulers_in(configured)
        for part, offset in _parts(scheduler)
        for setting, planned, after in _planned(part)
    )


def schedulers_longer_than(steps: int, trainer: "pl.Trainer") -> tuple[FoundScheduler, ...]:
    """Those of a run that are called after optimizer steps, and were planned for more than ``steps`` of them."""
    configured = [
        {"lr_scheduler": {"scheduler": one.scheduler, "interval": one.interval, "frequency": one.frequency}}
        for one in trainer.lr_scheduler_configs
    ]
    return tuple(
        found
        for found in read_schedulers(configured)
        if found.interval == "step" and found.planned * found.frequency > steps
    )


def _parts(scheduler: Any, offset: int = 0) -> Iterator[tuple[Any, int]]:
    """A scheduler, or the last part of a sequence with the calls before it; earlier parts are warm-ups."""
    parts, milestones = private_trainer_api.scheduler_parts(scheduler)
    if milestones:
        yield from _parts(parts[-1], offset + milestones[-1])
    elif parts:
        for part in parts:
            yield from _parts(part, offset)
    else:
        yield scheduler, offset


def _planned(scheduler: Any) -> Iterator[tuple[str, int | float, AfterItsEnd]]:
    for kind, setting, after in _PLANNED:
        if isinstance(scheduler, kind):
            yield setting, getattr(scheduler, setting), after
            return
    for function in getattr(scheduler, "lr_lambdas", [])[:1]:
        keywords = function.keywords if isinstance(function, partial) else {}
        if _HUGGING_FACE_KEYWORD in keywords:
            yield _HUGGING_FACE_KEYWORD, keywords[_HUGGING_FACE_KEYWORD], "zero"
        elif any(isinstance(value, float) and value == math.inf for value in _computes_with(function)):
            yield "lr_lambda", math.inf, "stays"


def _computes_with(function: Any) -> Iterator[Any]:
    """What a function has from elsewhere: arguments of a partial, names around it, attributes, defaults."""
    if isinstance(function, partial):
        yield from (*function.args, *function.keywords.values(), *_computes_with(function.func))
        return
    for cell in getattr(function, "__closure__", None) or ():
        with suppress(ValueError):  # not assigned yet
            yield cell.cell_contents
    yield from getattr(function, "__defaults__", None) or ()
    yield from getattr(function, "__dict__", {}).values()
