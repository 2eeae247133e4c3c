"""kill -9, SIGTERM and a hang in a real script under torchrun and under Lightning's own launcher; no orphan is left."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from killed_runs import KINDS, Result, Run
from killed_script import __file__ as SCRIPT

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]

#: Nothing waits for these times unless something is wrong; to import torch can take a minute beside other work.
END_SECONDS, ORPHAN_SECONDS = 400, 60

LAUNCHERS = {
    "lightning": [sys.executable],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone"],
}


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def start(launcher: str, kind: str, folder: Path, fault: str, rank: int = 0) -> subprocess.CompletedProcess[str]:
    """Runs the script to its end; every process it has started is gone soon after, or is ended here by its id."""
    (folder / "pids.txt").unlink(missing_ok=True)
    log, ranks = folder / f"{fault}.txt", KINDS[kind].ranks
    with log.open("w") as output:
        nproc = [f"--nproc-per-node={ranks}"] if launcher == "torchrun" else []
        command = [*LAUNCHERS[launcher], *nproc, str(SCRIPT), str(folder), fault, str(rank), kind]
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
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Result]:
    """What the script ends with when nothing happens to it, whichever launcher starts it."""

    @cache
    def result(kind: str) -> Result:
        folder = tmp_path_factory.mktemp("uninterrupted")
        done = start("lightning", kind, folder, "none")
        assert done.returncode == 0, done.stdout
        found: Result = torch.load(folder / "result-0.pt", weights_only=False)
        return found

    return result


@pytest.mark.parametrize(
    ("launcher", "kind", "fault", "rank"),
    [
        ("lightning", "ddp", "kill", 0),
        ("lightning", "fsdp2, tensor", "hang", 1),
        ("lightning", "fsdp2, tensor", "term", 0),
        ("torchrun", "fsdp2, tensor", "kill", 1),
        ("torchrun", "ddp", "hang", 0),
        ("torchrun", "fsdp2, hybrid", "term", 0),
    ],
)
def test_the_restarted_script_ends_as_if_nothing_had_happened(
    launcher: str, kind: str, fault: str, rank: int, uninterrupted: Callable[[str], Result], tmp_path: Path
) -> None:
    """Promise 6, D44."""
    run = Run(kind, tmp_path / "checkpoints")
    first = start(launcher, kind, tmp_path, fault, rank)
    assert not list(tmp_path.glob("result-*")) or fault == "term"
    assert run.log.last_step - 1 <= run.saved_steps() <= run.log.last_step
    if fault == "hang":
        assert f"rank {rank} of 2 (process " in first.stdout, first.stdout
        assert "last seen at on_train_batch_start of micro-batch 5 in epoch 0" in first.stdout, first.stdout
    if fault == "term":
        assert run.saved_steps() == run.log.last_step, "nothing is done twice"
        assert list(run.folder.glob("stopped-step-*.ckpt")), first.stdout
    # The script has ended well; torchrun tells that it was itself asked to end.
    assert (first.returncode == 0) is (fault == "term" and launcher == "lightning")

    second = start(launcher, kind, tmp_path, "none")
    assert second.returncode == 0, second.stdout
    for each in range(run.num_ranks):
        result: Result = torch.load(tmp_path / f"result-{each}.pt", weights_only=False)
        assert result.equals(uninterrupted(kind))
