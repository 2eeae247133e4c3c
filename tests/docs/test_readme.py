"""Every code block of the README and of the table of parts runs."""

import contextlib
import importlib
import io
import re
import shlex
import subprocess
import sys
import textwrap
from functools import cache
from pathlib import Path

import pytest
import torch
import yaml
from lightning.pytorch.cli import LightningCLI
from small_models import Regression, loader, regression_batches

from lightning_mp.__main__ import main

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", ROOT / "docs" / "parts.md")
TEXT = "\n".join(page.read_text() for page in PAGES)
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", TEXT, flags=re.DOTALL | re.MULTILINE)
PYTHON = [code for language, code in BLOCKS if language == "python"]
EXAMPLE = next(code for code in PYTHON if "3. or" in code)
LINES = [line.split("#")[0].strip() for language, code in BLOCKS if language == "bash" for line in code.splitlines()]


def test_every_block_is_of_a_kind_that_is_run() -> None:
    assert {language for language, _ in BLOCKS} == {"python", "bash", "yaml", "diff"}
    assert len(PYTHON) >= 2


@pytest.mark.parametrize("index", [i for i, code in enumerate(PYTHON) if code is not EXAMPLE])
def test_short_python_blocks_run(index: int) -> None:
    exec(compile(PYTHON[index], "README.md", "exec"), {})


# Lightning's, for the line that is replaced.
@pytest.mark.filterwarnings("ignore:.*AMP with fp16 is not supported on CPU:UserWarning")
@pytest.mark.parametrize("index", [i for i, (language, _) in enumerate(BLOCKS) if language == "diff"])
def test_both_sides_of_a_diff_make_a_trainer(index: int) -> None:
    lines = BLOCKS[index][1].splitlines()
    assert {line[0] for line in lines} <= {"+", "-", " "}
    for side in "+-":
        code = textwrap.dedent("\n".join(line[1:] for line in lines if line[0] in (side, " ")))
        exec(f"import lightning.pytorch as pl\nfrom lightning_mp import *\n{code}", {})


@pytest.mark.full
def test_the_three_edits_example_runs_in_a_new_file_and_spends_its_budget(tmp_path: Path) -> None:
    """Outside of the repository, as a reader would."""
    look = "\nprint([c.tokens_seen for c in trainer.callbacks if isinstance(c, ChinchillaBudget)])\n"
    (tmp_path / "example.py").write_text(EXAMPLE + look)
    done = subprocess.run(
        [sys.executable, "example.py"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[16000]"


def test_the_picture_shows_what_its_script_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    """D07, D29, D30: stock's rate moves on in a skip, its short window is divided by 4; ours is exact."""
    monkeypatch.syspath_prepend(ROOT / "scripts")
    script = importlib.import_module("draw_stock_against_ours")
    stock, ours = script.measure()
    skip, last = script.OVERFLOW_STEP, -(-script.MICRO_BATCHES // script.WINDOW) - 1
    assert stock.learning_rates[skip + 1] < stock.learning_rates[skip]
    assert ours.learning_rates[skip + 1] == ours.learning_rates[skip]
    assert stock.gradient_errors[last] == pytest.approx(0.75, abs=1e-3)
    assert max(error for step, error in enumerate(ours.gradient_errors) if step != skip) < 1e-3
    assert ours.tokens[-1] == script.BUDGET_TOKENS < stock.tokens[-1]
    assert "75 % | 0.06 %" in TEXT


def words_of(page: Path) -> int:
    """Words with a letter, those of code and tables included."""
    return sum(1 for word in page.read_text().split() if re.search("[A-Za-z]", word))


def test_the_pages_of_users_are_short() -> None:
    """The README, and with it all that a user reads: not what is written for contributors, nor docs/results."""
    assert words_of(ROOT / "README.md") < 850
    for_contributors = {"architecture.md", "changelog.md", "contributing.md"}
    pages = [page for page in (ROOT / "docs").glob("*.md") if page.name not in for_contributors]
    assert len(pages) > 25
    assert sum(map(words_of, pages)) + words_of(ROOT / "README.md") < 22_000


def test_links_lead_somewhere() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"(?:\]\(|srcset=\"|src=\")(?!https?://|#)([^)#\"]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


@pytest.mark.parametrize("line", LINES)
def test_commands_exist(line: str) -> None:
    words = shlex.split(line)
    if words[0] != "make":
        assert words[:2] in (["pip", "install"], ["lightning-mp", "demo"])
        return
    dry = subprocess.run(["make", "-n", *words[1:]], cwd=ROOT, capture_output=True, text=True, check=False)
    assert dry.returncode == 0, dry.stderr
    for option in re.findall(r"--[a-z-]+", " ".join(words[2:])):
        assert option in demo_help()


@cache
def demo_help() -> str:
    with pytest.raises(SystemExit) as ended, contextlib.redirect_stdout(io.StringIO()) as shown:
        main(["demo", "--help"])
    assert ended.value.code == 0
    return shown.getvalue()


# Lightning 2.6 calls jsonargparse by names that jsonargparse has since replaced.
@pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning")
def test_the_yaml_block_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py"])
    config = yaml.safe_load(next(code for language, code in BLOCKS if language == "yaml"))
    config["trainer"] |= {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    cli = LightningCLI(
        Small,
        args=["--config", str(tmp_path / "config.yaml")],
        run=False,
        save_config_callback=None,
        seed_everything_default=False,
    )
    cli.trainer.fit(cli.model, loader(regression_batches(3)))
    assert cli.trainer.precision_plugin.scaler.get_scale() == 1024.0
    assert all(torch.isfinite(p).all() for p in cli.model.parameters())


class Small(Regression):
    def __init__(self) -> None:
        super().__init__()
