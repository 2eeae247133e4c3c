"""Many fits in one process, each with a new Trainer, strategy, plugin, model and callbacks: nothing is left behind."""

import gc
import os
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fsdp2_runs import batches, fp16, fsdp2, model
from gloo import run_ranks
from pipelined_models import PipelinedGPT
from small_models import fit
from soak_legs import Leg, run_leg
from torch import distributed as dist

from lightning_mp import PipelineParallelStrategy

pytestmark = [pytest.mark.filterwarnings("ignore")]

FITS_OF_A_ROUND = 5


@dataclass(frozen=True)
class Held:
    """What a process holds."""

    process_groups: int
    threads: int
    files: int
    tensors: int
    ours: dict[str, int]
    """Objects of this package, of Lightning, and modules, by class."""
    memory_kib: int

    @classmethod
    def now(cls) -> "Held":
        gc.collect()
        objects = gc.get_objects()
        status = Path("/proc/self/status").read_text().split("\n")
        memory = next(line for line in status if line.startswith("VmRSS"))
        names = (f"{type(thing).__module__}.{type(thing).__qualname__}" for thing in objects)
        return cls(
            process_groups=dist.get_pg_count(),
            threads=len(os.listdir("/proc/self/task")),
            files=len(os.listdir("/proc/self/fd")),
            tensors=sum(isinstance(thing, torch.Tensor) for thing in objects),
            ours=dict(Counter(name for name in names if name.startswith(("lightning", "fsdp2_runs", "torch.nn")))),
            memory_kib=int(memory.split()[1]),
        )


def with_all_callbacks(rank: int, strategy: Any, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    leg = Leg(
        ranks=2,
        strategy=strategy,
        precision="16-mixed",
        fused=False,
        schedule={0: 1, 2: 2},
        first_row=0,
        micro_batches=5,
        faults={1: "overflow"},
        saved_after=None,
        resume=None,
        folder=folder,
    )
    run_leg(rank, leg=leg)


def of_a_strategy(strategy: Any, module: Any) -> None:
    fit(module, batches(3), devices=2, strategy=strategy, plugin=fp16(), max_steps=2, max_epochs=-1)


def one_of_each(rank: int, folder: Path) -> None:
    """Five fits."""
    with_all_callbacks(rank, "ddp", folder / "ddp")
    with_all_callbacks(rank, "fsdp2", folder / "fsdp2")
    of_a_strategy(fsdp2(replicate_size=2), model())
    of_a_strategy(fsdp2(tensor_parallel_size=2), model())
    of_a_strategy(PipelineParallelStrategy(process_group_backend="gloo"), PipelinedGPT(lr=1e-3))


def many(rank: int, *, rounds: int, folder: Path) -> list[Held]:
    """What is held after the second round, and at the end."""
    held = []
    for done in range(1, rounds + 1):
        one_of_each(rank, folder / str(done))
        if done in (2, rounds):
            held.append(Held.now())
    return held


@pytest.mark.full
@pytest.mark.timeout(0)
def test_thirty_fits_leave_nothing_behind(tmp_path: Path, soak_fits: int) -> None:
    """Process groups, threads, open files, tensors and objects are as many after the last fit as after the tenth."""
    rounds = max(6, soak_fits // FITS_OF_A_ROUND)
    found = run_ranks(partial(many, rounds=rounds, folder=tmp_path), 2, timeout_seconds=60 * rounds)
    for early, late in found:
        assert replace(late, memory_kib=0) == replace(early, memory_kib=0)
        # 2.7 MiB in 180 fits, most of it in the first 30: what allocators keep
        assert late.memory_kib - early.memory_kib < 8 * 1024
