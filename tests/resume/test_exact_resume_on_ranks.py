"""Promise 6: killed at random moments, on one device, DDP and FSDP2, a run ends as if nothing had happened."""

import itertools
import random
from pathlib import Path

import pytest
import torch
from exact_kills import KILLED_LOADERS, PRECISIONS, STRATEGIES, killed_and_resumed, train
from gloo import run_ranks

from lightning_mp.resume.records import first_parting, read_records

pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(0),
    pytest.mark.filterwarnings("ignore"),
]

KINDS = list(itertools.product(KILLED_LOADERS, STRATEGIES, PRECISIONS))


def kills_of(kind: tuple[str, str, str], kills: int, folder: Path, seed: int) -> int:
    """Kills a run of this kind so often, compares it with one that was not, and returns how many kills came in time."""
    names = dict(zip(("loader", "strategy", "precision"), kind, strict=True))
    folder.mkdir(parents=True)
    ranks = STRATEGIES[names["strategy"]][1]
    straight = run_ranks(lambda rank: train(rank, folder=folder / "straight", kill=None, **names), ranks, 90)
    resumed, done = killed_and_resumed(folder / "killed", random.Random(seed), kills, **names)
    for (weights, epoch_metrics, _), (own, own_metrics, _) in zip(straight, resumed, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(weights, own, strict=True)), kind
        assert epoch_metrics == own_metrics, kind
    records = [read_records(folder / f"{name}.jsonl") for name in ("straight", "killed")]
    parting = first_parting(*records)
    assert parting.kinds == (), (kind, parting)
    assert parting.num_compared == len(records[0]) == len(records[1])  # every batch, and none besides
    return done


@pytest.mark.parametrize("number", range(5))
def test_two_kills_at_random_moments_leave_no_trace(number: int, tmp_path: Path) -> None:
    """Ten kills in all: every loader, strategy and precision at least once."""
    kind = KINDS[(7 * number + number // 2) % len(KINDS)]
    assert kills_of(kind, 2, tmp_path / "runs", number) >= 1


def test_a_hundred_kills_leave_no_trace(tmp_path: Path, soak_steps: int) -> None:
    """Of `make soak`."""
    if not soak_steps:
        pytest.skip("a hundred kills take an hour: make soak")
    done = 0
    for number in itertools.count():
        done += kills_of(KINDS[number % len(KINDS)], 4, tmp_path / str(number), 100 + number)
        if done >= 100:
            return
