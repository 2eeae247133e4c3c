"""Optimizers of other packages under each precision: they train, clip, skip to the bit and resume, or are refused."""

from pathlib import Path

import pytest
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from optimizer_packages import CHECKS, PRECISIONS, ROWS, Row, outcomes

# Their first steps compile for minutes; what they compute is the same.
pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("default")]


@pytest.fixture(autouse=True)
def _uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_trains_clips_skips_and_resumes(row: Row, precision: str, tmp_path: Path) -> None:
    if not row.is_installed:
        pytest.skip(f"{row.package} is not installed")
    refusal = row.refused.get(precision)
    if refusal is not None:
        with pytest.raises(MisconfigurationException, match=refusal):
            dict(outcomes(row, precision, tmp_path))
        return
    assert dict(outcomes(row, precision, tmp_path)) == dict.fromkeys(CHECKS, True)
