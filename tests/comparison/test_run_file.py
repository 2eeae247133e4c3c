"""Promise: whatever moment a comparison is killed at, complete runs stay, and half a line is no run."""

import json
import math

import pytest

from lightning_mp.monitors.comparison.paired_runs import FinishedRun, RunFile

SETTINGS = {"steps": 3, "precisions": {"32-true": "Precision(32-true)"}}


def a_run(seed: int, loss: float = 2.5) -> FinishedRun:
    return FinishedRun("32-true", seed, loss, (2.7, 1 / 3, loss), 64, 0.1, "weights", "data")


def test_a_kill_at_any_byte_keeps_the_lines_before_it(tmp_path):
    whole = tmp_path / "whole.jsonl"
    runs = [a_run(seed) for seed in range(3)]
    for run in runs:
        RunFile(whole, SETTINGS).append(run)
    content = whole.read_bytes()
    for length in range(0, len(content), 3):
        cut = tmp_path / "cut.jsonl"
        cut.write_bytes(content[:length])
        kept = RunFile(cut, SETTINGS).read()
        assert kept == runs[: max(0, content[:length].count(b"\n") - 1)]
        if length % 198 == 0:
            for run in runs[len(kept) :]:
                RunFile(cut, SETTINGS).append(run)
            assert cut.read_bytes() == content


def test_losses_that_are_not_finite_come_back_so(tmp_path):
    file = RunFile(tmp_path / "new" / "runs.jsonl", SETTINGS)
    file.append(a_run(0, math.inf))
    (run,) = RunFile(tmp_path / "new" / "runs.jsonl", SETTINGS).read()
    assert math.isnan(run.final_loss)
    assert run.train_losses[:2] == (2.7, 1 / 3)
    assert "NaN" not in (tmp_path / "new" / "runs.jsonl").read_text()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"parameters,loss\n1,2\n", "it is not the file of a comparison"),
        (b"no newline", "it is not the file of a comparison"),
        (b"[1, 2]\n", "it is not the file of a comparison"),
    ],
)
def test_other_files_are_refused_and_stay(tmp_path, content, message):
    path = tmp_path / "runs.jsonl"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"`file` .*runs.jsonl cannot be continued: {message}. Name another file"):
        RunFile(path, SETTINGS)
    assert path.read_bytes() == content


def test_another_comparison_is_refused_by_what_differs(tmp_path):
    path = tmp_path / "runs.jsonl"
    RunFile(path, SETTINGS).append(a_run(0))
    with pytest.raises(ValueError, match="its runs belong to another comparison: steps was 3 and is now 4"):
        RunFile(path, {**SETTINGS, "steps": 4})


def test_a_spoilt_line_in_the_middle_is_refused(tmp_path):
    path = tmp_path / "runs.jsonl"
    RunFile(path, SETTINGS).append(a_run(0))
    for spoilt in (b"{}\n", b'{"comparison"\n', json.dumps({"comparison": "other"}).encode() + b"\n"):
        before = path.read_bytes()
        path.write_bytes(before + spoilt)
        with pytest.raises(ValueError, match="line 3 cannot be read"):
            RunFile(path, SETTINGS)
        path.write_bytes(before)
