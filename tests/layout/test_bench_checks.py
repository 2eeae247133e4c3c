"""Parts of the GPU benchmark that are no throughput: what they count and keep; which are measured, in which file."""

import sys
import warnings
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

import bench_gpu
from bench_checks import WARM_UP_STEPS, SyncDebug, limit_between
from bench_loss import BASELINE, _row


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


def test_losses_are_compared_seed_by_seed_as_far_as_both_have_come() -> None:
    losses = {BASELINE: [2.0, 3.0, 4.0], "ours": [2.5, 2.75]}
    assert _row("ours", losses, None) == ["ours", "2", "2.6250", "+0.1250 (+0.5000, -0.2500)"]
    assert _row("ours", losses, "broke") == ["ours", "2", "2.6250", "broke"]
    assert _row(BASELINE, losses, None) == [BASELINE, "3", "3.0000", "-"]


def test_the_memory_limit_lies_between_a_quarter_and_the_whole_batch() -> None:
    assert limit_between(4 * 2**30, 10 * 2**30) == 7 * 2**30
    with pytest.raises(ValueError, match=r"no limit lies between them. Give a larger --batch-size"):
        limit_between(2**30, 2**30)


def test_only_takes_parts_by_a_word_of_their_title(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    titles = [part.title for part in bench_gpu.make_parts(bench_gpu.make_workload(False, 16), 3, toy=False)]
    assert len(set(titles)) == len(titles)
    heads = "1.3B, bf16-mixed, compiled by block"
    wanted = [title for title in titles if bench_gpu.is_wanted(title, ["1.3B", "waits"])]
    assert wanted == ["Waits for the device", *(f"{heads}, {n} per step" for n in ("1 micro-batch", "4 micro-batches"))]
    wanted = [title for title in titles if bench_gpu.is_wanted(title, ["16-Mixed"])]
    assert wanted == ["GPT-2 small, bf16-mixed and 16-mixed, eager"]  # and no other bf16-mixed
    assert all(bench_gpu.is_wanted(title, None) for title in titles)
    assert bench_gpu.main(["--toy", "--out", str(tmp_path), "--only", "fp4"]) == 2
    refusal = capsys.readouterr().out
    assert refusal.startswith("--only fp4: no title has a word that begins so. The titles: Waits for the device; ")
    assert all(title in refusal for title in titles)
    assert not list(tmp_path.iterdir())


def test_a_second_run_of_a_day_overwrites_nothing(tmp_path: Path) -> None:
    names = []
    for _ in range(3):
        stem = bench_gpu.free_stem(tmp_path, "bench_gpu_2026-01-02")
        stem.with_name(stem.name + ".json").touch()
        names.append(stem.name)
    assert names == ["bench_gpu_2026-01-02", "bench_gpu_2026-01-02-2", "bench_gpu_2026-01-02-3"]
