"""`pytest --accelerator`: which Trainers take the GPU, and what is compared within which tolerance."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from on_gpu import TOLERANCES, OnGpu, takes_the_gpu
from small_models import Regression, fit, quiet_trainer, regression_batches

from lightning_mp import AutocastPrecision


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"accelerator": "cpu"}, True),
        ({"accelerator": "cpu", "devices": 1, "strategy": "auto"}, True),
        ({"accelerator": "cpu", "devices": 2}, False),
        ({"accelerator": "cpu", "strategy": "ddp"}, False),
        ({"accelerator": "cpu", "strategy": DDPStrategy()}, False),
        ({"accelerator": "cpu", "num_nodes": 2}, False),
        ({"accelerator": "auto"}, False),
        ({}, False),
    ],
)
def test_trainers_that_ask_for_one_cpu_are_moved(arguments: dict[str, Any], expected: bool) -> None:
    assert takes_the_gpu(arguments) is expected


@pytest.mark.parametrize("moves", [True, False])
def test_the_constructor_is_given_the_gpu_and_nothing_is_left_afterwards(
    moves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Any, Any]] = []
    real = pl.Trainer.__init__

    def fake(trainer: pl.Trainer, *args: Any, **arguments: Any) -> None:
        asked.append((arguments["accelerator"], arguments["devices"]))
        real(trainer, *args, **arguments | {"accelerator": "cpu"})

    monkeypatch.setattr(pl.Trainer, "__init__", fake)
    before = (pl.Trainer.__init__, torch.equal, torch.testing.assert_close)
    on_gpu = OnGpu(moves)
    with on_gpu.in_force():
        for number, plugin in enumerate(("bf16-mixed", "16-mixed")):
            on_gpu.begin(f"test {number}")
            fit(Regression(), regression_batches(1), plugin=AutocastPrecision(plugin))  # type: ignore[arg-type]
        assert on_gpu.tolerance == (TOLERANCES["fp16"] if moves else 0.0)
        quiet_trainer(devices=2)
    assert asked == [("gpu" if moves else "cpu", 1)] * 2 + [("cpu", 2)]
    assert on_gpu.trainers == {"test 0": 1, "test 1": 1}
    assert (pl.Trainer.__init__, torch.equal, torch.testing.assert_close) == before


def test_comparisons_have_a_tolerance_in_tests_that_moved_a_trainer() -> None:
    one = torch.tensor([1.0, -2.0, torch.inf])
    near, far = one * (1 + 5e-4), one * (1 + 5e-3)
    on_gpu = OnGpu(moves=True)
    with on_gpu.in_force():
        on_gpu.begin("moves nothing")
        assert not torch.equal(one, near)
        on_gpu.begin("moves a Trainer of 32 bit")
        on_gpu.formats.add("fp32")
        assert torch.equal(one, near)
        torch.testing.assert_close(near, one, rtol=0, atol=0)
        assert not torch.equal(one, far)
        with pytest.raises(AssertionError):
            torch.testing.assert_close(far, one, rtol=0, atol=0)
        assert not torch.equal(one, torch.tensor([1.0, -2.0, -torch.inf]))
        assert not torch.equal(one, torch.tensor([1.0, -2.0]))
        assert not torch.equal(one, one.double())
        assert not torch.equal(torch.tensor([1000]), torch.tensor([1001]))
        on_gpu.formats.add("bf16")
        assert torch.equal(one, far)
