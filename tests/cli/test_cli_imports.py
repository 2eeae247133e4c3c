"""The command line imports torch where a command needs it, and then all of the package."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from started_python import plain_environment

from lightning_mp import __version__
from lightning_mp.__main__ import _COMMANDS, main

ROOT = Path(__file__).resolve().parents[2]
# How the process begins; the second one is what pip makes of the entry point.
STARTS = {"module": ["-m", "lightning_mp"], "script": ["lightning-mp"]}
WITHOUT_TORCH = {
    "--version": (0, f"lightning-mp {__version__}"),
    "--help": (0, "usage: lightning-mp [-h] [--version] COMMAND ..."),
    "formats": (0, "bf16"),
    "formats --json": (0, '"torch.bfloat16"'),
    "formts": (2, "invalid choice: 'formts'. Did you mean formats? See lightning-mp --help."),
    "": (2, "the following arguments are required: COMMAND"),
}
PROJECT = """
import lightning_mp
from lightning_mp import AutocastPrecision

lightning_mp.checkpoints.latest_checkpoint, lightning_mp.recommend

def example():
    import torch
    return torch.nn.Linear(8, 8), torch.zeros(2, 8)
"""


@pytest.mark.parametrize("start", STARTS)
def test_what_needs_no_torch_imports_none(start: str, tmp_path: Path) -> None:
    script = tmp_path / "lightning-mp"
    script.write_text("import sys\nfrom lightning_mp.__main__ import main\nsys.exit(main())\n")
    begin = [str(script)] if start == "script" else STARTS[start]
    processes = {
        words: subprocess.Popen(
            [sys.executable, "-X", "importtime", *begin, *words.split()],
            env=plain_environment(PYTHONPATH=str(ROOT)),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for words in WITHOUT_TORCH
    }
    for words, process in processes.items():
        code, said = WITHOUT_TORCH[words]
        output, errors = process.communicate(timeout=100)
        imported = {line.rpartition("|")[2].strip() for line in errors.splitlines() if line.startswith("import time:")}
        assert "lightning_mp" in imported, errors
        assert not imported & {"torch", "lightning", "numpy"}, words
        assert process.returncode == code
        assert said in output + errors


def test_a_command_that_needs_torch_has_the_whole_package(tmp_path: Path) -> None:
    (tmp_path / "project.py").write_text(PROJECT)
    command = [sys.executable, "-m", "lightning_mp", "memory", "--module", "project:example", "--json"]
    environment = plain_environment(PYTHONPATH=f"{ROOT}:{tmp_path}")
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "bytes" in done.stdout


@pytest.mark.parametrize("name", _COMMANDS)
def test_every_command_has_a_line_and_options(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--help"], [name, "--help"]):
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code == 0
        output = " ".join(capsys.readouterr().out.split())
        if words == ["--help"]:
            assert _COMMANDS[name][0] in output
        else:
            assert re.search(f"examples?: lightning-mp {name}", output)
            assert "--json" in output or name == "consolidate"  # which makes a file


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out.startswith("lightning-mp ")
