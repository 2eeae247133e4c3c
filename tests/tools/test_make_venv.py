"""scripts/make_venv.sh: what it asks pip for, and one line for each thing that can go wrong; nothing half-made stays.

Without a network: the Python that makes the environment, and df, are stand-ins.
"""

import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Makes an "environment" whose python is this script too. Of pip it writes down what is asked for.
PYTHON = """\
#!/bin/sh
case "$*" in
*"-m venv"*) for folder; do :; done; mkdir -p "$folder/bin"; cp "$0" "$folder/bin/python" ;;
*"-m pip --version"*) ;;
*"-m pip install"*) echo "$*" >> asked.txt; sleep 0; . ./pip.sh ;;
*) exec "{python}" "$@" ;;
esac
"""
NO_NETWORK = """\
WARNING: Retrying (Retry(total=1)) after connection broken by 'NewConnectionError': Failed to establish a new connection
ERROR: Could not find a version that satisfies the requirement torch===2.13.0 (from versions: none)"""
UNKNOWN = """\
ERROR: Could not find a version that satisfies the requirement torch===2.99.0 (from versions: 2.11.0, 2.12.0, 2.13.0)
ERROR: No matching distribution found for torch===2.99.0"""

NOT_ALLOWED = """\
ERROR: Cannot install torch===2.99.0 because these package versions have conflicting dependencies.
ERROR: ResolutionImpossible: for help visit the page about conflicts"""


@pytest.fixture
def checkout(tmp_path):
    for name in ("pyproject.toml", "constraints.txt", "Makefile"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    (tmp_path / "bin").mkdir()
    executable(tmp_path / "bin" / "some-python", PYTHON.format(python=sys.executable))
    free(tmp_path, 100_000_000)
    says(tmp_path, "")
    return tmp_path


def executable(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def free(checkout: Path, kib: int) -> None:
    table = f"Filesystem 1024-blocks Used Available Capacity Mounted\\ndisk 999999999 1 {kib} 1%% /"
    executable(checkout / "bin" / "df", f'#!/bin/sh\nprintf "{table}\\n"\n')


def says(checkout: Path, error: str) -> None:
    """What pip answers: it fails with this error, or succeeds if there is none."""
    (checkout / "pip.sh").write_text(f"cat >&2 <<'END'\n{error}\nEND\nexit 1\n" if error else "exit 0\n")


def command(checkout: Path, torch: str) -> list[str]:
    return ["sh", "scripts/make_venv.sh", ".venv-torch" if torch else ".venv", "some-python", torch]


def environment(checkout: Path) -> dict[str, str]:
    return os.environ | {"PATH": f"{checkout / 'bin'}:{os.environ['PATH']}"}


def make(checkout: Path, torch: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(checkout, torch), cwd=checkout, env=environment(checkout), capture_output=True, text=True, check=False
    )


def asked(checkout: Path) -> list[str]:
    file = checkout / "asked.txt"
    return file.read_text().splitlines() if file.exists() else []


def test_another_torch_is_asked_for_to_the_letter_and_the_rest_stays_pinned(checkout):
    assert make(checkout, "2.11.0").returncode == 0
    first, second = asked(checkout)
    assert first.endswith(" setuptools>=77 wheel torch===2.11.0")  # 2.11.0+cpu would not do
    assert second.endswith(" --no-build-isolation --editable .[dev]")
    assert all("--constraint .venv-torch/constraints.txt" in line for line in (first, second))
    pins = (checkout / ".venv-torch" / "constraints.txt").read_text().splitlines()
    given = (ROOT / "constraints.txt").read_text().splitlines()
    assert set(given) - set(pins) == {line for line in given if line.startswith(("torch==", "setuptools=="))}
    assert set(pins) - set(given) == {"torch===2.11.0"}


def test_another_lightning_is_pinned_in_place_of_ours(checkout):
    done = subprocess.run([*command(checkout, ""), "2.7.0"], cwd=checkout, env=environment(checkout), check=False)
    assert done.returncode == 0
    pins = (checkout / ".venv" / "constraints.txt").read_text().splitlines()
    given = (ROOT / "constraints.txt").read_text().splitlines()
    assert {line.partition("==")[0] for line in set(given) - set(pins)} == {
        "lightning",
        "lightning-utilities",
        "pytorch-lightning",
    }
    assert set(pins) - set(given) == {"lightning===2.7.0"}


@pytest.mark.parametrize(
    ("torch", "error", "line"),
    [
        (
            "2.99.0",
            UNKNOWN,
            r"error: there is no torch 2\.99\.0 for Python 3\S+ here\. The newest are: 2\.11\.0 2\.12\.0 2\.13\.0",
        ),
        (
            "2.99.0",
            NOT_ALLOWED,
            r"error: pip's own settings allow no torch 2\.99\.0 here; see: python -m pip config list",
        ),
        (
            "2.13.0",
            NO_NETWORK,
            r"error: the package index does not answer, so \.venv-torch was not made\. Is there a network\?",
        ),
        ("", NO_NETWORK, r"error: the package index does not answer, so \.venv was not made\. Is there a network\?"),
        (
            "2.13.0",
            "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device",
            r"error: no room is left for \.venv-torch on the disk; it takes 8\.6 GB with a CUDA build of torch, "
            r"and 102\.4 GB are free",
        ),
        ("2.5.1", "", r"error: lightning_mp needs torch 2\.11 or newer, but TORCH=2\.5\.1"),
        (
            "nightly",
            "",
            r"error: TORCH=nightly is no release of torch\. Give all three numbers, for instance: "
            r"make test TORCH=2\.13\.0",
        ),
    ],
)
def test_what_goes_wrong_is_one_line_and_leaves_nothing(torch, error, line, checkout):
    says(checkout, error)
    done = make(checkout, torch)
    assert done.returncode == 1
    assert re.fullmatch(line + "\n", done.stderr), done.stderr
    assert not list(checkout.glob(".venv*"))


def test_an_environment_that_was_finished_once_is_not_removed(checkout):
    assert make(checkout, "2.13.0").returncode == 0
    says(checkout, NO_NETWORK)
    assert make(checkout, "2.13.0").returncode == 1
    assert (checkout / ".venv-torch" / "bin" / "python").exists()


def test_who_is_interrupted_leaves_nothing(checkout):
    number = signal.SIGINT
    (checkout / "pip.sh").write_text("touch begun\nexec sleep 600\n")
    # a shell's background jobs, of which this process may be one, ignore SIGINT, and so would the script
    before = signal.signal(number, signal.default_int_handler)
    running = subprocess.Popen(command(checkout, "2.13.0"), cwd=checkout, env=environment(checkout))
    signal.signal(number, before)
    give_up = time.monotonic() + 30
    while not (checkout / "begun").exists() and time.monotonic() < give_up:
        time.sleep(0.02)
    running.send_signal(number)
    assert running.wait(30) == 128 + number
    assert not list(checkout.glob(".venv*"))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("TORCH=../2.13.0", 'TORCH="../2.13.0" is no release of torch. Give all three numbers'),
        ("TORCH=2.13.0 2.11.0", 'TORCH="2.13.0 2.11.0" is no release of torch. Give all three numbers'),
        ("LIGHTNING=../2.7.0", 'LIGHTNING="../2.7.0" is no release of Lightning. Give its number'),
    ],
)
def test_make_takes_no_other_folder(given, said, checkout):
    done = subprocess.run(["make", "demo", given], cwd=checkout, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert said in done.stderr


@pytest.mark.parametrize(
    ("given", "folder", "last"),
    [
        (["TORCH=2.11.0"], ".venv-torch-2.11.0", '"2.11.0" ""'),
        (["LIGHTNING=2.7.0"], ".venv-lightning-2.7.0", '"" "2.7.0"'),
        (["TORCH=2.11.0", "LIGHTNING=2.7.0"], ".venv-torch-2.11.0-lightning-2.7.0", '"2.11.0" "2.7.0"'),
    ],
)
def test_make_keeps_an_environment_for_each_release_and_removes_them_all(given, folder, last, checkout):
    plan = subprocess.run(["make", "-n", "test", *given], cwd=checkout, capture_output=True, text=True, check=True)
    assert f'make_venv.sh {folder} "" {last}' in plan.stdout
    assert f"{folder}/bin/python -m pytest" in plan.stdout
    for name in (".venv", ".venv-torch-2.11.0", ".venv-torch-2.15.0", ".venv-lightning-2.7.0"):
        (checkout / name).mkdir()
    subprocess.run(["make", "clean"], cwd=checkout, capture_output=True, check=True)
    assert not list(checkout.glob(".venv*"))
