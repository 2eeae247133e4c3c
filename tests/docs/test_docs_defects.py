"""docs/defects.md: every row names a test, and the test names the row."""

import ast
import functools
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
PAGE = TESTS.parent / "docs" / "defects.md"
#: id, what was wrong, what happens, test
ROW = re.compile(r"^\| ([DE]\d\d) \| (.+?) \| (.+?) \| ?(.*?) ?\|$", re.MULTILINE)
CELL = re.compile(r"`tests/([\w/]+\.py)::(test_\w+)`")


@functools.cache
def rows() -> dict[str, tuple[str, str, str]]:
    found = ROW.findall(PAGE.read_text())
    assert len(found) == len({name for name, *_ in found}), "an id has two rows"
    return {name: (wrong, here, cell) for name, wrong, here, cell in found}


@functools.cache
def docstrings_in(file: str) -> dict[str, str]:
    """Of the functions of a file of tests, by name; none if there is no such file."""
    path = TESTS / file
    body = ast.parse(path.read_text()).body if path.is_file() else []
    return {node.name: ast.get_docstring(node) or "" for node in body if isinstance(node, ast.FunctionDef)}


def docstring_of(file: str, name: str) -> str | None:
    """None if there is no such test."""
    return docstrings_in(file).get(name)


def test_every_defect_and_every_edge_has_a_row() -> None:
    assert set(rows()) == {f"D{number:02}" for number in range(1, 59)} | {f"E{number:02}" for number in range(1, 23)}


@pytest.mark.parametrize("name", sorted(rows()))
def test_a_row_names_a_test_that_is_there(name: str) -> None:
    cell = rows()[name][2]
    tests = CELL.findall(cell)
    assert tests, f"{name} names no test: write `tests/test_file.py::test_name` into its last column"
    assert cell == ", ".join(f"`tests/{file}::{test}`" for file, test in tests)
    for file, test in tests:
        assert docstring_of(file, test) is not None, f"{name} names {file}::{test}, and there is no such test"


@pytest.mark.parametrize("name", sorted(name for name in rows() if name.startswith("D")))
def test_the_test_of_a_stock_defect_names_it(name: str) -> None:
    docstrings = [docstring_of(file, test) or "" for file, test in CELL.findall(rows()[name][2])]
    assert any(name in docstring for docstring in docstrings)
