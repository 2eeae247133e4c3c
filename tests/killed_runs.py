"""A training run that is killed and started again: the same command each time, from the latest checkpoint."""

import os
import select
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from gloo import RankError, run_ranks
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from small_models import ResumableLoader, TokenModel, adamw, quiet_trainer, token_batches, weights
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from lightning_mp import AccumulationScheduler, AutocastPrecision, ChinchillaBudget, LossScaler
from lightning_mp.callbacks.atomic_checkpoints import AtomicCheckpoints
from lightning_mp.faults.latest_checkpoint import latest_checkpoint

LENGTHS = {0: [6, 3, 11, 8, 2, 9, 7], 1: [4, 10, 2, 5, 12, 3, 6]}
TOKENS = 100
KINDS = {"single": 1, "ddp": 2, "fsdp2": 2}  # with their number of ranks
FILE_EVENTS = {"open", "os.mkdir", "os.remove", "os.rename", "os.rmdir"}


class Sharded(TokenModel):
    def configure_model(self) -> None:
        for layer in (self.head, self.embedding):
            if not isinstance(layer.weight, DTensor):
                fully_shard(layer, mesh=self.device_mesh["data_parallel"])


class StepLog(Callback):
    """Writes down each optimizer step before its checkpoint is written."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        with self.file.open("a") as log:
            print("start", file=log)

    @property
    def starts(self) -> int:
        """How many ranks have begun to train."""
        return self.file.read_text().split().count("start") if self.file.exists() else 0

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        with self.file.open("a") as log:
            print(trainer.global_step, file=log)

    @property
    def last_step(self) -> int:
        words = self.file.read_text().split() if self.file.exists() else []
        return max((int(word) for word in words if word != "start"), default=0)


@dataclass(frozen=True)
class Result:
    weights: list[Tensor]
    steps: int
    tokens: int
    scale: float

    def equals(self, other: "Result") -> bool:
        same = [torch.equal(a, b) for a, b in zip(self.weights, other.weights, strict=True)]
        return all(same) and (self.steps, self.tokens, self.scale) == (other.steps, other.tokens, other.scale)


@dataclass(frozen=True)
class Run:
    """fp16 with skipped steps, token-weighted windows of two and three micro-batches, a budget; saved after each step.

    Args:
        kind: a strategy.
        folder: where its checkpoints go.
        only_last: one checkpoint that is written anew each time; otherwise also one by step.
        callbacks: those that are on trial besides, made in each rank.
        ckpt_path: what to go on from, where it is not the latest checkpoint.
        init_scale: the third step overflows after it has grown; with 2^18 the first two do.
    """

    kind: str
    folder: Path
    only_last: bool = False
    callbacks: Callable[[], list[Callback]] = lambda: [AtomicCheckpoints()]
    ckpt_path: Path | None = None
    init_scale: float = 2.0**16

    @property
    def num_ranks(self) -> int:
        return KINDS[self.kind]

    @property
    def log(self) -> StepLog:
        return StepLog(self.folder.with_name(self.folder.name + "-steps.txt"))

    def train(self, rank: int) -> Result:
        strategies: dict[str, Any] = {
            "single": "auto",
            "ddp": "ddp",
            "fsdp2": ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1, process_group_backend="gloo"),
        }
        budget, scaler = (
            ChinchillaBudget(tokens=TOKENS, save=False),
            LossScaler(init_scale=self.init_scale, growth_interval=2),
        )
        top_k = 0 if self.only_last else 1
        checkpoint = ModelCheckpoint(self.folder, every_n_train_steps=1, save_top_k=top_k, save_last=True)
        callbacks = [self.log, budget, AccumulationScheduler({0: 2, 3: 3}), checkpoint, *self.callbacks()]
        trainer = quiet_trainer(
            devices=self.num_ranks,
            strategy=strategies[self.kind],
            plugins=[AutocastPrecision("16-mixed", scaler=scaler)],
            callbacks=callbacks,
            enable_checkpointing=True,
            max_epochs=-1,
            gradient_clip_val=0.5,
        )
        module = (Sharded if self.kind == "fsdp2" else TokenModel)(adamw)
        batches = ResumableLoader(token_batches(LENGTHS[rank]))
        trainer.fit(module, batches, ckpt_path=self.ckpt_path or latest_checkpoint(self.folder))
        whole = [w.full_tensor() if isinstance(w, DTensor) else w for w in weights(module)]
        return Result(whole, trainer.global_step, budget.tokens_seen, scaler.get_scale())

    def to_the_end(self, before: Callable[[int], None] = lambda rank: None) -> Result:
        def train(rank: int) -> Result:
            before(rank)
            return self.train(rank)

        results = run_ranks(train, self.num_ranks)
        assert all(result.equals(results[0]) for result in results)
        return results[0]

    def killed(self, victim: int, kill: Callable[[], None]) -> bool:
        """Whether it was killed before it was done.

        The others end by themselves, which is asserted. Before all have found each other they wait, and are ended.
        """

        def before(rank: int) -> None:
            if rank == victim:
                kill()

        try:
            self.to_the_end(before)
        except RankError as error:
            reports = str(error)
        else:
            return False
        assert f"Rank {victim} was ended by SIGKILL" in reports
        assert "still running" not in reports or self.log.starts < self.num_ranks, reports
        return True

    def saved_steps(self) -> int:
        """Optimizer steps in the checkpoint that a restart would use."""
        path = latest_checkpoint(self.folder)
        if path is None:
            return 0
        return int(torch.load(path / "meta.pt" if path.is_dir() else path, weights_only=False)["global_step"])


def kill_at_file_event(run: Run, step: int, number: int) -> None:
    """``kill -9`` of this process right before the so-many-th file operation of the checkpoints of a step."""
    count = 0

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal count
        if event in FILE_EVENTS and str(run.folder) + os.sep in str(arguments[0]) and run.log.last_step == step:
            count += 1
            if count == number:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def kill_after(seconds: float) -> None:
    """``kill -9`` of this process from outside, at any moment; the killer ends with it."""
    victim = os.pidfd_open(os.getpid())
    if os.fork() == 0:
        try:
            gone, *_ = select.select([victim], [], [], seconds)
            if not gone:
                signal.pidfd_send_signal(victim, signal.SIGKILL)
        finally:
            os._exit(0)


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Result]:
    """What a run that nobody kills ends with, by kind."""
    known: dict[str, Result] = {}

    def result(kind: str) -> Result:
        if kind not in known:
            known[kind] = Run(kind, tmp_path_factory.mktemp("uninterrupted") / "checkpoints").to_the_end()
        return known[kind]

    return result
