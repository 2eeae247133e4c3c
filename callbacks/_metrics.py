"""How the numbers of our callbacks reach loggers, progress bar and monitors: one row, and only when it is due."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from typing_extensions import override

from lightning_mp.ground.core import private_trainer_api
from lightning_mp.ground.core.patches import Patches
from lightning_mp.ground.core.run_state import RunState

#: What Lightning calls on every micro-batch.
BATCH_HOOKS = (
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
)

Metrics = Callable[[], Mapping[str, float]]
"""Returns numbers that are on the host; called only when they are logged."""


class CallbackMetrics(Callback):
    """Collects the numbers of the callbacks of one ``fit`` and logs them when they are due.

    ``LightningModule.log`` costs some 2,000 Python calls per number and micro-batch, logged or not. Here nothing is
    called between two logging steps. Numbers go

    - to the loggers every ``Trainer(log_every_n_steps=...)`` steps and when the run ends, whatever ends it: rank 0,
      Lightning's step axis, one row for all;
    - to the progress bar whenever it refreshes;
    - to ``trainer.callback_metrics`` when they are logged, before a validation and at the end of an epoch, on every
      rank; after every micro-batch if a callback has a ``monitor`` that is one of them.
    """

    def __init__(self) -> None:
        self._sources: list[tuple[Metrics, Metrics | None]] = []
        self._published: dict[str, Any] = {}
        self._logged: dict[str, Any] = {}
        self._on_bar: dict[str, Any] = {}
        self._is_monitored = False
        self._has_run = False
        self._last_row: tuple[int, dict[str, float]] | None = None

    @classmethod
    def attach(cls, trainer: "pl.Trainer") -> "CallbackMetrics":
        """Returns the Trainer's; if there is none, adds one after its callbacks and before those that save."""
        run = RunState.of(trainer)
        metrics = run.callback(cls)
        if metrics is None:
            metrics = cls()
            run.place_callback(metrics, "before checkpoints")
            Patches.of(trainer).at_end(lambda: run.remove_callback(metrics))
            if trainer.progress_bar_callback is not None:
                from lightning_mp.ground.core.bar_messages import keep_messages_off_the_bar  # of use beside a bar only

                keep_messages_off_the_bar(trainer)
        return metrics

    def add(self, metrics: Metrics, on_bar: Metrics | None = None) -> None:
        """Adds a source of numbers for this fit."""
        self._sources.append((metrics, on_bar))

    # -- when ----------------------------------------------------------------------------------------------------------

    @override
    def on_train_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Keeps the Trainer's dictionaries and progress bar; makes Lightning skip hooks that do nothing."""
        self._published, self._logged = trainer.callback_metrics, trainer.logged_metrics
        self._on_bar = trainer.progress_bar_metrics
        self._has_run, self._last_row = False, None
        callbacks = private_trainer_api.callbacks_of(trainer)
        self._skip_inherited_hooks(trainer)
        watching = [*callbacks, *trainer.lr_scheduler_configs]
        self._is_monitored = any(str(getattr(each, "monitor", None)).startswith("mp/") for each in watching)
        bar = trainer.progress_bar_callback
        if bar is not None:
            self._bar = Patches.of(trainer).replace(bar, "get_metrics", self._get_metrics)

    @override
    def on_train_batch_end(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Logs if Lightning is about to."""
        self._has_run = True
        every = _every_n_steps(trainer)
        step = private_trainer_api.logger_step(trainer)
        if (
            every
            and ((step + 1) % every == 0 or trainer.should_stop)
            and not private_trainer_api.is_accumulating(trainer)
        ):
            self._log(trainer, step, self._numbers())
        elif self._is_monitored:
            self._publish(self._numbers())

    @override
    def on_validation_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Shows monitors the current totals."""
        if self._has_run:
            self._publish(self._numbers())

    @override
    def on_train_epoch_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Shows monitors the current totals; Lightning calls them after all others."""
        self._publish(self._numbers())

    @override
    def on_train_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Logs the final numbers; callbacks have read all pending values by now."""
        self._log_the_end(trainer)

    @override
    def on_exception(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", exception: BaseException) -> None:
        """Logs the last numbers that the host has."""
        # A logger that fails now must not hide why the run ended.
        with suppress(Exception):
            self._log_the_end(trainer)

    def _skip_inherited_hooks(self, trainer: "pl.Trainer") -> None:
        """Makes Lightning skip hooks that callbacks of this package inherit unchanged from ``Callback``.

        It enters its profiler for each of them, some 20 Python calls, and passes over a hook that is None.
        """
        for callback in private_trainer_api.callbacks_of(trainer):
            if any(base.__module__.startswith("lightning_mp.") for base in type(callback).__mro__):
                for hook in BATCH_HOOKS:
                    if getattr(callback, hook) == getattr(Callback, hook).__get__(callback):
                        Patches.of(trainer).replace(callback, hook, None)

    # -- where to ------------------------------------------------------------------------------------------------------

    def _numbers(self) -> dict[str, float]:
        return {name: float(value) for metrics, _ in self._sources for name, value in metrics().items()}

    def _publish(self, numbers: Mapping[str, float]) -> None:
        self._published.update({name: torch.tensor(value, dtype=torch.float64) for name, value in numbers.items()})

    def _log(self, trainer: "pl.Trainer", step: int, numbers: dict[str, float]) -> None:
        self._publish(numbers)
        self._last_row = (step, numbers)
        if not numbers or not trainer.is_global_zero:
            return
        self._logged.update(numbers)
        for logger in trainer.loggers:
            logger.log_metrics(dict(numbers), step=step)

    def _log_the_end(self, trainer: "pl.Trainer") -> None:
        """Logs what has arrived since the last row, at the step of the last batch."""
        if not self._has_run:
            return
        step, numbers = max(0, private_trainer_api.logger_step(trainer) - 1), self._numbers()
        if not _every_n_steps(trainer):
            self._publish(numbers)
        elif (step, numbers) != self._last_row:
            self._log(trainer, step, numbers)
            for logger in trainer.loggers:
                logger.save()

    def _get_metrics(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> Any:
        """Of the progress bar, which reads them whenever it refreshes."""
        for _, on_bar in self._sources:
            if on_bar is not None:
                self._on_bar.update(on_bar())
        assert self._bar is not None
        return self._bar.original(trainer, pl_module)


def _every_n_steps(trainer: "pl.Trainer") -> int:
    """Two public attributes that connectors set and type checkers cannot see; 0 for never."""
    settings = vars(trainer)
    return 1 if settings["fast_dev_run"] else settings["log_every_n_steps"]
