"""The loops of other libraries train what the plain loop trains."""

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

import bench_gpu
from bench_cells import (
    CLIP,
    LEARNING_RATE,
    LossModel,
    Stopwatch,
    Train,
    TrainingRunner,
    train_plain,
    train_plain_masters,
)
from bench_peers import (
    float8_peers,
    masters_peers,
    mixed_peers,
    train_accelerate,
    train_fabric,
    train_torchao,
    train_with_masters_in_the_optimizer,
)

STEPS = 3


def trained(train: Train, precision: str = "bf16-mixed", accumulation: int = 1) -> list[Tensor]:
    """Weights after two segments: what a library leaves on a model must not change the next one."""
    workload = bench_gpu.make_workload(toy=True, batch_size=4)
    workload = replace(workload, accumulation=accumulation, settle_steps=1)
    runner = TrainingRunner(workload, precision, train)
    runner.warm_up()
    torch.manual_seed(0)
    runner.model = LossModel(workload.config)
    for _ in range(2):
        stopwatch = Stopwatch(workload, STEPS)
        runner.train(runner, stopwatch)
        assert stopwatch.seconds > 0
        assert len(stopwatch._spans) == STEPS
        runner.model.zero_grad()
        runner.model.float()
    return [p.detach().clone() for p in runner.model.parameters()]


def assert_alike(ours: list[Tensor], theirs: list[Tensor], tolerance: float) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance)


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("train", [train_accelerate, train_fabric])
def test_accelerate_and_fabric_train_as_the_plain_loop(train: Train, accumulation: int) -> None:
    plain = trained(train_plain(fused=True, clip=CLIP), accumulation=accumulation)
    for ours, theirs in zip(trained(train, accumulation=accumulation), plain, strict=True):
        assert torch.equal(ours, theirs)


def test_fp8_by_hand_is_near_bf16() -> None:
    """Adam moves a weight by about the learning rate per step, into one direction or the other."""
    pytest.importorskip("torchao")
    plain = trained(train_plain(fused=True, clip=CLIP))
    fp8 = trained(partial(train_torchao, "tensorwise"), "fp8-mixed")
    assert any(not torch.equal(one, other) for one, other in zip(plain, fp8, strict=True))
    assert_alike(fp8, plain, 2 * LEARNING_RATE * 2 * (STEPS + 1))


def test_an_optimizer_with_its_own_masters_is_stepped_with_clipped_16_bit_gradients() -> None:
    class Masters(torch.optim.AdamW):
        """fp32 masters by hand, in place of a library that needs a GPU."""

        def __init__(self, weights: list[torch.nn.Parameter]) -> None:
            super().__init__([torch.nn.Parameter(w.detach().float()) for w in weights], lr=3e-4, fused=True)
            self.weights = weights

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for master, weight in zip(self.param_groups[0]["params"], self.weights, strict=True):
                assert weight.grad is not None
                assert weight.grad.dtype == torch.bfloat16
                master.grad = weight.grad.float()
            super().step()
            with torch.no_grad():
                torch._foreach_copy_(self.weights, self.param_groups[0]["params"])

        def zero_grad(self, set_to_none: bool = True) -> None:
            for weight in self.weights:
                weight.grad = None

    ours = trained(partial(train_with_masters_in_the_optimizer, Masters), "bf16-true")
    assert_alike(ours, trained(train_plain_masters, "bf16-true"), 5e-3)


def test_a_library_that_is_missing_is_a_row_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench_peers.find_spec", lambda name: None)
    workload = bench_gpu.make_workload(toy=True, batch_size=4)
    cells = [*mixed_peers(workload, "bf16-mixed"), *masters_peers(workload), *float8_peers(workload)]
    assert {cell.error for cell in cells} == {
        f"{name} is not installed"
        for name in ("accelerate", "lightning", "transformer_engine", "flashoptim", "torchao")
    }
