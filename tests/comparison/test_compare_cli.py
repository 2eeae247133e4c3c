"""``lightning-mp compare``: one line and exit code 2 for wrong input; with good input a table, JSON and a picture."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from compared_models import Pictures, TinyClassifier

from lightning_mp.__main__ import main
from lightning_mp.monitors.comparison.precisions import PRECISION_NAMES

TINY = ["--params", "9264", "--batch-size", "2", "--rounds", "1", "--accelerator", "cpu"]


def example():
    """Of the user's project."""
    return TinyClassifier(), Pictures()


def alone():
    return TinyClassifier()


def of_a_size(size, *, width=2):
    return TinyClassifier()


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_bytes(b"".join(b"line %d of a text\n" % number for number in range(3000)))
    return str(path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--precision", "bf16-mixed"], "--precision must be two or more, the baseline first, got 1"),
        (["--precision", "32-true", "bf17"], "--precision has 'bf17'. Known names are "),
        (["--precision", "32-true", "tf32"], "TF32Precision cannot run on this device"),
        (["--steps", "0"], "--steps must be a whole number, 1 or more, got 0"),
        (["--steps", "many"], "argument --steps: invalid int value: 'many'"),
        (
            ["--margin", "0", "--steps", "3"],
            "--margin must be a positive finite number in the unit of the loss, got 0.0",
        ),
        (["--confidence", "95", "--steps", "3"], "--confidence must be from 0.5 to below 1, such as 0.95, got 95.0"),
        (["--file", "runs.jsonl"], "--file: there are no paired runs without --steps. Pass it too, or leave them out"),
        (["--seeds", "3", "--margin", "0.1"], "--seeds and --margin: there are no paired runs without --steps"),
        (["--monitor", "val/loss"], "--monitor: there are no paired runs without --steps"),
        (["--confidence", "0.9"], "--confidence: there are no paired runs without --steps"),
        (["--plot", "picture.txt"], "--plot picture.txt cannot be drawn"),
        (["--plot", "nowhere/picture.png"], "there is no folder nowhere"),
        (["--params", "20 thousand"], "--params cannot be read, got '20 thousand'"),
        (["--params", "10"], "a model of 10 parameters cannot be built: the smallest has 9264"),
        (["--text", "nowhere.txt"], "the text 'nowhere.txt' cannot be read"),
        (["--module", "compared_models"], "--module must be written PACKAGE:FUNCTION"),
        (["--module", "nowhere:example"], "--module nowhere:example cannot be imported (No module named 'nowhere')"),
        (["--module", f"{__name__}:alone"], "must return (module, data) or (module, data, val_data), got "),
        (["--module", f"{__name__}:TINY"], ":TINY must be a function, got ['--params', '9264',"),
        (
            ["--module", f"{__name__}:of_a_size"],
            ":of_a_size must be a function without arguments (missing a required argument: 'size')",
        ),
        (["--accelerator", "tpu"], "--accelerator 'tpu' is not available here"),
    ],
)
def test_wrong_input_is_one_line(arguments, message, text, capsys):
    own = "--text" in arguments or "--module" in arguments
    with pytest.raises(SystemExit) as ended:
        main(
            [
                "compare",
                *(TINY[4:] if "--module" in arguments else TINY),
                *([] if own else ["--text", text]),
                *arguments,
            ]
        )
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert message in said
    assert said.count("\n") == 1, said
    assert list(Path.cwd().iterdir()) == []


@pytest.mark.full
def test_the_demo_is_compared_by_default(text, capsys):
    """Steps and seeds give validation losses of the demo's model; the order of its text follows from the seed."""
    arguments = [*TINY, "--text", text, "--steps", "3", "--seeds", "2", "--file", "runs.jsonl", "--json"]
    threads = torch.get_num_threads()
    assert main(["compare", *arguments, "--plot", "picture.png"]) == 0
    torch.set_num_threads(threads)
    output = capsys.readouterr()
    values = json.loads(output.out)
    assert values["monitor"] == "val/loss"
    assert list(values["precisions"]) == ["32-true", "bf16-mixed"]
    first, second = values["precisions"]["32-true"]["final_losses"]
    assert first != second
    assert values["precisions"]["bf16-mixed"]["verdict"] in ("not worse", "worse", "cannot tell yet")
    assert Path("picture.png").read_bytes().startswith(b"\x89PNG")
    assert len(Path("runs.jsonl").read_text().splitlines()) == 5
    assert output.err == ""


@pytest.mark.full
def test_a_killed_comparison_goes_on_with_the_same_command(text, tmp_path, capsys):
    """SIGKILL leaves no time to write anything; the runs that had ended are not made again."""
    command = ["compare", "--precision", "32-true", "bf16-mixed", *TINY, "--text", text, "--steps", "3", "--seeds", "2"]

    def finished(path):
        return path.read_text().splitlines() if path.is_file() else []

    killed = tmp_path / "killed.jsonl"
    with (tmp_path / "output.txt").open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "lightning_mp", *command, "--file", str(killed)], stdout=output, stderr=output
        )
        try:
            while len(finished(killed)) < 3 and process.poll() is None:
                time.sleep(0.02)
        finally:
            process.kill()
            process.wait()
    kept = finished(killed)
    assert process.returncode == -signal.SIGKILL, (tmp_path / "output.txt").read_text()
    assert 3 <= len(kept) < 5  # the costs are the first line, and two runs of each precision follow
    threads = torch.get_num_threads()
    for path in (killed, tmp_path / "never_killed.jsonl"):
        assert main([*command, "--file", str(path)]) == 0
    torch.set_num_threads(threads)
    lines = finished(killed)
    assert lines[: len(kept)] == kept
    assert [key(line) for line in lines] == [key(line) for line in finished(path)]


def key(line):
    """Of a line in the file, what does not depend on the clock."""
    return {name: value for name, value in json.loads(line).items() if name in ("precision", "seed", "train_losses")}


def test_ones_own_module_is_compared(capsys):
    assert main(["compare", "--module", f"{__name__}:example", "--rounds", "1", "--accelerator", "cpu"]) == 0
    text = capsys.readouterr().out
    assert "One batch on cpu, ratios to 32-true; memory at its peak; error of the gradient against 64-true" in text
    assert "bf16-mixed takes " in text


def test_on_a_terminal_the_tables_fit(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert main(["compare", "--module", f"{__name__}:example", "--rounds", "1", "--accelerator", "cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if len(line) > 60 and not line.startswith("One batch on cpu")] == []
    assert sum(line.startswith("  precision ") for line in lines) == 2
    assert any(line.endswith("error") for line in lines)


def test_the_help_names_every_precision(capsys):
    with pytest.raises(SystemExit):
        main(["compare", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert ", ".join(PRECISION_NAMES) in text
