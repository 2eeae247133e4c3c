"""Time ratios: ways to train that are measured in turn in one run, and imports in fresh interpreters."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from bench_cells import Workload, make_group, mixed_cells
from bench_schedule import Budget, Group, Ratio, run_group

from lightning_mp.language_model import GPTConfig

PRECISIONS = ("bf16-mixed", "16-mixed")
# a CPU takes minutes for the large model's few steps in fp16, and tokens are few so that the host's share is large
SIZES = {
    "1M": (GPTConfig(layers=4, heads=4, width=128, block_tokens=64), 2, PRECISIONS),
    "30M": (GPTConfig(layers=9, heads=8, width=512, block_tokens=16), 1, PRECISIONS[:1]),
}
"""Model, sequences per step, and precisions."""
TOY = {"toy": (GPTConfig(layers=1, heads=2, width=16, block_tokens=16, vocab=64), 2, PRECISIONS)}

_IMPORTS = """
import json, sys, time
sys.path.insert(0, sys.argv[1])
begin = time.perf_counter()
import lightning.pytorch
between, modules = time.perf_counter(), len(sys.modules)
import lightning_mp
print(json.dumps([between - begin, time.perf_counter() - between, modules, len(sys.modules) - modules]))
"""


def time_imports(repository: Path, repeats: int) -> tuple[Ratio, int, int]:
    """How many times as long `import lightning_mp` takes as `import lightning.pytorch`, and modules of both.

    Each repeat is a new interpreter that imports Lightning first and then the package, which adds to it.
    """
    ratios, modules, added = [], 0, 0
    for _ in range(repeats):
        command = [sys.executable, "-c", _IMPORTS, str(repository)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        lightning_seconds, extra_seconds, modules, added = json.loads(done.stdout.splitlines()[-1])
        ratios.append((lightning_seconds + extra_seconds) / lightning_seconds)
    return Ratio(median(ratios), min(ratios), max(ratios), repeats), modules, added


def time_steps(
    sizes: dict[str, tuple[GPTConfig, int, tuple[str, ...]]],
    *,
    repeats: int,
    segment_seconds: float,
    on_progress: Callable[[str], None],
) -> dict[str, list[Group]]:
    """Groups of cells by size of the model, one per precision; an error stands in its cell."""
    found = {}
    for size, (config, batch_size, precisions) in sizes.items():
        workload = Workload(
            config, batch_size, torch.device("cpu"), "eager", 2, segment_seconds, min_steps=2, max_steps=200
        )
        found[size] = [make_group(workload, mixed_cells(workload, precision), repeats) for precision in precisions]
        for group in found[size]:
            run_group(group, Budget(600.0, time.monotonic), lambda text, size=size: on_progress(f"{size}: {text}"))
    return found
