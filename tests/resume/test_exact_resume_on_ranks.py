"""Promise 6: killed at random moments, on one device, DDP and FSDP2, a run ends as if nothing had happened."""

import itertools
import os
import random
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from exact_runs import LOADERS, SAMPLES, Dropped, Memory
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
from lightning_mp.__main__ import main
from lightning_mp.checkpoints import latest_checkpoint
from lightning_mp.training.resume.records import first_parting, read_records

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


pytestmark = [pytest.mark.full, pytest.mark.timeout(0), pytest.mark.filterwarnings("ignore")]

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
    loader, strategy, precision = ([*of][number % len(of)] for of in (KILLED_LOADERS, STRATEGIES, PRECISIONS))
    assert kills_of((loader, strategy, precision), 2, tmp_path / "runs", number)[0] == 2


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
