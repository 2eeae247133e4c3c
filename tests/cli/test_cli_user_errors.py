"""Errors of the user's module keep their traceback; those of the command line stay one line."""

import sys
import traceback
from pathlib import Path

import pytest

from lightning_mp.__main__ import main

PROJECT = '''
import torch
import lightning.pytorch as pl
from lightning_mp import ChinchillaBudget


class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(10, 3)

    def training_step(self, batch, batch_idx):
        return torch.nn.functional.cross_entropy(self.layer(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


def unequal():
    """Four rows against five classes."""
    return Model(), (torch.randn(4, 10), torch.zeros(5, dtype=torch.long))


def without_file():
    return open("/nowhere/train.bin")


def refused():
    return ChinchillaBudget(tokens="many")
'''


@pytest.fixture
def project(monkeypatch: pytest.MonkeyPatch) -> str:
    """A module in the folder of the test, and a second one that imports what is not there."""
    Path("own_project.py").write_text(PROJECT)
    Path("own_broken.py").write_text("import not_installed_anywhere\n")
    monkeypatch.syspath_prepend("")
    monkeypatch.delitem(sys.modules, "own_project", raising=False)
    return "own_project"


@pytest.mark.parametrize(
    ("command", "function", "kind"),
    [
        (["memory"], "unequal", ValueError),
        (["compare", "--rounds", "1", "--accelerator", "cpu"], "unequal", ValueError),
        (["memory"], "without_file", FileNotFoundError),
        (["compare"], "without_file", FileNotFoundError),
    ],
)
def test_an_error_of_the_users_module_says_where(
    project: str, command: list[str], function: str, kind: type[Exception]
) -> None:
    with pytest.raises(kind) as caught:
        main([*command, "--module", f"{project}:{function}"])
    files = [Path(frame.filename).name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert "own_project.py" in files


@pytest.mark.usefixtures("project")
def test_a_module_that_imports_what_is_missing_says_where() -> None:
    with pytest.raises(ModuleNotFoundError, match="not_installed_anywhere") as caught:
        main(["memory", "--module", "own_broken:example"])
    assert "own_broken.py" in {Path(frame.filename).name for frame in traceback.extract_tb(caught.value.__traceback__)}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["memory", "--module", "own_project:refused"], "`tokens` cannot be read, got 'many'"),
        (["memory", "--module", "own_project:missing"], "cannot be imported (module 'own_project' has no function"),
        (["memory", "--module", "own_project.part:example"], "cannot be imported (No module named 'own_project.part'"),
        (["memory", "--module", ".own_project:example"], "--module must be written PACKAGE:FUNCTION"),
        (["fit", "nowhere.csv"], "nowhere.csv cannot be read or written (No such file or directory)"),
        (["memory", "--config", "nowhere.json"], "nowhere.json"),
    ],
)
@pytest.mark.usefixtures("project")
def test_what_this_package_refuses_is_one_line(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert said in error
    assert len(error.splitlines()) == 1
