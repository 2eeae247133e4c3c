"""D44: a rank that hangs is named and ended, the others too, and nothing stays behind."""

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gloo import RankError, run_ranks
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from small_models import Regression, at, fit, loader, quiet_trainer, regression_batches

from lightning_mp.callbacks.rank_watchdog import RankWatchdog
from lightning_mp.strategies.fsdp2 import FSDP2Strategy
from lightning_mp.training.distributed.heartbeat import EXIT_CODE, RankReport, describe, find_hung

BATCHES = regression_batches(4)
TIMEOUT_SECONDS = 1.0


def sleep() -> None:
    time.sleep(60)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def hold_lock() -> None:
    """Waits in C without letting other threads of Python run."""
    import ctypes

    ctypes.PyDLL(None).sleep(60)


def hold_lock_later() -> None:
    """Lets the threads of Python run until the watchdog has said who hangs and is about to end the process."""
    written = Path(sys.stderr.name)
    while "All ranks end now" not in written.read_text():
        time.sleep(0.005)
    hold_lock()


def hangs(rank: int, hang: Callable[[], None], hook: str = "on_before_backward") -> Callback:
    return at(lambda *_: hang(), hook, step=2, rank=rank)


def train(
    rank: int,
    *callbacks: Callback,
    num_ranks: int = 2,
    log: Path | None = None,
    strategy: Any = "ddp",
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> None:
    if log is not None:
        sys.stderr = log.open("a")
    callbacks = (*callbacks, RankWatchdog(timeout_seconds=timeout_seconds))
    strategy = strategy if num_ranks > 1 else "auto"
    fit(Regression(), BATCHES, *callbacks, devices=num_ranks, strategy=strategy)


@pytest.mark.parametrize(
    ("rank", "hang", "hook", "what"),
    [
        (1, sleep, "on_before_backward", "hangs, last seen at on_train_batch_start of micro-batch 2 in epoch 0"),
        pytest.param(1, stop, "on_before_backward", "does not answer", marks=pytest.mark.full),
        pytest.param(0, stop, "on_before_backward", "does not answer", marks=pytest.mark.full),
        pytest.param(
            *(0, sleep, "on_train_batch_end", "last seen at on_before_optimizer_step of micro-batch 1 in epoch 0"),
            marks=pytest.mark.full,
        ),
        pytest.param(1, hold_lock, "on_before_backward", "does not answer", marks=pytest.mark.full),
    ],
)
def test_a_hung_rank_is_named_and_all_end(
    rank: int, hang: Callable[[], None], hook: str, what: str, tmp_path: Path
) -> None:
    """D44. Each process ends by itself or by another's kill: the harness would report one that it had to end."""
    log = tmp_path / "stderr.txt"
    with pytest.raises(RankError) as error:
        run_ranks(lambda r: train(r, hangs(rank, hang, hook), log=log), 2, timeout_seconds=20)
    text = log.read_text()
    assert f"no progress for 1 seconds; rank {rank} of 2 (process " in text
    assert what in text
    assert "start the run again from its latest checkpoint" in text
    assert "did not finish" not in str(error.value)
    assert "still running" not in str(error.value)
    if hang is sleep:
        assert f"Rank {rank} exited with code {EXIT_CODE}" in str(error.value)
        assert "in sleep" in text, "its stack"
    else:
        assert f"Rank {rank} was ended by SIGKILL" in str(error.value)


PLAN = {"net.0": "column", "net.2": "row"}


@pytest.mark.parametrize(
    ("ranks", "rank", "arguments"),
    [
        (2, 1, {}),
        (2, 0, {"tensor_parallel_size": 2, "tensor_parallel_plan": PLAN}),
        (4, 2, {"tensor_parallel_size": 2, "tensor_parallel_plan": PLAN}),
        (4, 3, {"replicate_size": 2}),
    ],
    ids=["shards", "tensor", "2-D", "hybrid"],
)
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")
@pytest.mark.full
def test_a_hung_rank_of_a_sharded_model_is_named(ranks: int, rank: int, arguments: Any, tmp_path: Path) -> None:
    """D44. The others wait in different collectives, of shards, of copies or of split layers, and only it is named."""

    def watched(each: int) -> None:
        strategy = FSDP2Strategy("net.0", process_group_backend="gloo", **arguments)
        train(each, hangs(rank, sleep), num_ranks=ranks, log=log, strategy=strategy, timeout_seconds=ranks)

    log = tmp_path / "stderr.txt"
    with pytest.raises(RankError) as error:
        run_ranks(watched, ranks, timeout_seconds=30)
    assert f"no progress for {ranks} seconds; rank {rank} of {ranks} (process " in log.read_text()
    assert log.read_text().count("hangs, last seen at on_train_batch_start of micro-batch 2") >= 1
    assert f"Rank {rank} exited with code {EXIT_CODE}" in str(error.value)
    assert "did not finish" not in str(error.value)
    assert "still running" not in str(error.value)


@pytest.mark.full
@pytest.mark.parametrize(("hang", "exit_code"), [(sleep, EXIT_CODE), (hold_lock_later, 1)])
def test_a_single_process_ends_too(hang: Callable[[], None], exit_code: int, tmp_path: Path) -> None:
    """Also one whose main thread takes Python's lock for good after the message: a timer that needs no lock ends it."""
    log = tmp_path / "stderr.txt"
    with pytest.raises(RankError, match=f"Rank 0 exited with code {exit_code}") as error:
        run_ranks(lambda r: train(r, hangs(0, hang), num_ranks=1, log=log), 1, timeout_seconds=20)
    assert "did not finish" not in str(error.value)
    assert "rank 0 of 1" in log.read_text()


@pytest.mark.full
def test_a_run_that_goes_on_is_left_alone() -> None:
    """Longer than the time-out in all; each micro-batch is shorter. No thread is left."""

    class Slow(Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            time.sleep(0.4 * TIMEOUT_SECONDS)

    def watched(rank: int) -> list[str]:
        train(rank, Slow())
        import threading

        return [thread.name for thread in threading.enumerate() if thread.name == "RankWatchdog"]

    assert run_ranks(watched, 2) == [[], []]


def test_the_watch_keeps_nobody_who_leaves_after_a_kill() -> None:
    """Rank 0 held the reports. The other ends with its collective's error at once, whatever the time-out."""

    def kill() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(RankError) as error:
        run_ranks(lambda rank: train(rank, hangs(0, kill), timeout_seconds=600), 2, timeout_seconds=20)
    assert "Rank 0 was ended by SIGKILL" in str(error.value)
    assert "Rank 1 raised" in str(error.value)
    assert "still running" not in str(error.value)


@pytest.mark.full
def test_a_rank_that_caught_its_exception_and_stays_is_named(tmp_path: Path) -> None:
    def fails() -> None:
        raise RuntimeError("planted\nin two lines")

    def caught(rank: int) -> None:
        try:
            train(rank, hangs(1, fails), log=log)
        except RuntimeError as error:
            if "planted" not in str(error):
                raise
            time.sleep(4 * TIMEOUT_SECONDS)

    log = tmp_path / "stderr.txt"
    with pytest.raises(RankError, match=f"Rank 0 exited with code {EXIT_CODE}"):
        run_ranks(caught, 2, timeout_seconds=20)
    assert "rank 1 of 2 (process " in log.read_text()
    assert "left training with RuntimeError: planted, last seen at on_train_batch_start" in log.read_text()


def reports(*beats: int, sequence: int = 1) -> list[RankReport]:
    return [RankReport(rank, "node a", 10 + rank, sequence, beats=count) for rank, count in enumerate(beats)]


def test_who_is_named() -> None:
    def ranks(before: list[RankReport], after: list[RankReport]) -> list[int]:
        return [report.rank for report in find_hung(before, after)]

    assert ranks(reports(9, 8, 9), reports(9, 8, 9, sequence=3)) == [1], "who is behind"
    assert ranks(reports(9, 8, 8), reports(9, 8, 8, sequence=3)) == [1, 2]
    assert ranks(reports(9, 9), reports(9, 9, sequence=3)) == [0, 1], "all at the same place"
    silent = [*reports(9, 8, 9, sequence=3)[:2], reports(9, 8, 9)[2]]
    assert ranks(reports(9, 8, 9), silent) == [2], "first of all who does not answer"
    text = describe(find_hung(reports(9, 9), reports(9, 9, sequence=3)), reports(9, 9), 60)
    assert "rank 0 of 2 (process 10 on node) hangs" in text
    assert "All ranks are at the same place; their stacks say more." in text


class Validated(Regression):
    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        pass


def test_the_places_of_each_phase(tmp_path: Path) -> None:
    """The sanity check was "after micro-batch -1", and epochs began and ended at micro-batches of other epochs."""
    places: list[str] = []

    class Records(RankWatchdog):
        def _beat(self, place: str) -> None:
            places.append(place)
            super()._beat(place)

    saves = ModelCheckpoint(tmp_path, save_on_train_epoch_end=True)
    trainer = quiet_trainer(callbacks=[Records(), saves], enable_checkpointing=True, max_epochs=2)
    batches = regression_batches(1)
    trainer.fit(Validated(), loader(batches), [loader(batches), loader(batches)])

    def validation(when: str) -> list[str]:
        hooks = "on_validation_batch_start", "on_validation_batch_end"
        return [f"{hook} of batch 0{of} in {when}" for of in ("", " of dataloader 1") for hook in hooks]

    expected = validation("the sanity check")
    for epoch in range(2):
        here = f"micro-batch 0 in epoch {epoch}"
        hooks = (
            "on_train_batch_start",
            "on_before_backward",
            "on_after_backward",
            "on_before_optimizer_step",
            "on_train_batch_end",
        )
        expected += [f"on_train_epoch_start of epoch {epoch}", *(f"{hook} of {here}" for hook in hooks)]
        expected += validation(f"the validation after {here}")
        expected += [f"on_train_epoch_end after {here}", f"on_save_checkpoint after {here}"]
    assert places == [*expected, f"on_train_end after {here}"]
