"""Runs a small cell of the pages of docs/results again: `make results-check`.

    PYTHONPATH=tests/support:tests/benchmarks python tests/benchmarks/results_check.py
    PYTHONPATH=tests/support:tests/benchmarks python tests/benchmarks/results_check.py --pages muon.md cost_cpu.md

Exit code 1 where a figure is outside of its range in docs/results/ranges.json, a page does not say what made it, or a
figure that a page has from a JSON file is another than the file's.
"""

import argparse
import importlib
import json
import logging
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results"
_MADE_BY = re.compile(r"Made by\s`.+?`(,\swith the options| at commit `[0-9a-f]{7})", re.DOTALL)
_REPORT = re.compile(r"- Device: .+\n- Versions: torch .+\n- Command: `")  # of the GPU benchmark

Figures = Mapping[str, float]


def memory_estimates() -> Figures:
    """Errors of three estimates."""
    from memory_cells import estimate_peak, measure_peaks

    cells = [
        ("decoder", "bf16-mixed", "fused AdamW", "single", 4),
        ("gru", "32-true", "foreach AdamW", "single", 1),
        ("u-net", "bf16-mixed", "schedule-free", "single", 1),
    ]
    errors = {}
    for cell, measured in zip(cells, measure_peaks(cells), strict=True):
        estimated = estimate_peak(cell)
        assert isinstance(estimated, int)
        assert isinstance(measured, int)
        errors[f"error, {cell[0]}"] = estimated / measured - 1
    return errors


def cost_cpu() -> Figures:
    """Passes over gradients, and Python calls beside stock's."""
    from bench_cost_counts import Setup, count_step, host_calls

    counts = count_step(Setup("16-mixed", fused=True, clip=1.0), "ours")
    assert counts is not None
    with TemporaryDirectory() as folder:
        calls = host_calls(Path(folder), 2)
    ratios = {f"Python calls, {way}": calls[way] / calls["stock"] for way in ("ours", "ours, all callbacks")}
    return {"passes, 16-mixed, fused, clipped": counts.passes, "host waits": counts.host_waits, **ratios}


def muon() -> Figures:
    """Muon beside AdamW after a quarter of the steps."""
    losses = {}
    for optimizer, rate in (("adamw", "0.3"), ("muon", "3")):
        command = ["recipes/muon_adamw.py", "--steps", "100", "--seed", "1", "--optimizer", optimizer, "--rate", rate]
        done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=True)
        losses[optimizer] = float(done.stdout.rpartition("validation loss ")[2].split()[0])
    return {"Muon minus AdamW, nats": losses["muon"] - losses["adamw"]}


def quality() -> Figures:
    """bf16-mixed beside fp32 in two short pairs."""
    sys.path.insert(0, str(ROOT / "scripts"))
    evidence: Any = importlib.import_module("evidence")
    sizes = evidence.Sizes(params=10_000, steps=20, seeds=2, rounds=1, batch_size=2)
    make_module, make_data = evidence.text_runs(evidence.load_standard_library(), sizes)
    with TemporaryDirectory() as folder:
        found = evidence.compared(
            make_module, make_data, sizes, Path(folder) / "text.jsonl", precisions=("32-true", "bf16-mixed")
        )
    return {"bf16-mixed minus 32-true, nats": found["precisions"]["bf16-mixed"]["mean_difference"]}


def _failures_of(*tests: str) -> Figures:
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", *tests], cwd=ROOT, check=False)
    return {"exit code of its tests": float(done.returncode)}


CELLS: Mapping[str, Callable[[], Figures]] = {
    "memory_estimates.md": memory_estimates,
    "cost_cpu.md": cost_cpu,
    "muon.md": muon,
    "quality.md": quality,
    "communication.md": lambda: _failures_of("tests/planning/test_communication.py", "-m", "not full"),
    "planted_faults.md": lambda: _failures_of("tests/diagnostics/test_diagnosis_bed.py", "-m", "not full"),
    "float8_cpu.md": lambda: _failures_of("tests/precision/test_float8_quality.py", "-m", "not full"),
    "resume.md": lambda: _failures_of("tests/resume/test_exact_resume_on_ranks.py", "-k", "two_kills and 1"),
}


def pages_without_origin() -> list[str]:
    """Pages that do not say by which command, at which commit, on which machine and with which torch they were made."""
    pages = [page for page in sorted(RESULTS.glob("*.md")) if page.name != "README.md"]
    return [page.name for page in pages if not (_MADE_BY.search(text := page.read_text()) or _REPORT.search(text))]


def outside(page: str, figures: Figures, ranges: Mapping[str, Mapping[str, tuple[float, float]]]) -> list[str]:
    """What is not in its range.

    >>> outside("x.md", {"a": 2.0, "b": 2.0}, {"x.md": {"a": (0, 1), "b": (1, 2)}})
    ['x.md: a is 2, stated from 0 to 1']
    """
    wrong = []
    for name, value in figures.items():
        low, high = ranges[page][name]
        if not low <= value <= high:
            wrong.append(f"{page}: {name} is {value:.4g}, stated from {low:g} to {high:g}")
    return wrong


def main() -> int:
    """Exit code 1 where something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pages", nargs="*", choices=list(CELLS), default=list(CELLS))
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    sys.path.insert(0, str(ROOT / "scripts"))
    figures: Any = importlib.import_module("figures")
    wrong = [f"{page} does not say what made it" for page in pages_without_origin()]
    wrong += [f"{page}: a figure is not that of docs/results" for page in figures.drifted()]
    ranges = json.loads((RESULTS / "ranges.json").read_text())
    for page in arguments.pages:
        found = CELLS[page]()
        print(page, dict(found), flush=True)
        wrong += outside(page, found, ranges)
    print("\n".join(wrong))
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
