"""What a module sees while it is inspected: a Trainer that changes nothing, and optimizers that only note calls."""

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import Metric, MetricCollection

from lightning_mp.core import private_loop_api


class StandInTrainer:
    """Answers like a Trainer, with some answers given in advance, and keeps what is set on it to itself.

    >>> trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, max_epochs=3)
    >>> stand_in = StandInTrainer(trainer, {"estimated_stepping_batches": 12})
    >>> stand_in.should_stop = True
    >>> stand_in.estimated_stepping_batches, stand_in.max_epochs, trainer.should_stop
    (12, 3, False)
    """

    def __init__(self, trainer: "pl.Trainer", answers: Mapping[str, Any]) -> None:
        self.optimizers: list[Optimizer] = []
        own = {
            "lr_scheduler_configs": [],
            "logger": DummyLogger(),
            "loggers": [DummyLogger()],
            "strategy": _StandInStrategy(trainer.strategy),
            "save_checkpoint": _do_nothing,
        }
        vars(self).update(own, _stands_for=trainer)
        vars(self).update(answers)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_stands_for"], name)


class _StandInStrategy:
    """The strategy, without its collectives and its backward."""

    def __init__(self, strategy: object) -> None:
        same: Callable[..., Any] = lambda value=None, *_, **__: value  # noqa: E731
        self.barrier = self.broadcast = self.reduce = self.all_gather = same
        self.backward: Callable[..., None] = lambda loss, *_, **__: loss.backward()
        self._stands_for = strategy

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_stands_for"], name)


class NotedOptimizer(LightningOptimizer):
    """Lightning's wrapper of an optimizer, whose step runs the closure and notes that it was called."""

    def __init__(self, optimizer: Any) -> None:
        self.noted = SimpleNamespace(has_stepped=False, had_closure=False)
        super().__init__(optimizer)

    @contextmanager
    def toggle_model(self, sync_grad: bool = True) -> Generator[None, None, None]:
        """Changes nothing."""
        yield

    def step(self, closure: Callable[[], Any] | None = None, **_: Any) -> Any:
        """Changes nothing."""
        self.noted.has_stepped, self.noted.had_closure = True, closure is not None
        return closure() if closure is not None else None


def attach_stand_in(module: nn.Module, trainer: StandInTrainer) -> None:
    """Gives a copy of a module the stand-in; what it logs, prints and measures goes nowhere."""
    for part in module.modules():
        if isinstance(part, pl.LightningModule):
            stand_in: Any = trainer
            part.trainer = stand_in
            # Where stand-ins of tensors are; what is made with device=self.device is combined with them.
            private_loop_api.set_device_property(part, torch.device("cpu"))
            for name in ("log", "log_dict", "print"):
                setattr(part, name, _do_nothing)
            part.all_gather = lambda data, *_, **__: data  # type: ignore[method-assign]
        elif isinstance(part, Metric | MetricCollection):
            # Metrics read numbers, and no loss is made of them.
            result = _no_metrics if isinstance(part, MetricCollection) else _no_metric
            for name, replacement in (("forward", result), ("compute", result), ("update", _do_nothing)):
                setattr(part, name, replacement)


def _do_nothing(*_: Any, **__: Any) -> None:
    return None


def _no_metric(*_: Any, **__: Any) -> Tensor:
    return torch.zeros(())


def _no_metrics(*_: Any, **__: Any) -> dict[str, Tensor]:
    return {}
