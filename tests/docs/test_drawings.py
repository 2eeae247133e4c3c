"""docs/drawings is what scripts/draw.py draws, and every drawing stands on a page."""

import ast
import inspect
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from runpy import run_path

import pytest

import lightning_mp

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def script():
    return run_path(str(DOCS.parent / "scripts" / "draw.py"))


def test_the_files_are_what_the_script_draws(script):
    kept = {file.name: file.read_text() for file in (DOCS / "drawings").iterdir()}
    assert kept == script["files"]()


def test_a_drawing_says_what_it_shows_and_stands_on_a_page(script):
    pages = "\n".join(page.read_text() for page in DOCS.glob("*.md"))
    for name, text in script["files"]().items():
        title = ElementTree.fromstring(text).findtext("{http://www.w3.org/2000/svg}title")
        assert len(title) > 30
        assert re.search(rf"!\[[^\]]{{30,}}\]\(drawings/{name}\)", pages), name


def test_words_that_do_not_fit_are_noticed(script):
    picture = script["Drawing"](100, 50, "")
    with pytest.raises(AssertionError, match="wider than its box"):
        picture.box(0, 0, 20, 20, "#fff", "a long line")
    with pytest.raises(AssertionError, match="leaves the picture"):
        picture.words(90, 20, "a long line")


def test_strategies_are_named_with_settings_that_they_have(script):
    calls = [ast.parse(name, mode="eval").body for name in script["SHARDS"] if "(" in name]
    assert len(calls) > 5
    for call in calls:
        strategy = getattr(lightning_mp, call.func.id)
        inspect.signature(strategy).bind(**{setting.arg: setting.value.value for setting in call.keywords})
