"""kill -9, SIGTERM and a hang in a real script under torchrun and under Lightning's own launcher; no orphan is left.

To start Python is what takes long. So each job first restarts the run of the job before it, in the same processes, and
then meets its own fault. The launchers' faults are on two ranks; what is done with more of them after a kill or a
SIGTERM is in test_faults_kill.py, where ranks are forked.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from killed_runs import KINDS, Result, Run, uninterrupted
from killed_script import __file__ as SCRIPT
from started_python import plain_environment

__all__ = ["uninterrupted"]

pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(900),
    # torch warns of in-place operations on a sharded layer's output; there are none here.
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor"),
    # The last run is restarted here.
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
]

#: Nothing waits for these times unless something is wrong; to import torch can take a minute beside other work.
END_SECONDS, ORPHAN_SECONDS = 400, 60

LAUNCHERS = {"lightning": [sys.executable], "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone"]}


class Case(NamedTuple):
    launcher: str
    kind: str
    fault: str
    rank: int


#: In this order; the next job restarts the run. So all but one of them go on under the launcher that they ended under.
#: To torchrun a hang is a rank that ends by itself, which is what is left of a job after a kill.
CASES = [
    Case("lightning", "ddp", "kill", 0),
    Case("lightning", "fsdp2, tensor", "hang", 1),
    Case("lightning", "fsdp2, tensor", "term", 0),
    Case("torchrun", "fsdp2, tensor", "kill", 1),
    Case("torchrun", "fsdp2", "term", 0),
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


def start(case: Case, kinds_and_folders: Sequence[tuple[str, Path]]) -> subprocess.CompletedProcess[str]:
    """Runs the script to its end; every process it has started is gone soon after, or is ended here by its id."""
    *_, (_, folder) = kinds_and_folders
    log, ranks = folder / "output.txt", KINDS[case.kind].ranks
    with log.open("w") as output:
        nproc = [f"--nproc-per-node={ranks}"] if case.launcher == "torchrun" else []
        command = [*LAUNCHERS[case.launcher], *nproc, str(SCRIPT), case.fault, str(case.rank)]
        command += [str(word) for pair in kinds_and_folders for word in pair]
        code = subprocess.run(
            command, stdout=output, stderr=output, timeout=END_SECONDS, cwd=folder, env=plain_environment(), check=False
        ).returncode
    pids = [int(pid) for pid in (folder / "pids.txt").read_text().split()]
    assert len(pids) == ranks, log.read_text()
    deadline = time.monotonic() + ORPHAN_SECONDS
    while any(map(runs, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    orphans = [pid for pid in pids if runs(pid)]
    for pid in orphans:
        os.kill(pid, 9)
    assert not orphans, log.read_text()
    return subprocess.CompletedProcess(command, code, log.read_text())


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[Case, Ended]:
    """All cases, one after the other; each job restarts the run before its own."""
    found: dict[Case, Ended] = {}
    before: list[tuple[str, Path]] = []
    for case in CASES:
        own = (case.kind, tmp_path_factory.mktemp(case.fault))
        done = start(case, [*before, own])
        run = Run(case.kind, own[1] / "checkpoints")
        results = sorted(own[1].glob("result-*"))
        for path in results:  # those that are looked at are the restart's
            path.unlink()
        stopped = sorted(run.folder.glob("stopped-step-*.ckpt"))
        found[case] = Ended(run, done.returncode, done.stdout, run.log.last_step, run.saved_steps(), stopped, results)
        before = [own]
    return found


@each_case
def test_every_rank_ends_and_leaves_a_checkpoint(case: Case, ended: dict[Case, Ended]) -> None:
    """Promise 6, D44."""
    first = ended[case]
    assert first.last_step >= 2, first.output
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


@pytest.mark.parametrize(
    ("case", "after"), [pytest.param(*two, id="-".join(map(str, two[0]))) for two in pairwise(CASES)]
)
def test_the_restarted_script_ends_as_if_nothing_had_happened(
    case: Case, after: Case, ended: dict[Case, Ended], uninterrupted: Callable[[str], Result]
) -> None:
    """Promise 6. The same bits as a run that was not started by a launcher."""
    run = ended[case].run
    for rank in range(run.num_ranks):
        path = run.folder.parent / f"result-{rank}.pt"
        assert path.exists(), ended[after].output
        result: Result = torch.load(path, weights_only=False)
        assert result.equals(uninterrupted(case.kind))


def test_the_run_of_the_last_script_goes_on_without_a_launcher(
    ended: dict[Case, Ended], uninterrupted: Callable[[str], Result]
) -> None:
    """Promise 6. The last job has none after it, so it is restarted in forked ranks."""
    assert ended[CASES[-1]].run.to_the_end().equals(uninterrupted(CASES[-1].kind))
