"""Estimates of memory against real runs: 12 models x 5 plugins x 3 optimizers, on one device and on two ranks.

    PYTHONPATH=tests/support python tests/benchmarks/bench_memory.py
    PYTHONPATH=tests/support python tests/benchmarks/bench_memory.py --models mlp decoder --strategies single ddp

Prints the largest relative error of each quantity over all cells, and every cell that is off by more than 5%. Bytes are
counted, not timed, so any machine gives the same figures.
"""

import argparse
import itertools
import json
import logging
import sys
import warnings
from collections import defaultdict
from pathlib import Path

from memory_cells import PLUGINS, STRATEGIES, Cell, Compared, compare_on_one_device, compare_on_ranks
from memory_models import MODELS, OPTIMIZERS

LIMIT = 0.05
TIMEOUT_SECONDS = 600


def compare(strategy: str, cells: list[Cell]) -> dict[Cell, list[Compared]]:
    """Of all cells under one strategy."""
    if strategy == "single":
        return {cell: compare_on_one_device(cell) for cell in cells}
    return compare_on_ranks(cells, strategy, TIMEOUT_SECONDS)


def main() -> int:
    """Exit code 1 where a cell is off by more than the limit."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="*", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--strategies", nargs="*", choices=("single", *STRATEGIES), default=("single", *STRATEGIES))
    parser.add_argument("--json", type=Path, help="append each comparison to this file, one JSON list per line")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    largest: dict[tuple[str, str], tuple[float, Cell]] = {}
    counts: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    for strategy, model in itertools.product(arguments.strategies, arguments.models):
        cells = list(itertools.product([model], PLUGINS, OPTIMIZERS))
        for cell, rows in compare(strategy, cells).items():
            counts[strategy][0] += 1
            off = [row for row in rows if abs(row.error) > LIMIT]
            counts[strategy][1] += bool(off)
            counts[strategy][2] += not rows
            for row in rows:
                key = strategy, row.what
                largest[key] = max(largest.get(key, (0.0, cell)), (abs(row.error), cell))
                if arguments.json is not None:
                    with arguments.json.open("a") as file:
                        print(json.dumps([strategy, *cell, row.what, row.estimated, row.measured]), file=file)
            for row in off:
                print(f"off: {strategy}, {', '.join(cell)}: {row.what} {row.estimated} for {row.measured}", flush=True)
    for strategy, (number, off_number, refused) in counts.items():
        print(f"{strategy}: {number} cells, {refused} of them refused, {off_number} off by more than {LIMIT:.0%}")
        for (of, what), (error, cell) in largest.items():
            if of == strategy:
                print(f"  {what:<20}{error:8.2%}  {', '.join(cell) if error else ''}")
    return int(any(off for _, off, _ in counts.values()))


if __name__ == "__main__":
    sys.exit(main())
