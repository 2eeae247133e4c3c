"""Muon beside AdamW under each strategy: after 20 steps in fp32 the weights of one process, resumed ones too."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import fsdp2_runs as runs
import pytest
import torch
from gloo import run_same_ranks as run_ranks
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy
from pipelined_models import PipelinedGPT, fit, token_batches
from small_models import ResumableLoader, loader, quiet_trainer
from torch.optim import AdamW, Muon

from lightning_mp import (
    AutocastPrecision,
    JointOptimizer,
    LossScaler,
    MasterWeightsPrecision,
    PipelineParallelStrategy,
    matrices_and_rest,
)
from lightning_mp.training.optimizers import sharded_muon

STEPS = 20


class MuonAndAdamW(runs.Recorded):
    by_blocks = False

    def configure_optimizers(self) -> Any:
        matrices, rest = matrices_and_rest(self, split={"*.query_key_value": 3} if self.by_blocks else None)
        # Newton-Schulz amplifies the last bit of a gradient, in which sums over 4 ranks differ: to 2e-7 of a weight in
        # 20 steps at this rate, to 1.7e-6 at 0.02.
        return JointOptimizer([Muon(matrices, lr=0.005), AdamW(rest, lr=1e-3, eps=1e-3)], module=self)


def model(*, by_blocks: bool = False) -> MuonAndAdamW:
    torch.manual_seed(0)
    module = MuonAndAdamW(layers=2, heads=2, width=16, block_tokens=runs.TOKENS, vocab=runs.VOCABULARY)
    module.by_blocks = by_blocks
    return module


def train(
    rank: int = 0,
    devices: int = 1,
    strategy: Any = "auto",
    *,
    micro_batches: int = 1,
    steps: int = STEPS,
    plugin: Any = None,
    ckpt_path: Any = None,
    save_to: Any = None,
    callbacks: Sequence[Any] = (),
    by_blocks: bool = False,
) -> dict[str, torch.Tensor]:
    """``micro_batches`` on one process are what as many ranks see, so that gradients are equal to the last bit."""
    parts = getattr(strategy, "tensor_parallel_size", 1)
    if micro_batches > 1:
        split = [runs.batches(STEPS, index, micro_batches) for index in range(micro_batches)]
        rows = [batch for step in zip(*split, strict=True) for batch in step]
    else:
        rows = runs.batches(STEPS, rank // parts, devices // parts)
    module = model(by_blocks=by_blocks)
    trainer = quiet_trainer(
        devices=devices,
        strategy=strategy,
        plugins=[Precision() if plugin is None else plugin],
        callbacks=list(callbacks),
        accumulate_grad_batches=micro_batches,
        max_epochs=-1,
        max_steps=steps,
    )
    trainer.fit(module, ResumableLoader(rows), loader(rows[:1]), ckpt_path=ckpt_path)
    if save_to is not None:
        trainer.save_checkpoint(save_to)
    return runs.full_weights(module)


def ddp() -> DDPStrategy:
    return DDPStrategy(process_group_backend="gloo")


STRATEGIES = {
    "ddp": (2, ddp, 2),
    "fsdp2": (2, runs.fsdp2, 2),
    "fsdp2 over 4": (4, runs.fsdp2, 4),
    "copies of fsdp2": (4, lambda: runs.fsdp2(replicate_size=2), 4),
    "tensor parallel": (2, lambda: runs.fsdp2(tensor_parallel_size=2), 1),
    "fsdp2 and tensor parallel": (4, lambda: runs.fsdp2(tensor_parallel_size=2), 2),
}


def newton_schulz_in_float32(matrix: torch.Tensor, coefficients: Any, steps: int, eps: float) -> torch.Tensor:
    """torch's iteration without its bf16, in which one last bit of a gradient changes the third digit of the update."""
    a, b, c = coefficients
    x = matrix.float() / matrix.float().norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T if matrix.shape[0] <= matrix.shape[1] else x.T @ x
        gram = b * gram + c * gram @ gram
        x = a * x + (gram @ x if matrix.shape[0] <= matrix.shape[1] else x @ gram)
    return x


@contextmanager
def in_float32() -> Iterator[None]:
    with (
        patch.object(torch.optim._muon, "_zeropower_via_newtonschulz", newton_schulz_in_float32),
        patch.object(sharded_muon, "ITERATION_DTYPE", torch.float32),
    ):
        yield


@pytest.mark.full
@pytest.mark.parametrize("by_blocks", [False, True], ids=["", "by blocks"])
@pytest.mark.parametrize("name", STRATEGIES)
def test_each_strategy_trains_the_weights_of_one_process(name: str, by_blocks: bool) -> None:
    devices, strategy, data_ranks = STRATEGIES[name]
    before = model().state_dict()

    def on_rank(rank: int) -> dict[str, torch.Tensor]:
        with in_float32():
            return train(rank, devices, strategy(), by_blocks=by_blocks)

    with in_float32():
        alone = train(micro_batches=data_ranks, by_blocks=by_blocks)
    assert not any(torch.equal(alone[name], before[name]) for name in alone)
    for weights in run_ranks(on_rank, devices):
        torch.testing.assert_close(weights, alone, rtol=0, atol=1e-6)


@pytest.mark.full
@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_two_ranks_train_the_weights_of_one_process_with_torchs_iteration(name: str) -> None:
    """The sum of two gradients has one order, so that nothing rounds otherwise in bf16."""
    alone = train(micro_batches=2)
    for weights in run_ranks(lambda rank: train(rank, 2, STRATEGIES[name][1]()), 2):
        torch.testing.assert_close(weights, alone, rtol=0, atol=1e-6)


class PipelinedMuon(PipelinedGPT):
    def configure_optimizers(self) -> Any:
        matrices, rest = matrices_and_rest(self)
        return JointOptimizer([Muon(matrices, lr=0.02), AdamW(rest, lr=1e-3, eps=1e-3)], module=self)


@pytest.mark.full
def test_pipeline_stages_train_their_part_of_both_optimizers() -> None:
    """A stage may hold no parameter of one of them."""

    def on_rank(devices: int, strategy: Any) -> list[float]:
        module = PipelinedMuon()
        with in_float32():
            fit(module, strategy, devices, train=token_batches(32, 4))
        return module.train_losses

    [alone] = run_ranks(lambda _: on_rank(1, "ddp"), 1)
    for losses in run_ranks(lambda _: on_rank(2, PipelineParallelStrategy()), 2):
        assert losses == pytest.approx(alone, rel=2e-6)
    assert alone[-1] < alone[0]


PLUGINS: dict[str, Any] = {
    "fp16": lambda: AutocastPrecision("16-mixed", scaler=LossScaler(init_scale=1024.0, growth_interval=2)),
    "fp32 masters": lambda: MasterWeightsPrecision("bf16-true"),
    "remainder": lambda: MasterWeightsPrecision("bf16-true", storage="remainder"),
}


@pytest.mark.full
@pytest.mark.parametrize(("strategy", "ranks"), [("ddp", 2), ("fsdp2", 2), ("fsdp2 and tensor parallel", 4)])
def test_a_resumed_run_is_the_uninterrupted_one(strategy: str, ranks: int, tmp_path: Path) -> None:
    make = STRATEGIES[strategy][1]

    def on_rank(rank: int) -> dict[str, tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]]:
        found = {}
        for name, plugin in PLUGINS.items():
            straight = train(rank, ranks, make(), plugin=plugin(), steps=6)
            train(rank, ranks, make(), plugin=plugin(), steps=3, save_to=tmp_path / name)
            found[name] = straight, train(rank, ranks, make(), plugin=plugin(), steps=6, ckpt_path=tmp_path / name)
        return found

    for of_rank in run_ranks(on_rank, ranks):
        for precision, (straight, resumed) in of_rank.items():
            assert all(torch.equal(straight[name], resumed[name]) for name in straight), precision


@pytest.mark.full
def test_a_sharded_run_resumes_on_another_number_of_ranks(tmp_path: Path) -> None:
    """Momentum buffers and moments are cut anew; the second half sees the same rows in each step."""
    path = tmp_path / "half.ckpt"

    def on_rank(rank: int, ranks: int, **arguments: Any) -> dict[str, torch.Tensor]:
        with in_float32():
            return train(rank, ranks, runs.fsdp2(), **arguments)

    with in_float32():
        straight = train(micro_batches=2)
    run_ranks(lambda rank: on_rank(rank, 2, steps=STEPS // 2, save_to=path), 2)
    for weights in run_ranks(lambda rank: on_rank(rank, 4, ckpt_path=path), 4):
        torch.testing.assert_close(weights, straight, rtol=0, atol=1e-6)


def groups_of_one(module: Any) -> Any:
    matrices, rest = matrices_and_rest(module)
    return AdamW([{"params": matrices, "lr": 1e-3}, {"params": rest, "lr": 1e-2}])


def two_of_its_kind(module: Any) -> Any:
    matrices, rest = matrices_and_rest(module)
    return JointOptimizer([AdamW(matrices, lr=1e-3), AdamW(rest, lr=1e-2)], module=module)


@pytest.mark.full
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_one_optimizer_with_the_same_groups_resumes_as_a_joint_one_of_its_kind_only(
    strategy: str, tmp_path: Path
) -> None:
    """Muon in its place would start from nothing: it is refused."""
    path = tmp_path / "half.ckpt"

    def on_rank(rank: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], str]:
        def run(configure: Any, **arguments: Any) -> dict[str, torch.Tensor]:
            with patch.object(MuonAndAdamW, "configure_optimizers", configure):
                return train(rank, 2, STRATEGIES[strategy][1](), **arguments)

        straight = run(groups_of_one, steps=6)
        run(groups_of_one, steps=3, save_to=path)
        joint = run(two_of_its_kind, steps=6, ckpt_path=path)
        with pytest.raises(ValueError, match="Resume with the optimizers that saved it") as refused:
            run(configure_muon, steps=6, ckpt_path=path)
        return straight, joint, str(refused.value)

    configure_muon = MuonAndAdamW.configure_optimizers
    said = {
        "ddp": "JointOptimizer: the checkpoint's groups for Muon lack adjust_lr_fn, momentum, nesterov",
        "fsdp2": "exp_avg, exp_avg_sq, step, and JointOptimizer keeps momentum_buffer",
    }
    for straight, joint, message in run_ranks(on_rank, 2):
        assert all(torch.equal(straight[name], joint[name]) for name in straight)
        assert said[strategy] in message
