"""Promise 6: killed at random moments, on one device, DDP and FSDP2, a run ends as if nothing had happened."""

import itertools
import random
from pathlib import Path

import pytest
import torch
from exact_kills import EPOCHS, KILLED_LOADERS, PRECISIONS, STRATEGIES, killed_and_resumed, train
from exact_runs import SAMPLES
from gloo import run_ranks

from lightning_mp.__main__ import main
from lightning_mp.resume.records import first_parting, read_records

pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(0),
    pytest.mark.filterwarnings("ignore"),
]

KINDS = list(itertools.product(KILLED_LOADERS, STRATEGIES, PRECISIONS))
KILLS = 100


def kills_of(kind: tuple[str, str, str], kills: int, folder: Path, seed: int) -> tuple[int, int]:
    """Kills a run of this kind so often, compares it with one that was not; kills that came in time, and batches."""
    names = dict(zip(("loader", "strategy", "precision"), kind, strict=True))
    folder.mkdir(parents=True)
    ranks = STRATEGIES[names["strategy"]][1]
    straight = run_ranks(lambda rank: train(rank, folder=folder / "straight", kill=None, **names), ranks, 90)
    resumed, done = killed_and_resumed(folder / "killed", random.Random(seed), kills, **names)
    for (weights, epoch_metrics, _), (own, own_metrics, _) in zip(straight, resumed, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(weights, own, strict=True)), kind
        assert epoch_metrics == own_metrics, kind
    for epoch in range(EPOCHS):
        seen = [i for _, _, steps in straight for (number, _), step in steps.items() if number == epoch for i in step]
        assert sorted(seen) == list(range(SAMPLES)), kind
    records = [read_records(folder / f"{name}.jsonl") for name in ("straight", "killed")]
    parting = first_parting(*records)
    assert parting.kinds == (), (kind, parting)
    assert parting.num_compared == len(records[0]) == len(records[1])  # every batch, and none besides
    # weights, masters, optimizer, loss scale, counters, random numbers and position
    assert main(["bits", *(str(folder / name / "last.ckpt") for name in ("straight", "killed"))]) == 0, kind
    return done, parting.num_compared


@pytest.mark.parametrize("number", range(5))
def test_two_kills_at_random_moments_leave_no_trace(number: int, tmp_path: Path) -> None:
    """Ten kills in all: every loader, strategy and precision at least once."""
    kind = KINDS[13 * number % len(KINDS)]
    assert kills_of(kind, 2, tmp_path / "runs", number)[0] == 2


def test_a_hundred_kills_leave_no_trace(tmp_path: Path, soak_steps: int) -> None:
    """Of `make soak`; prints the rows of docs/results/resume.md."""
    if not soak_steps:
        pytest.skip("a hundred kills take half an hour: make soak")
    total = 0
    for number, kind in enumerate(itertools.cycle(KINDS)):
        if number >= len(KINDS) and total >= KILLS:
            return
        done, batches = kills_of(kind, 5, tmp_path / str(number), 100 + number)
        total += done
        print(f"| {' | '.join(kind)} | {done} | {batches} |", flush=True)
