"""A training script as a user starts it: ``killed_script.py FOLDER FAULT RANK KIND``, by torchrun or by Lightning."""

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

FAULTS = ("none", "kill", "hang", "term")


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
    folder, fault, faulty_rank, kind = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4]
    assert fault in FAULTS
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    with (folder / "pids.txt").open("a") as file:
        print(os.getpid(), file=file)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    watchdog = RankWatchdog(timeout_seconds=8 if fault == "hang" else 60)
    on_trial = [Fault(fault, faulty_rank), AtomicCheckpoints(), StopAtBoundary(), watchdog]
    result = Run(kind, folder / "checkpoints", callbacks=lambda: on_trial).train(rank)
    torch.save(result, folder / f"result-{rank}.pt")


if __name__ == "__main__":
    main()
