"""The checks of the GPU benchmark: what they count and keep, which tables are measured, and in which file."""

import sys
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

import bench_gpu
from bench_checks import WARM_UP_STEPS, Check, SyncDebug, limit_between, run_check
from bench_loss_in_time import PACE_STEPS, UntilTime
from bench_report import check_lines
from bench_schedule import NOT_REACHED, Budget


def test_a_check_that_fails_keeps_its_rows_and_its_error() -> None:
    def measure(check: Check, budget: Budget) -> None:
        check.rows.append(["x|y", "1"])
        raise RuntimeError("broke\nand a second line")

    failed, late = Check("First", "Why.", ("a", "b"), measure), Check("Second", "Why.", ("a", "b"), measure)
    budget = Budget(1e6, time.monotonic)
    run_check(failed, budget)
    budget.cancelled = True
    run_check(late, budget)
    table = ["| a | b |", "| --- | --- |", "| x/y | 1 |"]
    assert check_lines(failed.as_record()) == ["", "## First", "", "Why.", "", *table, "", "RuntimeError: broke"]
    assert check_lines(late.as_record()) == ["", "## Second", "", "Why.", "", NOT_REACHED]


def test_waits_are_counted_in_healthy_steps_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch warns of them; from the first step after the warm-up to the last."""
    modes: list[str] = []
    monkeypatch.setattr("bench_checks._set_sync_debug_mode", modes.append)
    debug = SyncDebug("warn", WARM_UP_STEPS + 3)
    with warnings.catch_warnings(record=True) as outside:
        warnings.simplefilter("always")
        for step in range(WARM_UP_STEPS + 4):
            debug.on_train_batch_start(None, None, None, step)
            warnings.warn("called a synchronizing CUDA operation (Triggered internally)", stacklevel=1)
            warnings.warn("something else", stacklevel=1)
            debug.on_train_batch_end()
    assert (debug.steps, debug.waits) == (3, 3)
    assert modes == ["warn", "default"]
    assert len(outside) == 2 * (WARM_UP_STEPS + 1)  # the others pass
    interrupted = SyncDebug("error", WARM_UP_STEPS + 3)
    interrupted.on_train_batch_start(None, None, None, WARM_UP_STEPS)
    interrupted.on_exception(None, None, RuntimeError())
    interrupted.stop()
    assert modes == ["warn", "default", "error", "default"]


def test_a_timed_run_takes_the_steps_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("bench_loss_in_time.time.perf_counter", lambda: now)
    for seconds, steps in [(8.0, 3 + 32), (0.1, 3 + PACE_STEPS)]:
        until, trainer = UntilTime(torch.device("cpu"), 3, seconds), SimpleNamespace(should_stop=False)
        while not trainer.should_stop:
            now += 0.25 if until.steps >= 3 else 60.0  # slow until everything is made
            until.on_train_batch_end(trainer)
        assert until.steps == steps
        assert until.seconds == 0.25 * (steps - 3)


def test_the_memory_limit_lies_between_a_quarter_and_the_whole_batch() -> None:
    assert limit_between(4 * 2**30, 10 * 2**30) == 7 * 2**30
    with pytest.raises(ValueError, match=r"no limit lies between them. Give a larger --batch-size"):
        limit_between(2**30, 2**30)


def test_only_takes_tables_by_a_word_of_their_title(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    full = bench_gpu.make_sections(bench_gpu.make_workload(False, 16), toy=False)
    titles = [section.title for section in full]
    assert len(set(titles)) == len(titles)
    wanted = [title for title in titles if bench_gpu.is_wanted(title, ["1.3B", "waits"])]
    heads = "1.3B at 2,048 tokens"
    assert wanted == ["Waits for the device", f"{heads}, bf16-mixed, eager", f"{heads}, master weights and fp8, eager"]
    wanted = [title for title in titles if bench_gpu.is_wanted(title, ["16-Mixed"])]
    assert wanted == ["16-mixed, eager", "16-mixed, compiled"]  # and no bf16-mixed
    assert all(bench_gpu.is_wanted(title, None) for title in titles)
    assert bench_gpu.main(["--toy", "--out", str(tmp_path), "--only", "fp4"]) == 2
    refusal = capsys.readouterr().out
    assert refusal.startswith(
        "--only fp4: no title has a word that begins so. The titles: The gradient epilogue alone; "
    )
    assert all(title in refusal for title in ("Waits for the device", "two layers, bf16-mixed, eager"))
    assert not list(tmp_path.iterdir())


def test_a_second_run_of_a_day_overwrites_nothing(tmp_path: Path) -> None:
    names = []
    for _ in range(3):
        stem = bench_gpu.free_stem(tmp_path, "bench_gpu_2026-01-02")
        stem.with_name(stem.name + ".json").touch()
        names.append(stem.name)
    assert names == ["bench_gpu_2026-01-02", "bench_gpu_2026-01-02-2", "bench_gpu_2026-01-02-3"]
