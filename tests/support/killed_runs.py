"""A training run that is killed and started again: the same command each time, from the latest checkpoint."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from cpu_fsdp import CpuFsdp
from gloo import RankError, run_ranks, run_same_ranks
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from small_models import ResumableLoader, ShardedTokenModel, TokenModel, adamw, quiet_trainer, token_batches, weights
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from lightning_mp import (
    AccumulationScheduler,
    AutocastPrecision,
    ChinchillaBudget,
    FSDP2Strategy,
    LossScaler,
    PipelineParallelStrategy,
)
from lightning_mp.callbacks.atomic_checkpoints import AtomicCheckpoints
from lightning_mp.pipelining import pipelined_loss
from lightning_mp.training.checkpoints.latest import latest_checkpoint

# Tokens of each micro-batch, by the data that a rank sees; the budget is two epochs of two of them.
LENGTHS = {0: [6, 3, 11, 8, 2, 9, 7], 1: [4, 10, 2, 5, 12, 3, 6], 2: [5, 7, 3, 9, 4, 8, 2], 3: [8, 2, 6, 4, 10, 5, 3]}
TOKENS = {1: 100, 2: 100, 4: 200}
VOCABULARY = 12  # two ranks can split it
PLAN = {"embedding": "vocabulary", "head": "column_gather"}


class Kind(NamedTuple):
    """A strategy, the number of its processes, how many of them see different data, and steps that a kill may lose."""

    make: Callable[[], Any]
    ranks: int = 2
    data_ranks: int = 2
    lost_steps: int = 1


def _fsdp1(state_dict_type: str) -> Kind:
    return Kind(lambda: CpuFsdp(auto_wrap_policy={nn.Embedding, nn.Linear}, state_dict_type=state_dict_type))


def _fsdp2(ranks: int = 2, data_ranks: int = 2, lost_steps: int = 1, **arguments: Any) -> Kind:
    units = ["embedding", "head"]
    return Kind(lambda: FSDP2Strategy(units, process_group_backend="gloo", **arguments), ranks, data_ranks, lost_steps)


KINDS = {
    "single": Kind(lambda: "auto", 1, 1),
    "ddp": Kind(lambda: "ddp"),
    "fsdp1": _fsdp1("sharded"),
    "fsdp1, one file": _fsdp1("full"),
    "model parallel": Kind(
        lambda: ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1, process_group_backend="gloo")
    ),
    "fsdp2": _fsdp2(),
    # the checkpoint of a step may still be written when the next one ends
    "fsdp2, background": _fsdp2(lost_steps=2, async_checkpoints=True),
    "fsdp2, one file": _fsdp2(save_distributed_checkpoint=False),
    "fsdp2, tensor": _fsdp2(data_ranks=1, tensor_parallel_size=2, tensor_parallel_plan=PLAN),
    "fsdp2, hybrid": _fsdp2(4, 4, replicate_size=2),
    "fsdp2, 2-D": _fsdp2(4, 2, tensor_parallel_size=2, tensor_parallel_plan=PLAN),
    "pipeline": Kind(lambda: PipelineParallelStrategy(microbatches=2), 2, 1),
}
# kept, since Python complains of one that is forgotten before it has ended
killers: list[subprocess.Popen[bytes]] = []
FILE_EVENTS = {"open", "os.mkdir", "os.remove", "os.rename", "os.rmdir"}


class SplitsItself(TokenModel):
    """As PipelineParallelStrategy wants it."""

    pipeline_layers = ("embedding", "head")

    def pipeline_loss(self, output: Tensor, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(output.flatten(0, 1).float(), batch[1].flatten())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return pipelined_loss(self, batch)


MODULES = {"model parallel": ShardedTokenModel, "pipeline": SplitsItself}


class StepLog(Callback):
    """Writes down each optimizer step before its checkpoint is written."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        with self.file.open("a") as log:
            print("start", file=log)

    @property
    def lines(self) -> int:
        """What all ranks have written down so far."""
        return self.file.read_text().count("\n") if self.file.exists() else 0

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
        kind: a strategy, see :data:`KINDS`.
        folder: where its checkpoints go.
        only_last: one checkpoint that is written anew each time; otherwise also one by step.
        callbacks: those that are on trial besides, made in each rank; AtomicCheckpoints, unless the strategy does
            without.
        ckpt_path: what to go on from, where it is not the latest checkpoint.
        tokens: its budget, where it is not that of :data:`TOKENS`.
        init_scale: the third step overflows after it has grown; with 2^18 the first two do.
    """

    kind: str
    folder: Path
    only_last: bool = False
    callbacks: Callable[[], list[Callback]] | None = None
    ckpt_path: Path | None = None
    tokens: int | None = None
    init_scale: float = 2.0**16

    @property
    def num_ranks(self) -> int:
        return KINDS[self.kind].ranks

    @property
    def log(self) -> StepLog:
        return StepLog(self.folder.with_name(self.folder.name + "-steps.txt"))

    def train(self, rank: int) -> Result:
        # What was written is there after a kill, on the disk or not; test_atomic_checkpoint.py looks at the order.
        os.fsync = lambda descriptor: None
        kind = KINDS[self.kind]
        budget = ChinchillaBudget(tokens=self.tokens or TOKENS[kind.data_ranks], save=False)
        scaler = LossScaler(init_scale=self.init_scale, growth_interval=2)
        top_k = 0 if self.only_last else 1
        checkpoint = ModelCheckpoint(self.folder, every_n_train_steps=1, save_top_k=top_k, save_last=True)
        on_trial = self.callbacks or (list if self.kind.startswith("fsdp2") else lambda: [AtomicCheckpoints()])
        callbacks = [self.log, budget, AccumulationScheduler({0: 2, 3: 3}, unit="step"), checkpoint, *on_trial()]
        trainer = quiet_trainer(
            devices=kind.ranks,
            strategy=kind.make(),
            plugins=[AutocastPrecision("16-mixed", scaler=scaler)],
            callbacks=callbacks,
            enable_checkpointing=True,
            max_epochs=-1,
            gradient_clip_val=0.5,
        )
        module = MODULES.get(self.kind, TokenModel)(adamw, vocabulary=VOCABULARY)
        batches = ResumableLoader(token_batches(LENGTHS[rank * kind.data_ranks // kind.ranks]))
        trainer.fit(module, batches, ckpt_path=self.ckpt_path or latest_checkpoint(self.folder))
        return Result(whole_weights(trainer, module), trainer.global_step, budget.tokens_seen, scaler.get_scale())

    def to_the_end(self, before: Callable[[int], None] | None = None) -> Result:
        return all_to_the_end([self], before)[0]

    def killed(self, victim: int, kill: Callable[[], None]) -> bool:
        """Whether it was killed before it was done.

        The others end by themselves, which is asserted. Before all have found each other they wait, and are ended.
        """
        begun = self.log.starts

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
        assert "still running" not in reports or self.log.starts < begun + self.num_ranks, reports
        return True

    def saved_steps(self) -> int:
        """Optimizer steps in the checkpoint that a restart would use."""
        path = latest_checkpoint(self.folder)
        if path is None:
            return 0
        return int(torch.load(path / "meta.pt" if path.is_dir() else path, weights_only=False)["global_step"])

    def assert_little_is_lost(self) -> None:
        """The latest checkpoint is one optimizer step behind the run at most, or two if written in the background."""
        done = self.log.last_step
        assert done - KINDS[self.kind].lost_steps <= self.saved_steps() <= done


def all_to_the_end(runs: Sequence[Run], before: Callable[[int], None] | None = None) -> list[Result]:
    """Runs of one kind, one after the other in the same processes: new ones would take twice as long.

    Those that ``before`` may end are new.
    """

    def train(rank: int) -> list[Result]:
        if before is not None:
            before(rank)
        return [run.train(rank) for run in runs]

    run_all = run_same_ranks if before is None else run_ranks
    first, *others = run_all(train, runs[0].num_ranks, 60 + 5 * len(runs))
    for other in others:
        assert all(result.equals(own) for result, own in zip(first, other, strict=True))
    return first


def whole_weights(trainer: Any, module: nn.Module) -> list[Tensor]:
    """Without shards; all ranks have to ask."""
    if isinstance(trainer.strategy, CpuFsdp):
        with FullyShardedDataParallel.summon_full_params(trainer.strategy.model):
            return weights(module)
    if isinstance(trainer.strategy, PipelineParallelStrategy):
        return trainer.strategy.broadcast(list(trainer.strategy.lightning_module_state_dict().values()))
    return [w.full_tensor() if isinstance(w, DTensor) else w for w in weights(module)]


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


KILLER = """
import select, signal, sys
victim, lines, seconds = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
log, gone = open(sys.argv[4], "ab+"), False
def written():
    log.seek(0)
    return log.read().count(b"\\n")
while not gone and written() < lines:
    gone = select.select([victim], [], [], 0.002)[0]
if not gone and not select.select([victim], [], [], seconds)[0]:
    signal.pidfd_send_signal(victim, signal.SIGKILL)
"""


def kill_after(run: Run, lines: int, seconds: float) -> None:
    """``kill -9`` of this process from outside, so long after the log has so many lines; the killer ends with it.

    By the log, since a moment by the clock is early in a run on a busy machine and after it on an idle one.
    """
    victim = os.pidfd_open(os.getpid())
    command = [sys.executable, "-I", "-S", "-c", KILLER, str(victim), str(lines), str(seconds), str(run.log.file)]
    killers.append(subprocess.Popen(command, pass_fds=[victim]))


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Result]:
    """What a run that nobody kills ends with, by kind."""
    known: dict[str, Result] = {}

    def result(kind: str) -> Result:
        if kind not in known:
            known[kind] = Run(kind, tmp_path_factory.mktemp("uninterrupted") / "checkpoints").to_the_end()
        return known[kind]

    return result
