"""Notebooks are kept as they ran: with outputs, pictures, claims that are checked, and a way to run them elsewhere.

That they run is `make notebooks`.
"""

import json
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_complete(path):
    cells = json.loads(path.read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    assert "colab.research.google.com" in "".join(cells[0]["source"])
    assert 'find_spec("lightning_mp") is None' in code[0]
    assert "%pip install" in code[0]
    assert [cell["execution_count"] for cell in cells if cell["cell_type"] == "code"] == list(range(1, len(code) + 1))
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert not [output for output in outputs if output["output_type"] == "error" or output.get("name") == "stderr"]
    assert sum("assert " in cell for cell in code[1:]) >= 3


def test_there_are_notebooks():
    assert len(NOTEBOOKS) >= 4
