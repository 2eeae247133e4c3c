"""docs/defects.md: every row names its tests, of ours and of what torch or Lightning do, and the tests name the row."""

import ast
import functools
import re
from pathlib import Path
from typing import NamedTuple

import pytest

TESTS = Path(__file__).resolve().parents[1]
PAGE = TESTS.parent / "docs" / "defects.md"
#: id, what was wrong, what happens, for stock defects the test that reproduces it, test
ROW = re.compile(r"^\| ([DE]\d\d) \| (.+?) \| (.+?) \|(?: ([^|]+?) \|)? ?(.*?) ?\|$", re.MULTILINE)
CELL = re.compile(r"`tests/([\w/]+\.py)::(test_\w+)`")


#: Two processes have to wait for a timeout of a collective.
NOT_REPRODUCED = {"D44"}


class Row(NamedTuple):
    theirs: str
    """The cell with the test that reproduces what torch or Lightning do; empty where there is none."""
    ours: str


@functools.cache
def rows() -> dict[str, Row]:
    found = ROW.findall(PAGE.read_text())
    assert len(found) == len({name for name, *_ in found}), "an id has two rows"
    return {name: Row(theirs, ours) for name, _, _, theirs, ours in found}


def stock_rows() -> list[str]:
    return sorted(name for name in rows() if name.startswith("D"))


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
    assert set(rows()) == {f"D{number:02}" for number in range(1, 63)} | {f"E{number:02}" for number in range(1, 23)}


def test_the_readme_says_how_many_rows_there_are() -> None:
    readme = (PAGE.parents[1] / "README.md").read_text()
    assert re.findall(r"All (\d+) rows", readme) == [str(len(rows()))]


@pytest.mark.parametrize("name", sorted(rows()))
def test_a_row_names_a_test_that_is_there(name: str) -> None:
    cell = rows()[name].ours
    tests = CELL.findall(cell)
    assert tests, f"{name} names no test: write `tests/test_file.py::test_name` into its last column"
    assert cell == ", ".join(f"`tests/{file}::{test}`" for file, test in tests)
    for file, test in tests:
        assert docstring_of(file, test) is not None, f"{name} names {file}::{test}, and there is no such test"


@pytest.mark.parametrize("name", stock_rows())
def test_the_test_of_a_stock_defect_names_it(name: str) -> None:
    docstrings = [docstring_of(file, test) or "" for file, test in CELL.findall(rows()[name].ours)]
    assert any(name in docstring for docstring in docstrings)


@pytest.mark.parametrize("name", stock_rows())
def test_a_stock_defect_is_reproduced_by_a_test_that_names_it(name: str) -> None:
    """So that a release of torch or Lightning that repairs it is noticed."""
    cell = rows()[name].theirs
    if name in NOT_REPRODUCED:
        assert cell == "not reproduced"
        return
    [(file, test)] = CELL.findall(cell)
    assert cell == f"`tests/{file}::{test}`"
    assert name in (docstring_of(file, test) or ""), f"{name} names {file}::{test}, which does not name it"


def test_every_test_of_stock_behaviour_is_on_the_page() -> None:
    named = {cell for row in rows().values() for cell in CELL.findall(row.theirs)}
    there = {
        (f"stock/{path.name}", test)
        for path in (TESTS / "stock").glob("test_*.py")
        for test in docstrings_in(f"stock/{path.name}")
        if test.startswith("test_")
    }
    assert there
    assert there <= named
