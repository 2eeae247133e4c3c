"""Stopping early without losing anything: a time limit, or Ctrl-C."""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Checkpoint

from lightning_mp.demo.history import RunHistory

__all__ = ["InterruptFlag", "StopAtBoundary"]


class InterruptFlag:
    """Remembers the first Ctrl-C; the second one interrupts as usual."""

    def __init__(self) -> None:
        self.raised = False

    @contextmanager
    def listening(self) -> Iterator["InterruptFlag"]:
        """Takes SIGINT for the time of the block."""
        previous = signal.getsignal(signal.SIGINT)
        self.listen()
        try:
            yield self
        finally:
            # Lightning ignores SIGINT after the second one, while it shuts down.
            signal.signal(signal.SIGINT, previous)

    def listen(self) -> None:
        """Takes SIGINT in this process."""
        signal.signal(signal.SIGINT, self._on_signal)

    def _on_signal(self, signal_number: int, frame: Any) -> None:
        if self.raised:
            raise KeyboardInterrupt
        self.raised = True


class StopAtBoundary(Checkpoint):
    """Ends the run at the end of an accumulation window, after writing a checkpoint from which it goes on exactly.

    All ranks decide alike. It is a ``Checkpoint`` so that Lightning calls it after all other callbacks, whose state it
    saves. At the end of the budget it writes the final checkpoint to the same file.

    Args:
        path: The checkpoint.
        max_seconds: Stop after this much time of training; None for no limit.
        interrupt: Stop when it is raised.
        history: Is told why the run stopped.
    """

    def __init__(self, path: Path, max_seconds: float | None, interrupt: InterruptFlag, history: RunHistory) -> None:
        self._path = path
        self._max_seconds = max_seconds
        self._interrupt = interrupt
        self._history = history
        self._started = 0.0
        self._step = 0

    def setup(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", stage: str) -> None:
        """Takes SIGINT in this process, which Lightning may have started."""
        self._interrupt.listen()

    def on_train_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Starts the clock."""
        self._started = time.monotonic()

    def on_train_batch_start(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", batch: Any, batch_idx: int
    ) -> None:
        """Notes the optimizer step, to see whether this micro-batch ends it."""
        self._step = trainer.global_step

    def on_train_batch_end(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Stops at the end of a window if somebody asked for it."""
        if trainer.global_step == self._step or trainer.should_stop:
            return
        timed_out = self._max_seconds is not None and time.monotonic() - self._started >= self._max_seconds
        if trainer.strategy.reduce_boolean_decision(timed_out or self._interrupt.raised, all=False):
            self._history.stopped_by = "time" if timed_out and not self._interrupt.raised else "interrupt"
            trainer.save_checkpoint(self._path, weights_only=False)
            trainer.should_stop = True

    def on_train_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Writes the final checkpoint."""
        if self._history.stopped_by is None:
            trainer.save_checkpoint(self._path, weights_only=False)
