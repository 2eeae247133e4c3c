"""Estimates of memory against what torch's own allocator held in real runs, over a grid of setups.

    PYTHONPATH=tests/support python tests/benchmarks/bench_memory.py --out docs/results/memory_estimates.json
    PYTHONPATH=tests/support python tests/benchmarks/bench_memory.py --strategies single --models mlp decoder

The cells have every pair of {strategy, micro-batches per step, plugin, model, optimizer}; ``--every-cell`` takes all.
Bytes are counted, not timed. Exit code 1 where an estimate is more than 1% too low or 5% too high.
"""

import argparse
import itertools
import json
import logging
import platform
import subprocess
import sys
import warnings
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import lightning
import torch
from memory_cells import PLUGINS, STRATEGIES, PeakCell, estimate_peak, measure_peaks

#: Allowed error of an estimate.
LOWEST, HIGHEST = -0.01, 0.05
AXES: dict[str, tuple[Any, ...]] = {
    "models": (
        "decoder",
        "encoder-decoder",
        "batch norm",
        "u-net",
        "gru",
        "experts",
        "adapters",
        "frozen",
        "checkpointed decoder",
    ),
    "plugins": ("32-true", *PLUGINS, "bf16-true+24bit", "fp32_gradients"),
    "optimizers": ("fused AdamW", "foreach AdamW", "8-bit", "schedule-free", "Muon", "Adagrad"),
    "strategies": ("single", *STRATEGIES),
    "windows": (1, 4),
}
_SAME_RANKS = 12  # cells that one pair of processes measures
_TIMEOUT_SECONDS = 600


def pairwise(axes: Sequence[Sequence[Any]]) -> list[tuple[Any, ...]]:
    """Few cells that have every pair of values of two axes, chosen greedily; the same in every run.

    >>> len(pairwise([(1, 2), (1, 2), (1, 2)]))
    4
    """
    every = list(itertools.product(*axes))
    pairs_of = {
        cell: {((i, cell[i]), (j, cell[j])) for i, j in itertools.combinations(range(len(axes)), 2)} for cell in every
    }
    missing = set().union(*pairs_of.values())
    chosen = []
    while missing:
        best = max(every, key=lambda cell: len(pairs_of[cell] & missing))
        missing -= pairs_of[best]
        chosen.append(best)
    return chosen


def compare(cells: Sequence[PeakCell]) -> list[dict[str, Any]]:
    """One row per cell of one strategy: bytes, or why it was refused."""
    rows = []
    for cell, measured in zip(cells, measure_peaks(cells, _TIMEOUT_SECONDS), strict=True):
        estimated = estimate_peak(cell)
        row: dict[str, Any] = dict(zip(("model", "plugin", "optimizer", "strategy", "window"), cell, strict=True))
        for who, answer in (("plugin", measured), ("estimate", estimated)):
            if isinstance(answer, str):
                row |= {"refused_by": who, "reason": answer}
                break
        else:
            row |= {"estimated_bytes": estimated, "measured_bytes": measured}
            if is_off(row):  # by itself: an event that the profiler has lost adds a block that was freed
                [again] = measure_peaks([cell], _TIMEOUT_SECONDS)
                assert isinstance(again, int)
                row["measured_bytes"] = min(row["measured_bytes"], again)
        rows.append(row)
    return rows


def error_of(row: dict[str, Any]) -> float | None:
    """Relative error of an estimate; None where it was refused."""
    return row["estimated_bytes"] / row["measured_bytes"] - 1 if "measured_bytes" in row else None


def is_off(row: dict[str, Any]) -> bool:
    """Whether an estimate is outside of what is promised."""
    error = error_of(row)
    return error is not None and not LOWEST <= error <= HIGHEST


def made_by(command: str) -> dict[str, str]:
    """What a page says about its origin."""
    head = subprocess.run(["git", "rev-parse", "--short=7", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "command": command,
        "commit": head.stdout.strip() or "unknown",
        "date": datetime.now(tz=UTC).date().isoformat(),
        "machine": f"{platform.processor() or platform.machine()}, {torch.backends.cpu.get_cpu_capability()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "lightning": lightning.__version__,
    }


def main() -> int:
    """Exit code 1 where a cell is off."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name, values in AXES.items():
        kind = type(values[0])
        parser.add_argument(f"--{name}", nargs="*", type=kind, default=values)
    parser.add_argument("--every-cell", action="store_true", help="all cells, not pairs")
    parser.add_argument("--out", type=Path, help="write the rows as JSON")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    axes = [getattr(arguments, name) for name in AXES]
    cells = list(itertools.product(*axes)) if arguments.every_cell else pairwise(axes)
    # torchao's compiled step fails there: torch's compile cache mixes up ranks whose shards differ in shape.
    cells = [cell for cell in cells if cell[2:4] != ("8-bit", "fsdp2")]
    rows: list[dict[str, Any]] = []
    for strategy in arguments.strategies:
        of_strategy = [cell for cell in cells if cell[3] == strategy]
        for start in range(0, len(of_strategy), _SAME_RANKS):
            for row in compare(of_strategy[start : start + _SAME_RANKS]):
                rows.append(row)
                if is_off(row):
                    print(f"off: {error_of(row):+.1%} {row}", flush=True)
    errors = [error for row in rows if (error := error_of(row)) is not None]
    print(f"{len(rows)} cells, {len(rows) - len(errors)} refused, {sum(map(is_off, rows))} off")
    if errors:
        print(f"errors from {min(errors):+.1%} to {max(errors):+.1%}")
    if arguments.out is not None:
        command = " ".join(["PYTHONPATH=tests/support python tests/benchmarks/bench_memory.py", *sys.argv[1:]])
        arguments.out.write_text(json.dumps({"made_by": made_by(command), "cells": rows}, indent=1) + "\n")
    return int(any(map(is_off, rows)))


if __name__ == "__main__":
    sys.exit(main())
