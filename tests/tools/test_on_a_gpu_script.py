"""`scripts/on_a_gpu.sh`: what each call runs, and what it keeps when the time is over. Python and clock are ours."""

import os
import subprocess
import tarfile
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "on_a_gpu.sh"
TIMED = ["bf16_124m", "bf16_1_3b", "fp8_wide", "masters", "memory", "loss"]


@pytest.fixture
def called(tmp_path: Path) -> Path:
    """Commands in the place of Python, which writes down its arguments, and of `date`, whose minutes pass by calls."""
    clock = tmp_path / "clock"
    commands = {
        "python": f'#!/bin/sh\necho "$PYTEST_DISABLE_PLUGIN_AUTOLOAD $@" >>{tmp_path}/calls\n',
        "date": f'#!/bin/sh\nn=$(cat {clock}); [ "$1" = +%s ] && echo $((n + STEP)) >{clock}; echo $n\n',
    }
    (tmp_path / "bin").mkdir()
    clock.write_text("0\n")
    for name, text in commands.items():
        path = tmp_path / "bin" / name
        path.write_text(text)
        path.chmod(0o755)
    return tmp_path


def run(called: Path, *arguments: str, clock_step_seconds: int = 0) -> list[str]:
    """The lines of the summary."""
    environment = os.environ | {
        "PATH": f"{called}/bin:{os.environ['PATH']}",
        "PYTHON": f"{called}/bin/python",
        "STEP": str(clock_step_seconds),
    }
    subprocess.run([str(SCRIPT), *arguments], env=environment, cwd=called, check=True, capture_output=True)
    with tarfile.open(called / "out.tar.gz") as packed:
        summary = packed.extractfile("out/summary.txt")
        assert summary is not None
        return summary.read().decode().splitlines()[1:]


def test_timing_runs_its_parts_alone_and_in_order_of_worth(called: Path) -> None:
    assert run(called, "timing", "out") == [f"{name}: exit code 0 after 0 s" for name in TIMED]
    calls = (called / "calls").read_text()
    assert calls.count("tests/benchmarks/bench_gpu.py") == len(TIMED)
    assert "-m pytest" not in calls


def test_check_runs_tests_without_foreign_plugins_beside_the_compiler(called: Path) -> None:
    assert sorted(run(called, "check", "out")) == [
        f"{name}: exit code 0 after 0 s" for name in ("marked_gpu", "quick_tests", "warm_up")
    ]
    calls = (called / "calls").read_text().splitlines()
    tests = [call for call in calls if "-m pytest" in call]
    assert len(tests) == 2
    for call in tests:
        assert call.startswith("1 ")
        assert "--continue-on-collection-errors" in call
    assert "--accelerator gpu" in tests[1]
    assert any("--warm-up" in call for call in calls)


def test_what_no_time_is_left_for_is_named_and_what_there_is_stays_packed(called: Path) -> None:
    lines = run(called, "timing", "out", "300", clock_step_seconds=30)
    done = [line for line in lines if "exit code 0" in line]
    assert 0 < len(done) < len(TIMED)
    assert lines[len(done) :] == [f"{name}: not run, the time was over" for name in TIMED[len(done) :]]


def test_another_word_is_refused(called: Path) -> None:
    done = subprocess.run([str(SCRIPT), "all"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "usage:" in done.stderr
