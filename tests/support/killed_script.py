"""A training script as a user starts it, by torchrun or by Lightning: ``killed_script.py FAULT RANK KIND FOLDER ...``.

With several kinds and folders the runs are made one after the other, and the last of them meets the fault. The others
are restarts, which begin with other weights, so that those of the checkpoint are seen to be used.
"""

import os
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from killed_runs import Run
from lightning.pytorch.callbacks import Callback

from lightning_mp import StopAtBoundary
from lightning_mp.callbacks.atomic_checkpoints import AtomicCheckpoints
from lightning_mp.callbacks.rank_watchdog import RankWatchdog

FAULTS = ("kill", "hang", "term")


class Fault(Callback):
    """In the second micro-batch of the third window, on one rank."""

    def __init__(self, fault: str, rank: int) -> None:
        self.fault, self.rank = fault, rank

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        if trainer.global_rank == self.rank and trainer.global_step == 2 and trainer.fit_loop.epoch_loop.batch_idx % 2:
            if self.fault == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            elif self.fault == "hang":
                time.sleep(300)
            elif self.fault == "term":
                # What a cluster's scheduler sends it to: torchrun, which sends it on, or the script it started.
                os.kill(os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else os.getpid(), signal.SIGTERM)
                time.sleep(1)


def main() -> None:
    fault, faulty_rank, *words = sys.argv[1], int(sys.argv[2]), *sys.argv[3:]
    assert fault in FAULTS
    runs = list(zip(words[::2], map(Path, words[1::2]), strict=True))
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    with open("pids.txt", "a") as file:
        print(os.getpid(), file=file)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for number, (kind, folder) in enumerate(runs, start=1):
        restarts = number < len(runs)
        torch.manual_seed(restarts)
        watchdog = RankWatchdog(timeout_seconds=8 if fault == "hang" and not restarts else 60)
        on_trial = [AtomicCheckpoints(), StopAtBoundary(), watchdog]
        if not restarts:
            on_trial.insert(0, Fault(fault, faulty_rank))
        result = Run(kind, folder / "checkpoints", callbacks=lambda on_trial=on_trial: on_trial).train(rank)
        torch.save(result, folder / f"result-{rank}.pt")


if __name__ == "__main__":
    main()
