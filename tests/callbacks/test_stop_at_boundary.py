"""SIGTERM, Ctrl-C and time limits: the window is finished, a checkpoint is written, all ranks leave together."""

import os
import signal
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import small_models
import torch
from gloo import run_ranks
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from small_models import Regression, ResumableLoader, adamw, at, quiet_trainer, regression_batches, weights

from lightning_mp import AccumulationScheduler, StopAtBoundary

BATCHES = regression_batches(16)


def send(batch: int, name: str = "SIGTERM", times: int = 1) -> Callback:
    """A signal to this process in the middle of a micro-batch."""

    def action(*_: Any) -> None:
        for _ in range(times):
            os.kill(os.getpid(), signal.Signals[name])

    return at(action, "on_before_backward", call=batch)


def fit(module: pl.LightningModule, *callbacks: Callback, **arguments: Any) -> pl.Trainer:
    return small_models.fit(module, ResumableLoader(BATCHES), AccumulationScheduler({0: 4}), *callbacks, **arguments)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1"])
@pytest.mark.parametrize("at", [1, 2, 4, 5])
def test_a_signal_ends_the_run_with_its_window_and_a_resume_ends_as_if_it_had_not_come(
    name: str, at: int, tmp_path: Path
) -> None:
    """Promise 6."""
    straight = Regression(adamw)
    fit(straight)
    handler = signal.getsignal(signal.Signals[name])
    module, stop = Regression(adamw), StopAtBoundary(signals=[name])
    trainer = fit(module, stop, send(at, name), default_root_dir=tmp_path)
    steps = -(-at // 4)
    assert (trainer.global_step, module.seen_batches) == (steps, 4 * steps)
    assert (stop.stopped_by, stop.path) == (name, tmp_path / f"stopped-step-{steps}.ckpt")
    assert signal.getsignal(signal.Signals[name]) == handler, "given back"

    resumed = Regression(adamw)
    again = fit(resumed, StopAtBoundary(), ckpt_path=stop.path)
    assert again.global_step == 4
    assert all(torch.equal(a, b) for a, b in zip(weights(resumed), weights(straight), strict=True))


class Validated(Regression):
    """Counts the micro-batches before each validation."""

    def __init__(self) -> None:
        super().__init__(adamw)
        self.validated_after: list[int] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated_after.append(self.seen_batches)


#: Two micro-batches per step; the signal comes in the fifth.
WHEN_VALIDATED = [(4, [4]), (6, [6]), ("00:01:00:00", [])]


def stopped_validations(val_check_interval: Any, folder: Path, *, sends: bool = True, **arguments: Any) -> list[int]:
    module = Validated()
    trainer = quiet_trainer(
        callbacks=[AccumulationScheduler({0: 2}), StopAtBoundary(dirpath=folder), *([send(5)] if sends else [])],
        val_check_interval=val_check_interval,
        num_sanity_val_steps=0,
        **arguments,
    )
    trainer.fit(module, ResumableLoader(BATCHES), ResumableLoader(BATCHES[:1]))
    return module.validated_after


@pytest.mark.parametrize(("val_check_interval", "validated_after"), WHEN_VALIDATED)
def test_a_validation_runs_before_the_stop_only_if_it_is_due(
    val_check_interval: Any, validated_after: list[int], tmp_path: Path
) -> None:
    """Lightning runs one before each stop; who stops on a signal has seconds."""
    assert stopped_validations(val_check_interval, tmp_path) == validated_after


def test_a_second_signal_is_not_held_back() -> None:
    class Second(Exception):
        pass

    def raises(*_: Any) -> None:
        raise Second

    before = signal.signal(signal.SIGUSR1, raises)
    try:
        with pytest.raises(Second):
            fit(Regression(), StopAtBoundary(signals="SIGUSR1"), send(2, "SIGUSR1", times=2))
        assert signal.getsignal(signal.SIGUSR1) is raises
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_handlers_are_restored_where_lightning_fails_to() -> None:
    class Fails(Callback):
        """What Lightning does behind this, for instance with workers, ends before it comes to the signals."""

        def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            trainer.fit_loop.teardown = fails  # type: ignore[method-assign]

    def fails() -> None:
        raise ZeroDivisionError

    before = signal.getsignal(signal.SIGUSR1)
    try:
        with pytest.raises(ZeroDivisionError):
            fit(Regression(), StopAtBoundary(signals="SIGUSR1"), Fails())
        assert signal.getsignal(signal.SIGUSR1) is before
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_time_runs_out(tmp_path: Path) -> None:
    stop = StopAtBoundary(max_seconds=1e-9, dirpath=tmp_path / "here")
    trainer = fit(Regression(), stop)
    assert (trainer.global_step, stop.stopped_by) == (1, "time")
    assert (tmp_path / "here" / "stopped-step-1.ckpt").exists()


@pytest.mark.parametrize(("filename", "written"), [("last", "last.ckpt"), ("at {step}", "at 1.ckpt")])
def test_the_checkpoint_has_the_name_that_is_given(filename: str, written: str, tmp_path: Path) -> None:
    stop = StopAtBoundary(max_seconds=1e-9, dirpath=tmp_path, filename=filename)
    fit(Regression(), stop)
    assert stop.path == tmp_path / written
    assert stop.path.exists()


def test_all_ranks_stop_when_one_is_told(tmp_path: Path) -> None:
    """Promise 3. They agree one step after rank 1 was told, in step 1."""

    def train(rank: int) -> tuple[int, str | None]:
        stop = StopAtBoundary()
        told = [send(2)] if rank == 1 else []
        trainer = fit(Regression(adamw), stop, *told, strategy="ddp", devices=2, default_root_dir=tmp_path)
        return trainer.global_step, stop.stopped_by

    assert run_ranks(train, 2) == [(2, "another rank"), (2, "SIGTERM")]
    assert (tmp_path / "stopped-step-2.ckpt").exists()


def test_all_ranks_leave_out_the_same_validation(tmp_path: Path) -> None:
    """Promise 3. Rank 1 is told in its fifth micro-batch; both stop after the eighth, where none is due."""

    def train(rank: int) -> list[int]:
        return stopped_validations(6, tmp_path, sends=rank == 1, strategy="ddp", devices=2)

    assert run_ranks(train, 2) == [[6], [6]]


def send_after_the_last_step() -> Callback:
    """In the validation after it, for instance."""
    return at(lambda *_: os.kill(os.getpid(), signal.SIGTERM), "on_train_epoch_end")


def test_a_signal_after_the_last_step_is_told_so_that_the_script_does_not_go_on(tmp_path: Path) -> None:
    stop = StopAtBoundary(dirpath=tmp_path)
    trainer = fit(Regression(), stop, send_after_the_last_step())
    assert (trainer.global_step, stop.stopped_by, stop.path) == (4, "SIGTERM", None)
    fit(Regression(), stop)
    assert stop.stopped_by is None, "of another fit"


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("late", [send(15), send_after_the_last_step()], ids=["last window", "after it"])
def test_all_ranks_are_told_of_a_signal_that_came_too_late(late: Callback) -> None:
    """Promise 3: whoever asks `stopped_by` after the fit decides alike on all ranks."""

    def train(rank: int) -> tuple[int, str | None, Path | None]:
        stop = StopAtBoundary()
        told = [late] if rank == 1 else []
        trainer = fit(Regression(adamw), stop, *told, strategy="ddp", devices=2)
        return trainer.global_step, stop.stopped_by, stop.path

    assert run_ranks(train, 2) == [(4, "another rank", None), (4, "SIGTERM", None)]


def test_a_run_nobody_stops_is_left_alone() -> None:
    stop = StopAtBoundary(max_seconds=3600)
    assert fit(Regression(), stop).global_step == 4
    assert (stop.stopped_by, stop.path) == (None, None)


def test_it_saves_what_callbacks_after_it_in_the_list_have_counted(tmp_path: Path) -> None:
    class Counting(Callback):
        batches = 0

        def on_train_batch_end(self, *_: Any) -> None:
            self.batches += 1

        def state_dict(self) -> dict[str, int]:
            return {"batches": self.batches}

    checkpoint = ModelCheckpoint(tmp_path, every_n_train_steps=1)
    stop = StopAtBoundary()
    fit(Regression(), stop, send(2), Counting(), checkpoint, enable_checkpointing=True)
    assert stop.path is not None
    saved = torch.load(stop.path, weights_only=True)
    assert next(state for key, state in saved["callbacks"].items() if "Counting" in key) == {"batches": 4}
    assert stop.path.parent == tmp_path, "beside the other checkpoints"
