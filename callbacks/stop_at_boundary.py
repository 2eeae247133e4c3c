"""Ends a run at the next window end after a signal or a time limit, with a checkpoint."""

import signal
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.rank_zero import rank_zero_info
from lightning.pytorch.callbacks import Callback
from typing_extensions import override

from lightning_mp.callbacks._report_folder import report_folder
from lightning_mp.ground.core import private_resume_api
from lightning_mp.ground.core.arguments import folder_or_none, names_in, positive_number
from lightning_mp.ground.core.foreign_trainers import refuse_other_trainers
from lightning_mp.ground.core.patches import Patches
from lightning_mp.ground.core.run_state import RunState
from lightning_mp.ground.core.settings_repr import SettingsRepr
from lightning_mp.training.distributed.async_sum import AsyncAnyRank
from lightning_mp.training.resume.resumable_progress import ResumableProgress


@dataclass
class _Fit:
    """The stop requested in one fit, and the signal handlers that it has replaced."""

    started: float = field(default_factory=time.monotonic)
    asked_by: str | None = None  # the name of a signal
    agreement: AsyncAnyRank = field(default_factory=AsyncAnyRank)
    step: int = 0  # before the current micro-batch
    handlers: dict[int, Any] = field(default_factory=dict)

    def replace_handlers(self, signals: Iterable[str]) -> None:
        """Records signals, where that is possible."""
        if threading.current_thread() is threading.main_thread():
            for name in signals:
                number = signal.Signals[name]
                self.handlers[number] = signal.signal(number, self.on_signal)

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """Records the first signal; a later one acts as it did before."""
        if self.asked_by is None:
            self.asked_by = signal.Signals(number).name
            return
        previous = self.handlers.get(number)
        if callable(previous):
            previous(number, frame)
        elif previous == signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    def restore_handlers(self) -> None:
        """Restores the earlier handlers, unless Lightning already has."""
        for number, handler in self.handlers.items():
            if signal.getsignal(number) == self.on_signal:
                signal.signal(number, handler)


class StopAtBoundary(SettingsRepr, Callback):
    """Saves and ends the run at the next optimizer step after a signal or a time limit.

    On SIGTERM Lightning stops immediately, even inside an accumulation window, and writes nothing. With this callback
    the first signal is recorded, the window is finished, ``stopped-step-<step>.ckpt`` is written next to the other
    checkpoints, and ``fit`` returns. A second signal acts as it would without this callback. All ranks stop at the same
    step, even if only one received the signal: they sum a flag after every step and read it one step later, so that
    nothing waits for it.

    Lightning validates before it stops; here it does so only if a validation is due at that step.

    The callback moves to the end of the Trainer's callbacks, since it saves the state of the others.

    Args:
        signals: names of the signals to handle. Ctrl-C is "SIGINT".
        max_seconds: also stop after this much training time; None for no limit.
        dirpath: folder for the checkpoint; None uses that of the other checkpoints, or ``trainer.default_root_dir``.
        filename: its name without ``.ckpt``; ``{step}`` is the optimizer step.

    Attributes:
        stopped_by: the signal's name, "time" or "another rank"; None while the run was not stopped. Read it after
            ``fit`` to leave the script. A signal that comes too late for another step is recorded here as well.
        path: the checkpoint that was written; None if the run was not stopped.

    Raises:
        ValueError: if a signal is unknown or cannot be handled, nothing would stop the run, ``max_seconds`` is not
            positive, or ``filename`` is not a valid name.

    Example:
        >>> StopAtBoundary(signals=["SIGTERM", "SIGINT"]).stopped_by is None
        True
    """

    def __init__(
        self,
        *,
        signals: Iterable[str] = ("SIGTERM",),
        max_seconds: float | None = None,
        dirpath: str | Path | None = None,
        filename: str = "stopped-step-{step}",
    ) -> None:
        names = names_in(signals, "signals", "StopAtBoundary", "['SIGTERM', 'SIGINT']")
        unknown = [name for name in names if name not in signal.Signals.__members__]
        if unknown:
            raise ValueError(
                f"StopAtBoundary(signals={list(names)!r}): {', '.join(map(repr, unknown))} is not a signal on this"
                " platform; give names such as 'SIGTERM', 'SIGINT' or 'SIGUSR1'."
            )
        uncatchable = [name for name in names if name in ("SIGKILL", "SIGSTOP")]
        if uncatchable:
            raise ValueError(
                f"StopAtBoundary(signals={list(names)!r}): no program can catch {' and '.join(uncatchable)}. Leave it"
                " out; AtomicCheckpoints() is for runs that are killed."
            )
        if not names and max_seconds is None:
            raise ValueError(
                "StopAtBoundary(signals=[]): without a signal and without max_seconds nothing would ever stop the run."
                " Give one of them, or leave the callback out."
            )
        if max_seconds is not None:
            positive_number(max_seconds, "max_seconds", "StopAtBoundary", unit="seconds", hint="None sets no limit.")
        try:
            filename.format(step=0)
        except (AttributeError, IndexError, KeyError, ValueError):
            raise ValueError(
                f"StopAtBoundary(filename={filename!r}): it must be a name in which only {{step}} is filled in, such as"
                " 'stopped-step-{step}' or 'last'."
            ) from None
        self.signals = names
        self.max_seconds = max_seconds
        self.dirpath = folder_or_none(dirpath, "dirpath", "StopAtBoundary")
        self.filename = filename
        self.stopped_by: str | None = None
        self.path: Path | None = None
        self._fit = _Fit()

    # -- set-up and end ------------------------------------------------------------------------------------------------

    @override
    def setup(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", stage: str) -> None:
        """Checks the Trainer and moves to the end of its callbacks."""
        refuse_other_trainers(self, trainer)
        ResumableProgress.attach(trainer)
        RunState.of(trainer).place_callback(self, "last")

    @override
    def on_train_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Installs signal handlers over Lightning's, and starts the clock."""
        self.stopped_by = self.path = None
        self._fit = _Fit()
        Patches.of(trainer).at_end(self._end)
        self._fit.replace_handlers(self.signals)

    # -- steps ---------------------------------------------------------------------------------------------------------

    @override
    def on_train_batch_start(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", batch: Any, batch_idx: int
    ) -> None:
        """Notes the optimizer step, to see whether this micro-batch ends it."""
        self._fit.step = trainer.global_step

    @override
    def on_train_batch_end(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Saves and stops at the end of a window once all ranks know of the request."""
        fit = self._fit
        if trainer.global_step == fit.step or trainer.should_stop:
            return
        timed_out = self.max_seconds is not None and time.monotonic() - fit.started >= self.max_seconds
        asked = timed_out or fit.asked_by is not None
        if fit.agreement.ask(asked, pl_module.device):
            self.stopped_by = fit.asked_by or ("time" if timed_out else "another rank")
            folder = self.dirpath if self.dirpath is not None else report_folder(trainer)
            self.path = folder / f"{self.filename.format(step=trainer.global_step)}.ckpt"
            trainer.save_checkpoint(self.path, weights_only=False)
            trainer.should_stop = True
            private_resume_api.skip_validation_of_the_stop(trainer)
            rank_zero_info(
                f"StopAtBoundary: stopped by {self.stopped_by} after optimizer step {trainer.global_step}; saved"
                f" {self.path}. fit() returns, and the script continues unless it reads the attribute stopped_by:"
                " `if stop.stopped_by: sys.exit()`."
            )

    def _end(self) -> None:
        self._fit.restore_handlers()
        self._fit = _Fit()

    @override
    def on_train_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Tells all ranks of a signal that came too late to stop a step, so that the script does not continue."""
        if self.stopped_by is not None:
            return
        fit = self._fit
        asked = fit.asked_by is not None
        fit.agreement.ask(asked, pl_module.device)
        # On several processes the answer comes with the next question.
        if fit.agreement.ask(asked, pl_module.device):
            self.stopped_by = fit.asked_by or "another rank"
            rank_zero_info(
                f"StopAtBoundary: {self.stopped_by} came at the end of the run; no further checkpoint is written."
            )
