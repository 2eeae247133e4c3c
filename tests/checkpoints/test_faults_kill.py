"""kill -9 of any rank at any moment: the last checkpoint is usable and the restarted run ends as if never killed."""

import contextlib
import os
import random
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from gloo import RankError
from killed_runs import Result, Run, all_to_the_end, kill_after, kill_at_file_event, uninterrupted
from small_models import at

from lightning_mp import StopAtBoundary
from lightning_mp.callbacks.atomic_checkpoints import AtomicCheckpoints
from lightning_mp.training.checkpoints.latest import latest_checkpoint

__all__ = ["uninterrupted"]

pytestmark = [
    # torch warns of in-place operations on a sharded layer's output; there are none here.
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor"),
    # A restart writes where the run before it wrote.
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
    # One that is asked to end has not spent its budget.
    pytest.mark.filterwarnings("ignore:ChinchillaBudget. the run ended after .* budgeted tokens"),
    # Lightning's FSDP1 and torch under it call what torch has deprecated.
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:`_get_pg_default_device` will be deprecated"),
    pytest.mark.filterwarnings("ignore:Multiple backends are registered with this ProcessGroup"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
]

# Thirty-six in all.
RANDOM_KILLS = {
    "single": 6,
    "ddp": 4,
    "fsdp1": 2,
    "fsdp1, one file": 2,
    "model parallel": 3,
    "fsdp2": 4,
    "fsdp2, background": 6,
    "fsdp2, one file": 2,
    "fsdp2, tensor": 2,
    "fsdp2, hybrid": 1,
    "fsdp2, 2-D": 1,
    "pipeline": 3,
}


def go_on(runs: Sequence[Run], straight: Result) -> None:
    """From where each killed run was, or the optimizer step before, to the same end."""
    saved = [run.saved_steps() for run in runs]
    for run in runs:
        run.assert_little_is_lost()
    for run, steps, result in zip(runs, saved, all_to_the_end(runs), strict=True):
        assert result.equals(straight), run.folder
        if steps < straight.steps:  # the next save clears leftovers away
            assert not [path for path in run.folder.iterdir() if path.name.startswith(".")], "leftovers"


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "only_last", "victim", "numbers"),
    [
        ("ddp", (False,), 0, (4,)),
        ("model parallel", (False,), 1, (2,)),
        # One process before every second operation; the others before every twelfth.
        *(
            (kind, (False, True), 0, range(first, 60, stride))
            for kind, first, stride in (
                ("single", 1, 2),
                ("fsdp1", 3, 12),
                ("fsdp1, one file", 2, 12),
                ("model parallel", 1, 12),
                ("fsdp2", 2, 12),
                ("fsdp2, background", 3, 6),
                ("fsdp2, one file", 4, 12),
            )
        ),
    ],
)
def test_a_kill_while_a_checkpoint_is_written(
    kind: str,
    only_last: Sequence[bool],
    victim: int,
    numbers: Sequence[int],
    uninterrupted: Callable[[str], Result],
    tmp_path: Path,
) -> None:
    """Promise 6. Right before a chosen file operation of the fourth step: create, write, mark, rename, remove."""
    killed = []
    for last in only_last:
        before = len(killed)
        for number in numbers:
            run = Run(kind, tmp_path / f"{number}-{last}", only_last=last)
            if not run.killed(victim, partial(kill_at_file_event, run, 4, number)):
                break
            killed.append(run)
        more = isinstance(numbers, range)  # than there are operations
        assert len(killed) - before >= (1 if more else len(numbers)), "each operation was one to be killed at"
    go_on(killed, uninterrupted(kind))


def kill_itself(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["ddp", "model parallel", "fsdp2", "fsdp2, background", "fsdp2, 2-D", "pipeline"])
def test_a_kill_in_the_middle_of_a_window(kind: str, uninterrupted: Callable[[str], Result], tmp_path: Path) -> None:
    """Promise 6. The window is done again as a whole; its first micro-batches are not counted twice."""
    kills = at(kill_itself, "on_before_backward", rank=1, call=6)  # the second micro-batch of the third window
    run = Run(kind, tmp_path / "checkpoints", callbacks=lambda: [AtomicCheckpoints(), kills])
    assert run.killed(1, lambda: None)
    go_on([Run(kind, run.folder)], uninterrupted(kind))


@pytest.mark.full
@pytest.mark.parametrize(("kind", "kills"), RANDOM_KILLS.items())
def test_kills_at_random_moments(kind: str, kills: int, uninterrupted: Callable[[str], Result], tmp_path: Path) -> None:
    """Promise 6. Thirty-six times over all kinds, from outside, at any instant of the run, start and end included.

    Each second one is killed again in its restart. One that was done before it could be killed makes room for another.
    """
    moments = random.Random(kind)
    died, runs = 0, []
    while died < kills and len(runs) < 3 * kills:
        run = Run(kind, tmp_path / str(len(runs)), only_last=bool(len(runs) % 4 // 2))
        victim = moments.randrange(run.num_ranks)
        for start in range(1 + len(runs) % 2):
            # None: while it starts; then ranks say that they have started, and each of its steps.
            lines = run.log.lines * start + moments.randint(0, (12 - 6 * start) * run.num_ranks)
            seconds = moments.uniform(0.0, 0.05 if lines else 0.5)
            died += run.killed(victim, partial(kill_after, run, lines, seconds))
            run.assert_little_is_lost()
        runs.append(run)
    assert died >= kills
    go_on(runs, uninterrupted(kind))


@pytest.mark.parametrize(
    ("kind", "tokens"),
    [("single", 100), *[pytest.param(kind, 200, marks=pytest.mark.full) for kind in ("ddp", "fsdp2")]],
)
def test_a_second_kill_in_the_epoch_after_a_restart_at_an_epochs_end(kind: str, tokens: int, tmp_path: Path) -> None:
    """Promise 6. Killed after the last batch of an epoch, and again after three batches of the next one."""
    for name in ("straight", "killed"):
        (tmp_path / name).mkdir()
    run = Run(kind, tmp_path / "killed" / "checkpoints", tokens=tokens)
    for before in (8, 4):
        kills = at(kill_itself, "on_train_batch_start", rank=0, call=before)
        killed = replace(run, callbacks=lambda kills=kills: [AtomicCheckpoints(), kills])
        assert killed.killed(0, lambda: None)
    go_on([run], replace(run, folder=tmp_path / "straight" / "checkpoints").to_the_end())


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:Detected an existing checkpoint")
def test_without_atomic_checkpoints_a_kill_breaks_the_last_one(
    uninterrupted: Callable[[str], Result], tmp_path: Path
) -> None:
    """The kills above do harm: the strategy alone writes a directory in place, over the checkpoint before it."""
    run = Run("model parallel", tmp_path / "checkpoints", only_last=True, callbacks=list)
    assert run.killed(0, partial(kill_at_file_event, run, 4, 5))
    with pytest.warns(UserWarning, match=r"skips .*last\.ckpt: it has no valid \.complete\.json"):
        assert latest_checkpoint(run.folder) is None
    by_hand = replace(run, ckpt_path=run.folder / "last.ckpt")
    assert (by_hand.folder / "last.ckpt" / "meta.pt").exists(), "it looks whole"
    with contextlib.suppress(RankError):
        assert not by_hand.to_the_end().equals(uninterrupted("model parallel"))


@pytest.mark.full
@pytest.mark.parametrize("kind", ["fsdp1, one file", "fsdp2"])
def test_a_kill_when_all_steps_so_far_were_skipped(kind: str, tmp_path: Path) -> None:
    """Promise 6, where the first steps overflow: the optimizer's state in the checkpoint is empty."""
    straight = Run(kind, tmp_path / "straight" / "checkpoints", init_scale=2.0**18)
    run = replace(straight, folder=tmp_path / "killed" / "checkpoints")
    for each in (straight, run):
        each.folder.parent.mkdir()
    assert run.killed(0, partial(kill_at_file_event, run, 2, 2))
    go_on([run], straight.to_the_end())


def ask_to_end(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["fsdp2", "fsdp2, background", "fsdp2, one file", "fsdp2, hybrid", "fsdp2, 2-D"])
def test_sigterm_saves_and_nothing_is_done_twice(
    kind: str, uninterrupted: Callable[[str], Result], tmp_path: Path
) -> None:
    """Promise 6. All ranks leave together at the end of the window after it, with a checkpoint.

    One rank gets the signal in the first micro-batch of the third window, or all of them, as torchrun sends it on.
    """
    runs = [Run(kind, tmp_path / name) for name in ("one", "all")]
    asked = [
        replace(
            run, callbacks=lambda rank=rank: [at(ask_to_end, "on_before_backward", rank=rank, call=5), StopAtBoundary()]
        )
        for rank, run in zip((0, None), runs, strict=True)
    ]
    for run, stopped in zip(runs, all_to_the_end(asked), strict=True):
        assert (run.folder / f"stopped-step-{stopped.steps}.ckpt").exists()
        assert 3 <= stopped.steps == run.saved_steps() == run.log.last_step < uninterrupted(kind).steps
    go_on(runs, uninterrupted(kind))
