"""The demo as a shell starts it, with processes that Lightning forks."""

import json
import subprocess
import sys

import pytest
from started_python import plain_environment

pytestmark = [pytest.mark.full, pytest.mark.timeout(240)]


@pytest.fixture
def run(tmp_path):
    """Runs the demo on two forked processes in a folder of its own."""
    text = tmp_path / "text.txt"
    text.write_bytes(b"".join(b"line %d of a text, %d\n" % (number, number**2) for number in range(700)))
    command = ["demo", "--accelerator", "cpu", "--strategy", "ddp_fork", "--devices", "2", "--batch-size", "2"]
    size = ["--params", "9264", "--tokens-per-parameter", "0.5", "--text", str(text), "--out", "out"]

    def start(*options):
        return subprocess.run(
            [sys.executable, "-m", "lightning_mp", *command, *size, *options],
            cwd=tmp_path,
            env=plain_environment(),
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )

    return start


def test_a_refusal_in_a_forked_process_is_one_line_and_leaves_nothing_behind(run, tmp_path):
    refused = run("--precision", "tf32")
    assert refused.returncode == 2
    assert "lightning-mp demo: TF32Precision cannot run on this device" in refused.stderr
    assert "Traceback" not in refused.stderr
    assert not (tmp_path / "out").exists()


def test_an_overflow_in_forked_processes_is_skipped_and_named(run, tmp_path):
    finished = run("--precision", "16-mixed", "--inject-overflow", "2")
    assert finished.returncode == 0, finished.stderr
    assert "4,632 (spent exactly)" in finished.stdout
    folder = tmp_path / "out" / "version_0"
    skipped = json.loads((folder / "history.json").read_text())["steps"]["skipped"]
    assert [step for step, was_skipped in enumerate(skipped) if was_skipped] == [2]
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["skips"][0]["parameters"] == ["model.blocks.0.mlp.up.weight"]
