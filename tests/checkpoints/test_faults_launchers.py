"""kill -9, SIGTERM and a hang in a real script under torchrun and under Lightning's own launcher; no orphan is left.

To start Python is what takes long, so what one launcher started on as many ranks is restarted by one script.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from killed_runs import KINDS, Result, Run, uninterrupted
from killed_script import __file__ as SCRIPT

__all__ = ["uninterrupted"]

pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(900),
    # torch warns of in-place operations on a sharded layer's output; there are none here.
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor"),
]

#: Nothing waits for these times unless something is wrong; to import torch can take a minute beside other work.
END_SECONDS, ORPHAN_SECONDS = 400, 60

LAUNCHERS = {
    "lightning": [sys.executable],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone"],
}


class Case(NamedTuple):
    launcher: str
    kind: str
    fault: str
    rank: int


CASES = [
    Case("lightning", "ddp", "kill", 0),
    Case("lightning", "fsdp2, tensor", "hang", 1),
    Case("lightning", "fsdp2, tensor", "term", 0),
    Case("torchrun", "fsdp2, tensor", "kill", 1),
    Case("torchrun", "ddp", "hang", 0),
    Case("torchrun", "fsdp2, hybrid", "term", 0),
]
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))


class Ended(NamedTuple):
    """A run after its fault, before it is restarted."""

    run: Run
    exit_code: int
    output: str
    last_step: int
    saved_steps: int
    stopped: list[Path]
    results: list[Path]


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def start(
    launcher: str, kinds_and_folders: Sequence[tuple[str, Path]], fault: str, rank: int = 0
) -> subprocess.CompletedProcess[str]:
    """Runs the script to its end; every process it has started is gone soon after, or is ended here by its id."""
    (kind, folder), *_ = kinds_and_folders
    (folder / "pids.txt").unlink(missing_ok=True)
    log, ranks = folder / f"{fault}.txt", KINDS[kind].ranks
    with log.open("w") as output:
        nproc = [f"--nproc-per-node={ranks}"] if launcher == "torchrun" else []
        command = [*LAUNCHERS[launcher], *nproc, str(SCRIPT), fault, str(rank)]
        command += [str(word) for pair in kinds_and_folders for word in pair]
        code = subprocess.run(
            command, stdout=output, stderr=output, timeout=END_SECONDS, cwd=folder, check=False
        ).returncode
    pids = [int(pid) for pid in (folder / "pids.txt").read_text().split()]
    assert len(pids) == ranks
    deadline = time.monotonic() + ORPHAN_SECONDS
    while any(map(runs, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    orphans = [pid for pid in pids if runs(pid)]
    for pid in orphans:
        os.kill(pid, 9)
    assert not orphans, log.read_text()
    return subprocess.CompletedProcess(command, code, log.read_text())


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case], Ended]:
    """Each case is started once; what its ranks have written as their results is taken away before the restart."""

    @cache
    def first(case: Case) -> Ended:
        folder = tmp_path_factory.mktemp(case.fault)
        done = start(case.launcher, [(case.kind, folder)], case.fault, case.rank)
        run = Run(case.kind, folder / "checkpoints")
        results = sorted(folder.glob("result-*"))
        for path in results:
            path.unlink()
        stopped = sorted(run.folder.glob("stopped-step-*.ckpt"))
        return Ended(run, done.returncode, done.stdout, run.log.last_step, run.saved_steps(), stopped, results)

    return first


@pytest.fixture(scope="module")
def restarted(ended: Callable[[Case], Ended]) -> Callable[[Case], Run]:
    @cache
    def together(launcher: str, ranks: int) -> None:
        cases = [case for case in CASES if (case.launcher, KINDS[case.kind].ranks) == (launcher, ranks)]
        done = start(launcher, [(case.kind, ended(case).run.folder.parent) for case in cases], "none")
        assert done.returncode == 0, done.stdout

    def run_of(case: Case) -> Run:
        together(case.launcher, KINDS[case.kind].ranks)
        return ended(case).run

    return run_of


@each_case
def test_every_rank_ends_and_leaves_a_checkpoint(case: Case, ended: Callable[[Case], Ended]) -> None:
    """Promise 6, D44."""
    first = ended(case)
    assert not first.results or case.fault == "term"
    assert first.last_step - 1 <= first.saved_steps <= first.last_step
    if case.fault == "hang":
        assert f"rank {case.rank} of 2 (process " in first.output, first.output
        assert "last seen at on_train_batch_start of micro-batch 5 in epoch 0" in first.output, first.output
    if case.fault == "term":
        assert first.saved_steps == first.last_step, "nothing is done twice"
        assert first.stopped, first.output
    # The script has ended well; torchrun tells that it was itself asked to end.
    assert (first.exit_code == 0) is (case.fault == "term" and case.launcher == "lightning")


@each_case
def test_the_restarted_script_ends_as_if_nothing_had_happened(
    case: Case, restarted: Callable[[Case], Run], uninterrupted: Callable[[str], Result]
) -> None:
    """Promise 6. The same bits as a run that was not started by a launcher."""
    run = restarted(case)
    for rank in range(run.num_ranks):
        result: Result = torch.load(run.folder.parent / f"result-{rank}.pt", weights_only=False)
        assert result.equals(uninterrupted(case.kind))
