"""Optimizers of other packages under each precision: they train, clip, skip to the bit and resume, or fail by name."""

import re
from pathlib import Path

import pytest
from optimizer_packages import CHECKS, PRECISIONS, ROWS, Row, outcomes

# Their first steps compile for minutes; what they compute is the same.
pytestmark = pytest.mark.filterwarnings("default")

PAGE = Path(__file__).parents[2] / "docs" / "optimizers.md"


@pytest.fixture(autouse=True)
def _uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")


@pytest.mark.full
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_trains_clips_skips_and_resumes(row: Row, precision: str, tmp_path: Path) -> None:
    if not row.is_installed:
        pytest.skip(f"{row.package} is not installed")
    error = row.fails.get(precision)
    if error is not None:
        with pytest.raises(KeyError, match=error):
            dict(outcomes(row, precision, tmp_path))
        return
    assert dict(outcomes(row, precision, tmp_path)) == dict.fromkeys(CHECKS, True)


def test_the_table_of_the_docs_has_these_optimizers() -> None:
    section = PAGE.read_text().partition("## Optimizers of other packages\n")[2]
    lines = [line.split("|") for line in section.splitlines() if line.startswith("| ")]
    listed = {
        (cells[1].strip(), name)
        for cells in lines[1:]
        for name in re.findall(r"\b[A-Z]\w+", cells[3].partition(" on LoRA")[0])
    }
    assert {(row.package, row.name if row.wrap is None else "Lookahead") for row in ROWS} == listed
