"""The shape of the repository: what the build lists, what the folders hold, what the house rules say of a file."""

import ast
import importlib
import re
import tomllib
from pathlib import Path
from runpy import run_path

import pytest

import lightning_mp

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "lightning_mp"
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
LINKED = ("callbacks", "strategies")
LONGEST_FILE_LINES = 700
LONGEST_FUNCTION_LINES = 50


def source_files() -> list[Path]:
    """Every module of the package, each once, at its real place."""
    folders = [PACKAGE, *(ROOT / name for name in LINKED)]
    files = [file for folder in folders for file in folder.rglob("*.py") if not is_behind_link(file)]
    assert files
    return sorted(files)


def is_behind_link(file: Path) -> bool:
    return file.resolve() != file


def name_of(file: Path) -> str:
    return str(file.relative_to(ROOT))


def functions_of(module: ast.Module) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [node for node in ast.walk(module) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def code_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function, its docstring not counted."""
    lines = function.end_lineno - function.lineno + 1
    first = function.body[0]
    if ast.get_docstring(function) is not None:
        lines -= first.end_lineno - first.lineno + 1
    return lines


def imported_modules(text: str) -> set[str]:
    """Every part of the names of the modules that a file imports, also inside of functions."""
    nodes = list(ast.walk(ast.parse(text)))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
    return {part for name in names for part in name.split(".")}


def distribution_name(requirement: str) -> str:
    """The normalised name in a requirement such as `Foo_bar[extra]>=1`."""
    return re.sub(r"[-_.]+", "-", re.match(r"[A-Za-z0-9._-]+", requirement).group()).lower()


def pinned_versions() -> dict[str, str]:
    lines = [line.split("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines()]
    pins = [line.split("==") for line in lines if line]
    assert all(len(pin) == 2 for pin in pins), f"constraints.txt pins with == only, got {pins}"
    return {distribution_name(name): version for name, version in pins}


def required_by(*extras: str) -> set[str]:
    """Names that installing the package with these extras asks for directly, extras within extras followed."""
    project = PYPROJECT["project"]
    requirements = list(project["dependencies"])
    for extra in extras:
        for requirement in project["optional-dependencies"][extra]:
            if distribution_name(requirement) == project["name"]:
                inner = re.search(r"\[(.*)\]", requirement).group(1).split(",")
                requirements.extend(required_by(*inner))
            else:
                requirements.append(requirement)
    return {distribution_name(requirement) for requirement in requirements}


@pytest.mark.parametrize("name", LINKED)
def test_link_in_the_package_leads_to_the_folder_at_the_top(name):
    link = PACKAGE / name
    assert link.is_symlink()
    assert link.readlink() == Path("..") / name
    assert link.resolve() == ROOT / name


def test_build_lists_exactly_the_folders_that_are_packages():
    tops = {"lightning_mp": PACKAGE, **{f"lightning_mp.{name}": ROOT / name for name in LINKED}}
    found = {
        ".".join([prefix, *init.parent.relative_to(folder).parts])
        for prefix, folder in tops.items()
        for init in folder.rglob("__init__.py")
        if not is_behind_link(init)
    }
    assert found == set(PYPROJECT["tool"]["setuptools"]["packages"])


def test_no_folder_of_modules_lacks_its_init_file():
    assert [name_of(file) for file in source_files() if not (file.parent / "__init__.py").exists()] == []


def test_version_of_the_package_is_the_one_the_build_reads():
    assert PYPROJECT["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "lightning_mp._version.__version__"}
    assert lightning_mp.__version__ == importlib.import_module("lightning_mp._version").__version__


def test_command_starts_a_function_that_exists():
    module_name, function_name = PYPROJECT["project"]["scripts"]["lightning-mp"].split(":")
    assert callable(getattr(importlib.import_module(module_name), function_name))


def broken_house_rules(file: Path) -> list[str]:
    text = file.read_text()
    module = ast.parse(text)
    long = {f.name: code_lines(f) for f in functions_of(module) if code_lines(f) > LONGEST_FUNCTION_LINES}
    rules = {
        "name the file after the concept it holds": file.name == "utils.py",
        "a module says in its docstring what it is for": not ast.get_docstring(module),
        "a second idea in the file: make it two files": len(text.splitlines()) > LONGEST_FILE_LINES,
        f"more than {LONGEST_FUNCTION_LINES} lines besides the docstring, split them: {long}": bool(long),
    }
    return [rule for rule, broken in rules.items() if broken]


def test_source_files_follow_the_house_rules():
    broken = {name_of(file): broken_house_rules(file) for file in source_files()}
    assert {name: rules for name, rules in broken.items() if rules} == {}


def test_constraints_pin_everything_that_is_installed_for_the_tests():
    assert required_by("dev") - pinned_versions().keys() == set()
    assert pinned_versions()["torch"] == "2.13.0"


def test_file_names_of_tests_are_unique():
    """The tests folder is no package, so two files of one name would shadow each other."""
    names = [file.name for file in (ROOT / "tests").rglob("*.py")]
    assert sorted(names) == sorted(set(names))
    assert not list((ROOT / "tests").rglob("__init__.py"))


def test_no_test_file_takes_from_another():
    """What two of them share is in tests/support: a test is then moved or split without looking who uses it."""
    texts = {file: file.read_text() for file in (ROOT / "tests").rglob("*.py")}
    tests = {file.stem for file in texts if file.name.startswith("test_")}
    named = {file: text for file, text in texts.items() if tests.intersection(re.findall(r"\w+", text))}
    taken = {f"{name_of(file)} imports {name}" for file, text in named.items() for name in imported_modules(text)}
    assert {line for line in taken if line.split()[-1] in tests} == set()


def test_every_package_has_a_folder_of_tests():
    """`make mutants` runs the tests of the package that it changes."""
    mutants = run_path(str(ROOT / "scripts" / "mutants.py"))
    wings = {PACKAGE / wing for wing in mutants["WINGS"]}
    folders = {folder for place in (PACKAGE, *wings) for folder in place.iterdir() if (folder / "__init__.py").exists()}
    assert set(mutants["packages"]()) == {folder.name for folder in folders - wings}
