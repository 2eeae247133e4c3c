"""`make mutants` changes what it says it changes."""

import importlib.util
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "mutants.py"


@pytest.fixture(scope="module")
def script():
    specification = importlib.util.spec_from_file_location("mutants", SCRIPT)
    module = importlib.util.module_from_spec(specification)
    sys.modules["mutants"] = module
    specification.loader.exec_module(module)
    yield module
    del sys.modules["mutants"]


def test_each_kind_of_line_is_changed(script, tmp_path):
    path = tmp_path / "snippet.py"
    path.write_text(
        "def f(é, b):\n    if é < b and not b:\n        print(é)\n    return é * 2 if b is None else True\n"
    )
    changed = {(mutant.line, mutant.after.strip()) for mutant in script.mutants_of(path)}
    assert changed == {
        (2, "if é <= b and not b:"),
        (2, "if é < b or not b:"),
        (2, "if é < b and b:"),
        (2, "if not (é < b and not b):"),
        (3, "pass"),
        (4, "return é / 2 if b is None else True"),
        (4, "return é * 3 if b is None else True"),
        (4, "return é * 2 if b is not None else True"),
        (4, "return é * 2 if not (b is None) else True"),
        (4, "return é * 2 if b is None else False"),
    }


def test_every_package_with_tests_is_known(script):
    assert {"callbacks", "precision", "strategies"} <= set(script.packages())
    assert all(script.files_of(package) for package in script.packages())
