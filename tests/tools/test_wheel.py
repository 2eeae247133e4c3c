"""The wheel holds the whole package, and works where there is no checkout."""

import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
PARTS_OF_THE_CHECKOUT = (
    "lightning_mp",
    "callbacks",
    "strategies",
    "pyproject.toml",
    "MANIFEST.in",
    "README.md",
    "LICENSE",
)
LINKED = ("callbacks", "strategies")

# Imports every module of the installed wheel and prints where each one lies.
PROGRAM = """
import sys
target, site_packages = sys.argv[1:]
sys.path[:0] = [target]
sys.path.append(site_packages)
import importlib, pkgutil
import lightning_mp
names = ["lightning_mp", *(m.name for m in pkgutil.walk_packages(lightning_mp.__path__, "lightning_mp."))]
for name in names:
    print(name, importlib.import_module(name).__file__, sep="\\t")
"""


def copy_checkout(to: Path) -> Path:
    for name in PARTS_OF_THE_CHECKOUT:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, to / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, to / name)
    return to


def keep_links(checkout: Path) -> None:
    assert all((checkout / "lightning_mp" / name).is_symlink() for name in LINKED)


def replace_links_by_text(checkout: Path) -> None:
    """What git writes where the file system has no symbolic links: the target's name, as text."""
    for name in LINKED:
        link = checkout / "lightning_mp" / name
        link.unlink()
        link.write_text(f"../{name}")


def remove_links(checkout: Path) -> None:
    for name in LINKED:
        (checkout / "lightning_mp" / name).unlink()


# What pip calls, in a process that it starts after others.
BACKEND = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"


def build_wheel(checkout: Path, into: Path, *, with_pip: bool) -> Path:
    """Build with the tools of this environment, so that nothing is fetched."""
    if with_pip:
        command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "--quiet"]
        run([*command, "--wheel-dir", str(into), str(checkout)], cwd=into)
    else:
        run([sys.executable, "-c", BACKEND, str(into)], cwd=checkout)
    (wheel,) = into.glob("*.whl")
    return wheel


def run(command: list[str], cwd: Path) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def modules_of_the_checkout() -> set[str]:
    """Path in the wheel of every module."""
    files = {
        f"lightning_mp/{file.relative_to(ROOT / 'lightning_mp')}" for file in (ROOT / "lightning_mp").rglob("*.py")
    }
    return files | {f"lightning_mp/{file.relative_to(ROOT)}" for name in LINKED for file in (ROOT / name).rglob("*.py")}


def data_files_of_the_checkout() -> set[str]:
    """Tables that the package reads at run time."""
    found = [file for ending in ("*.csv", "*.json") for file in (ROOT / "lightning_mp").rglob(ending)]
    return {str(file.relative_to(ROOT)) for file in found}


@pytest.fixture(
    scope="module",
    params=[
        keep_links,
        pytest.param(replace_links_by_text, marks=pytest.mark.full),
        pytest.param(remove_links, marks=pytest.mark.full),
    ],
    ids=lambda change: change.__name__,
)
def wheel(request, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    checkout = folder / "checkout"
    checkout.mkdir()
    request.param(copy_checkout(checkout))
    into = folder / "dist"
    into.mkdir()
    return build_wheel(checkout, into, with_pip=request.param is keep_links)


@pytest.mark.full
def test_wheel_holds_every_module_and_data_file(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        expected = modules_of_the_checkout() | data_files_of_the_checkout() | {"lightning_mp/py.typed"}
        assert {f"{package.replace('.', '/')}/__init__.py" for package in PACKAGES} <= expected
        inside = {name for name in names if ".dist-info/" not in name}
        assert inside == expected
        assert [name for name in inside if archive.read(name) != (ROOT / name).read_bytes()] == []


def test_wheel_names_its_licence_and_its_command(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        text = archive.read(metadata).decode()
        commands = archive.read(metadata.replace("METADATA", "entry_points.txt")).decode()
    assert "License-Expression: Apache-2.0" in text
    assert "Requires-Python: >=3.11" in text
    assert "lightning-mp = lightning_mp.__main__:main" in commands


@pytest.mark.full
@pytest.mark.parametrize("wheel", [keep_links], indirect=True, scope="module", ids=["keep_links"])
def test_wheel_imports_where_there_is_no_checkout(wheel, tmp_path):
    """Installed alone in an empty folder, started in another empty one. The other wheels hold the same, byte for byte.

    `-I -S` keeps the checkout's editable install out: without it a module missing in the wheel
    would be found there.
    """
    target, empty = tmp_path / "target", tmp_path / "empty"
    empty.mkdir()
    install = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--quiet", "--target", str(target)]
    run([*install, str(wheel)], cwd=empty)
    site_packages = sysconfig.get_path("purelib")
    lines = run([sys.executable, "-I", "-S", "-c", PROGRAM, str(target), site_packages], cwd=empty).splitlines()
    files = dict(line.split("\t") for line in lines)
    assert set(PACKAGES) <= files.keys()
    assert {str(Path(file).relative_to(target)) for file in files.values()} == modules_of_the_checkout()
    assert list(empty.iterdir()) == []
