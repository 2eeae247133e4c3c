"""What is left to do for the demo where a run ends, besides ``StopAtBoundary``."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Checkpoint

from lightning_mp import StopAtBoundary

__all__ = ["FinalCheckpoint", "interrupts_given_back", "reason_of"]


class FinalCheckpoint(Checkpoint):
    """Writes the last checkpoint of a run that came to its own end.

    It is a ``Checkpoint`` so that Lightning calls it after all other callbacks, whose state it saves.

    Args:
        path: The checkpoint.
        stop: Writes its own if it stops the run.
    """

    def __init__(self, path: Path, stop: StopAtBoundary) -> None:
        self._path = path
        self._stop = stop

    def on_train_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Writes it."""
        if self._stop.path is None:
            trainer.save_checkpoint(self._path, weights_only=False)


def reason_of(stop: StopAtBoundary) -> str | None:
    """Why a run ended early: "interrupt" or "time"; None if it did not.

    Ctrl-C reaches all ranks. Where only another rank was told, its clock was ahead.
    """
    if stop.path is None:
        return None
    return "interrupt" if stop.stopped_by == "SIGINT" or stop.max_seconds is None else "time"


@contextmanager
def interrupts_given_back() -> Iterator[None]:
    """Ctrl-C does afterwards what it did before: Lightning ignores it from a KeyboardInterrupt on."""
    previous: Any = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
