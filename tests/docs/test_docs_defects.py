"""docs/defects.md: every row has its tests, of ours and of what torch or Lightning do, and the tests name the row."""

import ast
import functools
import re
import tomllib
from pathlib import Path
from typing import NamedTuple

import pytest

TESTS = Path(__file__).resolve().parents[1]
PAGE = TESTS.parent / "docs" / "defects.md"
LISTED = TESTS / "docs" / "defect_tests.toml"
#: anchor, id, what was wrong, what happens
ROW = re.compile(r'^\| <a id="([de]\d\d)"></a>([DE]\d\d) \| (.+?) \| (.+?) \|$', re.MULTILINE)


#: Two processes have to wait for a timeout of a collective.
NOT_REPRODUCED = {"D44", "D67"}


class Row(NamedTuple):
    theirs: str | None
    """The test that reproduces what torch or Lightning do."""
    ours: list[str]


@functools.cache
def rows() -> dict[str, Row]:
    listed = tomllib.loads(LISTED.read_text())
    return {name: Row(row.get("stock"), row["ours"]) for name, row in listed.items()}


def stock_rows() -> list[str]:
    return sorted(name for name in rows() if name.startswith("D"))


@functools.cache
def docstrings_in(file: str) -> dict[str, str]:
    """Of the functions of a file of tests, by name; none if there is no such file."""
    path = TESTS / file
    body = ast.parse(path.read_text()).body if path.is_file() else []
    return {node.name: ast.get_docstring(node) or "" for node in body if isinstance(node, ast.FunctionDef)}


def docstring_of(test: str) -> str | None:
    """Of `file.py::test_name`; None if there is no such test."""
    file, name = test.split("::")
    return docstrings_in(file).get(name)


def test_every_defect_and_every_edge_has_a_row_and_its_tests() -> None:
    found = ROW.findall(PAGE.read_text())
    names = [name for _, name, _, _ in found]
    assert len(names) == len(set(names)), "an id has two rows"
    assert set(names) == {f"D{number:02}" for number in range(1, 69)} | {f"E{number:02}" for number in range(1, 23)}
    assert set(names) == rows().keys()
    assert all(anchor == name.lower() for anchor, name, _, _ in found)


def test_the_readme_says_how_many_rows_there_are() -> None:
    readme = (PAGE.parents[1] / "README.md").read_text()
    assert re.findall(r"All (\d+) rows", readme) == [str(len(rows()))]


@pytest.mark.parametrize("name", sorted(rows()))
def test_a_row_has_a_test_that_is_there(name: str) -> None:
    assert rows()[name].ours, f"{name} has no test: list it in {LISTED.name}"
    for test in rows()[name].ours:
        assert docstring_of(test) is not None, f"{name} lists {test}, and there is no such test"


@pytest.mark.parametrize("name", stock_rows())
def test_the_test_of_a_stock_defect_names_it(name: str) -> None:
    assert any(name in (docstring_of(test) or "") for test in rows()[name].ours)


@pytest.mark.parametrize("name", stock_rows())
def test_a_stock_defect_is_reproduced_by_a_test_that_names_it(name: str) -> None:
    """So that a release of torch or Lightning that repairs it is noticed."""
    theirs = rows()[name].theirs
    if name in NOT_REPRODUCED:
        assert theirs is None
        return
    assert theirs is not None
    assert name in (docstring_of(theirs) or ""), f"{name} lists {theirs}, which does not name it"


def test_every_test_of_stock_behaviour_is_on_the_page() -> None:
    named = {row.theirs for row in rows().values()}
    there = {
        f"stock/{path.name}::{test}"
        for path in (TESTS / "stock").glob("test_*.py")
        for test in docstrings_in(f"stock/{path.name}")
        if test.startswith("test_")
    }
    assert there
    assert there <= named
