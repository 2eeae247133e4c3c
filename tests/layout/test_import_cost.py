"""`import lightning_mp` costs what importing lightning costs. Modules are counted, nothing is timed."""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import lightning_mp

ROOT = Path(__file__).resolve().parents[2]
LARGEST_SHARE_OF_EXTRA_MODULES = 0.10
# What every install brings; anything else is optional, and imported inside the function that needs it.
REQUIRED = {"lightning", "lightning_mp", "torch", "torchmetrics", "tqdm", "typing_extensions"}
# The only modules besides our own that may come with the package, each with the reason.
ALLOWED: dict[str, str] = {"faulthandler": "writes down where a hung rank is"}

PROGRAM = """
import json, sys
sys.path.insert(0, sys.argv[1])
import lightning.pytorch
before = set(sys.modules)
import lightning_mp
print(json.dumps([sorted(before), sorted(set(sys.modules) - before)]))
"""


@pytest.fixture(scope="module")
def imported() -> tuple[set[str], set[str]]:
    """Modules that lightning brings, and those that lightning_mp adds to them, in a fresh interpreter."""
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(ROOT)], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    before, extra = json.loads(done.stdout.splitlines()[-1])
    return set(before), set(extra)


@pytest.mark.full
def test_importing_the_package_adds_only_its_own_modules(imported):
    _, extra = imported
    foreign = {name for name in extra if name.split(".")[0] != "lightning_mp"}
    assert "lightning_mp" in extra
    assert foreign == ALLOWED.keys()


def test_importing_the_package_adds_a_tenth_to_lightning_at_most(imported):
    before, extra = imported
    assert len(extra) <= LARGEST_SHARE_OF_EXTRA_MODULES * len(before)


@pytest.mark.parametrize("name", ["compare_precisions", "recommend"])
def test_a_training_run_does_not_import_what_compares_or_recommends(imported, name):
    """Types and callbacks bring the files of the other questions before a run."""
    before, extra = imported
    assert getattr(lightning_mp, name).__module__ not in before | extra


def imports_at_start(body: list[ast.stmt]) -> Iterator[str]:
    """Top-level names that these statements import when the module is imported."""
    for statement in body:
        if isinstance(statement, ast.Import):
            yield from (alias.name.split(".")[0] for alias in statement.names)
        elif isinstance(statement, ast.ImportFrom):
            yield statement.module.split(".")[0]
        elif isinstance(statement, ast.If) and ast.unparse(statement.test).endswith("TYPE_CHECKING"):
            yield from imports_at_start(statement.orelse)
        elif not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            for field in ("body", "orelse", "finalbody"):
                yield from imports_at_start(getattr(statement, field, []))


@pytest.mark.parametrize("folder", ["lightning_mp", "callbacks", "strategies"])
def test_optional_packages_are_imported_where_they_are_used(folder):
    """Lightning itself imports several of them when they are there, so counting modules would not show ours."""
    found = {
        f"{file.relative_to(ROOT)}: {name}"
        for file in (ROOT / folder).rglob("*.py")
        for name in imports_at_start(ast.parse(file.read_text()).body)
        if name not in REQUIRED | sys.stdlib_module_names
    }
    assert found == set()
