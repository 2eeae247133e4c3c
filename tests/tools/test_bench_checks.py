"""Parts of the GPU benchmark that are no throughput: what they count and keep; which are measured, in which file."""

import sys
import warnings
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

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
