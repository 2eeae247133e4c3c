"""Notebooks are kept as they ran: with outputs, pictures, claims that are checked, and exercises for the reader.

That they run is `make notebooks`.
"""

import ast
import json
import re
from importlib import import_module
from pathlib import Path
from runpy import run_path

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
COLAB = run_path(str(ROOT / "scripts" / "colab_links.py"))


def of_type(cells, kind):
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == kind]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_complete(path):
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell.get("id") not in COLAB["IDS"]]
    code = of_type(cells, "code")
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    assert [cell["execution_count"] for cell in cells if cell["cell_type"] == "code"] == list(range(1, len(code) + 1))
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert not [output for output in outputs if output["output_type"] == "error" or output.get("name") == "stderr"]
    assert sum("assert " in cell for cell in code[1:]) >= 3


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_what_a_notebook_imports_of_the_package_is_there(path):
    for cell in of_type(json.loads(path.read_text())["cells"], "code"):
        for node in ast.walk(ast.parse(re.sub(r"^[%!].*$", "", cell, flags=re.MULTILINE))):
            if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] == "lightning_mp":
                module = import_module(node.module)
                assert [alias.name for alias in node.names if not hasattr(module, alias.name)] == [], node.module


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_short_and_ends_with_two_exercises_and_folded_answers(path):
    cells = json.loads(path.read_text())["cells"]
    lines = [line for cell in of_type(cells, "code") for line in cell.splitlines() if line.strip()]
    assert len(lines) < 120
    exercises = "".join(cells[-1]["source"])
    assert exercises.startswith("## Exercises\n")
    assert re.findall(r"^(\d)\. ", exercises, flags=re.MULTILINE) == ["1", "2"]
    answers = re.findall(r"<details><summary>Answer</summary>\n\n(.+?)\n\n   </details>", exercises, flags=re.DOTALL)
    assert len(answers) == 2


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_has_the_colab_link_of_the_address_in_pyproject_and_else_none(path):
    notebook = json.loads(path.read_text())
    assert COLAB["with_links"](notebook, path.name, COLAB["repository"]()) == notebook
    plain = COLAB["with_links"](notebook, path.name, None)
    assert "colab" not in json.dumps(plain)
    linked = COLAB["with_links"](plain, path.name, "https://github.com/someone/something")
    assert "".join(linked["cells"][1]["source"]) == (
        f"[Open in Colab](https://colab.research.google.com/github/someone/something/blob/main/notebooks/{path.name})"
    )
    assert "git+https://github.com/someone/something" in "".join(linked["cells"][2]["source"])
    assert linked["cells"][3:] == plain["cells"][1:]


def test_there_are_notebooks():
    assert len(NOTEBOOKS) >= 4
