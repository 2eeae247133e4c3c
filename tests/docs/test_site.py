"""The pages of the site: each is reached from the start, and the code on the how-to pages runs as it stands there."""

import contextlib
import io
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from gloo import run_ranks

from lightning_mp.__main__ import main

DOCS = Path(__file__).parents[2] / "docs"
# the model of the tutorial can be validated, too
pytestmark = [
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`"),
    # Lightning, of averages beside a module that can shard itself
    pytest.mark.filterwarnings("ignore:You're using the WeightAveraging callback with a model that overrides"),
]
FOR_CONTRIBUTORS = ("architecture", "contributing")
HOW_TO = (
    "accumulation.md",
    "averages.md",
    "overflow.md",
    "budget.md",
    "mfu.md",
    "out_of_memory.md",
    "planning.md",
    "compare.md",
    "export.md",
)
QUICK = ("budget.md", "planning.md")


def blocks(page: str, language: str = "python") -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (DOCS / page).read_text(), flags=re.DOTALL | re.MULTILINE)


def run(page: str, given: dict[str, Any] | None = None) -> tuple[dict[str, Any], str]:
    """What the blocks of a page define and print, one after the other."""
    space, printed = dict(given or {}), io.StringIO()
    with contextlib.redirect_stdout(printed):
        for code in blocks(page):
            exec(compile(code, page, "exec"), space)
    return space, printed.getvalue()


def model_and_data() -> dict[str, Any]:
    """Those of the tutorial, which the how-to pages call `model` and `data`."""
    space: dict[str, Any] = {}
    exec(blocks("tutorial.md")[0], space)
    return {name: space[name] for name in ("model", "data")}


@pytest.mark.full
def test_the_tutorial_prints_what_it_shows() -> None:
    _, printed = run("tutorial.md")
    shown = [line for block in blocks("tutorial.md", "text") for line in block.splitlines()]
    assert len(shown) == 4
    assert [line for line in printed.splitlines() if line in shown] == shown


@pytest.mark.parametrize(
    "page", [page if page in QUICK else pytest.param(page, marks=pytest.mark.full) for page in HOW_TO]
)
def test_the_code_of_a_how_to_page_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    space, printed = run(page, model_and_data() if page not in ("planning.md", "compare.md") else None)
    if page == "compare.md":
        assert space["found"].runs
    if "trainer" in space:
        assert space["trainer"].global_step == {"budget.md": 12, "export.md": 2}.get(page, 10)
    if page == "budget.md":
        assert printed.rstrip().endswith("6000")


@pytest.mark.full
def test_the_run_of_the_fsdp2_page_is_resumed_and_consolidated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def steps(rank: int) -> tuple[int, int]:
        run("fsdp2.md", given := model_and_data())
        (tmp_path / "checkpoints" / "epoch=0-step=10.ckpt").rename(tmp_path / "last.ckpt") if rank == 0 else None
        torch.distributed.barrier()
        space, _ = run("fsdp2.md", given)
        return space["trainer"].global_step, space["trainer"].fit_loop.epoch_loop.batch_progress.current.processed

    assert run_ranks(steps, 2) == [(10, 10)] * 2
    [line] = blocks("fsdp2.md", "bash")
    command, *arguments = shlex.split(line.replace("checkpoints/", ""))
    assert command == "lightning-mp"
    assert not main(arguments)
    whole = torch.load("whole.ckpt", weights_only=False)
    assert {name: value.shape for name, value in whole["state_dict"].items()} == {
        name: value.shape for name, value in model_and_data()["model"].state_dict().items()
    }


@pytest.mark.parametrize("line", blocks("planning.md", "bash")[0].splitlines())
def test_a_command_of_the_planning_page_answers(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    command, *arguments = shlex.split(line)
    assert command == "lightning-mp"
    with contextlib.suppress(SystemExit):
        assert not main(arguments)
    shown = capsys.readouterr()
    assert len(shown.out.splitlines()) > 3, shown.err


def test_every_page_is_reached_from_the_start() -> None:
    """Whatever lies in docs/results is listed by its own; pages for contributors are linked, and not in the menu."""
    listed = {line for block in blocks("index.md", r"\{toctree\}") for line in block.splitlines() if line}
    pages = {page.stem for page in DOCS.glob("*.md")} - {"index", *FOR_CONTRIBUTORS}
    assert all("orphan: true" in (DOCS / f"{name}.md").read_text() for name in FOR_CONTRIBUTORS)
    assert "[Contributing](contributing.md)" in (DOCS / "index.md").read_text()
    notebooks = {f"notebooks/{file.stem}" for file in (DOCS / "notebooks").glob("*.ipynb")}
    assert {line for line in listed if line[0] != ":"} == pages | notebooks | {"results/*"}
