"""Runs of :mod:`exact_runs` on one or two ranks that are killed by SIGKILL at random moments and started again."""

import os
import random
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from exact_runs import LOADERS, Dropped, Memory
from gloo import RankError, run_ranks
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from small_models import at, quiet_trainer
from torch.distributed.tensor import DTensor

from lightning_mp import (
    AtomicCheckpoints,
    AutocastPrecision,
    ExactResume,
    FSDP2Strategy,
    LossScaler,
    MasterWeightsPrecision,
)
from lightning_mp.checkpoints import latest_checkpoint

STRATEGIES: dict[str, tuple[Callable[[], Any], int]] = {
    "one device": (lambda: "auto", 1),
    "ddp": (lambda: "ddp", 2),
    "fsdp2": (lambda: FSDP2Strategy(process_group_backend="gloo"), 2),
    "fsdp2, background": (lambda: FSDP2Strategy(process_group_backend="gloo", async_checkpoints=True), 2),
}
PRECISIONS: dict[str, Callable[[], Any]] = {
    "fp16": lambda: AutocastPrecision("16-mixed", scaler=LossScaler(init_scale=2.0**24, growth_interval=4)),
    "remainder": lambda: MasterWeightsPrecision("bf16-true", storage="remainder"),
    "24bit": lambda: MasterWeightsPrecision("bf16-true", storage="24bit"),
    "fp32 weights": lambda: MasterWeightsPrecision("16-true", scaler=LossScaler(init_scale=2.0**24, growth_interval=4)),
}
KILLED_LOADERS = ("shuffle", "generator", "workers", "workers that persist")
EPOCHS = 4


def train(rank: int, *, folder: Path, loader: str, strategy: str, precision: str, kill: Callback | None) -> Any:
    """All of a run, from its latest checkpoint, with one of each step."""
    make, ranks = STRATEGIES[strategy]
    torch.set_num_threads(1)
    path = latest_checkpoint(folder)
    pl.seed_everything(0 if path is None else 11, verbose=False)
    memory = Memory()
    trainer = quiet_trainer(
        devices=ranks,
        strategy=make(),
        plugins=[PRECISIONS[precision]()],
        callbacks=[
            ExactResume(record=folder.with_suffix(".jsonl")),
            AtomicCheckpoints(),
            ModelCheckpoint(folder, every_n_train_steps=1, save_last=True, save_top_k=0),
            *([kill] if kill is not None and rank == ranks - 1 else []),
        ],
        enable_checkpointing=True,
        logger=memory,
        log_every_n_steps=1,
        max_epochs=EPOCHS,
        use_distributed_sampler=True,
    )
    module = Dropped()
    trainer.fit(module, LOADERS[loader](), ckpt_path=path)
    weights = [w.full_tensor() if isinstance(w, DTensor) else w.detach() for w in module.parameters()]
    epochs = {
        key: value for key, value in memory.logged.items() if key[1] in ("loss_epoch", "largest", "mean", "score")
    }
    last = max(step for step, _ in epochs)
    return [w.clone() for w in weights], {k: v for k, v in epochs.items() if k[0] == last}, module.steps


def killed_and_resumed(folder: Path, choose: random.Random, kills: int, **kind: str) -> tuple[Any, int]:
    """What the last run ends with, and how many kills came before its end."""
    ranks = STRATEGIES[kind["strategy"]][1]
    done = 0
    for _ in range(kills):
        delay_seconds = choose.random() * 0.03
        kill = at(
            lambda *_, seconds=delay_seconds: threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start(),
            "on_train_batch_start",
            call=choose.randint(1, 3),
        )
        try:
            run_ranks(lambda rank, kill=kill: train(rank, folder=folder, kill=kill, **kind), ranks, 90)
        except RankError as error:
            if "was ended by SIGKILL" not in str(error):
                raise
            done += 1
        else:
            break
    return run_ranks(lambda rank: train(rank, folder=folder, kill=None, **kind), ranks, 90), done
