"""The tables of docs/precision.md against what is measured: bytes, traffic, casts and waits of every plugin."""

import gc
import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision
from precision_figures import figures_of

import lightning_mp
from lightning_mp.training.precision import tf32

PAGE = Path(__file__).resolve().parents[2] / "docs" / "precision.md"


@dataclass
class Row:
    """What a row of the page says; None where it says "refused"."""

    sizes: list[int]
    total: int
    traffic: list[tuple[int, int] | None]
    casts: int
    waits: list[int | None]
    purpose: str


def rows_of(heading: str) -> dict[str, Row]:
    """A line may be about several plugins: what one is for; bytes and casts; passes and waits, fused and other."""
    section = PAGE.read_text().split(f"## {heading}\n")[1].split("\n## ")[0]
    purposes: dict[str, str] = {}
    kept: dict[str, tuple[str, str]] = {}
    moved: dict[str, list[str]] = {}
    for line in section.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        names = re.findall(r"`([^`]+)`", cells[0]) if line.startswith("| `") else []
        for name in names:
            match cells[1:]:
                case [purpose]:
                    assert purposes.setdefault(name, purpose) is purpose, f"{name} has two rows"
                case [sizes, casts] if "=" in sizes:
                    assert kept.setdefault(name, (sizes, casts)) == (sizes, casts), f"{name} has two rows"
                case [fused, other]:
                    assert moved.setdefault(name, [fused, other]) == [fused, other], f"{name} has two rows"
    assert purposes.keys() == kept.keys() == moved.keys()
    rows = {}
    for name, purpose in purposes.items():
        sizes, total = kept[name][0].split(" = ")
        passes = [re.fullmatch(r"(\d+) \((\d+) bytes\), (\d)", cell) for cell in moved[name]]
        assert all(match or cell == "refused" for match, cell in zip(passes, moved[name], strict=True)), name
        rows[name] = Row(
            [int(size) for size in sizes.split(" + ")],
            int(total),
            [None if match is None else (int(match[1]), int(match[2])) for match in passes],
            int(kept[name][1]),
            [None if match is None else int(match[3]) for match in passes],
            purpose,
        )
    return rows


TABLES = {heading: rows_of(heading) for heading in ("The plugins of this package", "Stock Lightning")}
ROWS = {name: row for table in TABLES.values() for name, row in table.items()}
NAMES = {name: getattr(lightning_mp, name) for name in lightning_mp.__all__ if name.endswith("Precision")}
SMALL = {"Float8Precision": partial(lightning_mp.Float8Precision, skip_small=False)}  # as the model here is
STOCK = {"MixedPrecision": MixedPrecision, "HalfPrecision": HalfPrecision, "GradScaler": torch.amp.GradScaler}


def plugin_of(name: str) -> Precision | None:
    plugin: Precision | None = eval(name, {**NAMES, **SMALL, **STOCK})
    return plugin


@pytest.fixture(autouse=True, scope="module")
def _only_new_objects() -> None:
    """Hides what lives already from the garbage collector, which makes it fast, too."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _tf32_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tf32, "why_no_tf32", lambda *_, **__: None)


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "other"])
@pytest.mark.full
def test_a_row_says_what_is_measured(name: str, fused: bool) -> None:
    row, column = ROWS[name], 0 if fused else 1
    if row.traffic[column] is None:
        assert row.waits[column] is None
        with pytest.raises(RuntimeError, match="does not allow for gradient clipping because it performs unscaling"):
            figures_of(plugin_of(name), fused=fused)
        return
    figures = figures_of(plugin_of(name), fused=fused)
    assert row.sizes == [figures.weight, figures.gradient, figures.other, figures.moments]
    assert row.total == sum(row.sizes)
    assert row.traffic[column] == (figures.traffic / figures.gradient, figures.traffic)
    assert row.casts == figures.casts
    assert row.waits[column] == figures.waits


def test_every_plugin_has_a_row_and_every_row_a_purpose() -> None:
    named = {name.split("(")[0] for name in TABLES["The plugins of this package"]}
    assert named == set(NAMES)
    assert all(row.purpose.endswith(".") for row in ROWS.values())


@pytest.mark.parametrize("fused", [True, False])
def test_what_the_page_says_about_runs_without_clipping(fused: bool) -> None:
    stock = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    assert figures_of(stock, fused=fused, clip=None).traffic == 2 * 4
    for name in ('AutocastPrecision("bf16-mixed")', "TF32Precision()", "Float8Precision()"):
        assert figures_of(plugin_of(name), fused=fused, clip=None).traffic == 1 * 4


@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize(("only_reads", "passes"), [(False, 4), (True, 3)])
def test_what_the_page_says_about_who_looks(only_reads: bool, passes: int, clip: float | None) -> None:
    looker = Callback()
    looker.on_before_optimizer_step = lambda *_: None
    if only_reads:
        looker.needs_gradients = lambda step_index: True
    figures = figures_of(plugin_of('AutocastPrecision("16-mixed")'), fused=True, clip=clip, callbacks=[looker])
    assert figures.traffic == passes * 4


def test_the_pages_name_tests_that_exist() -> None:
    pages = PAGE.read_text() + (PAGE.parent / "results" / "README.md").read_text()
    files = set(re.findall(r"`tests/([\w/]+\.py)`", pages))
    assert len(files) >= 5
    assert all((Path(__file__).parents[1] / file).exists() for file in files)
