"""Plugin and callbacks under Lightning's ModelParallelStrategy with FSDP2, two real processes."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from gloo import run_same_ranks as run_ranks
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from small_models import TokenModel, adamw, fused_adamw, loader, quiet_trainer, token_batches, weights
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from lightning_mp import (
    AccumulationScheduler,
    AutocastPrecision,
    ChinchillaBudget,
    FSDP2Strategy,
    LossScaler,
    OverflowMonitor,
)

# torch warns of in-place operations on a sharded layer's output; there are none here.
pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")

COUNTS = {0: [6, 3, 11, 8, 2, 9, 7], 1: [4, 10, 2, 5, 12, 3, 6]}


class Sharded(TokenModel):
    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]
        for layer in (self.head, self.embedding):
            if not isinstance(layer.weight, DTensor):
                fully_shard(layer, mesh=mesh)


def fsdp2() -> ModelParallelStrategy:
    return ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1, process_group_backend="gloo")


def full(module: TokenModel) -> list[torch.Tensor]:
    return [p.full_tensor() if isinstance(p, DTensor) else p for p in weights(module)]


def plugin() -> AutocastPrecision:
    return AutocastPrecision("16-mixed", scaler=LossScaler(init_scale=1024.0))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("optimizer", [adamw, fused_adamw], ids=["unfused", "fused"])
def test_it_equals_ddp(optimizer: Any) -> None:
    """D17, D19: fp16 with clipping by norm and token weights; a budget that ends in the middle of a window."""

    def train(rank: int, kind: str) -> Any:
        module = Sharded(optimizer) if kind == "fsdp2" else TokenModel(optimizer)
        strategy = fsdp2() if kind == "fsdp2" else DDPStrategy(process_group_backend="gloo")
        monitor, budget = OverflowMonitor(), ChinchillaBudget(tokens=70)
        trainer = quiet_trainer(
            devices=2,
            strategy=strategy,
            plugins=[plugin()],
            callbacks=[monitor, budget, AccumulationScheduler({0: 2})],
            gradient_clip_val=0.05,
            max_epochs=-1,
        )
        trainer.fit(module, loader(token_batches(COUNTS[rank])))
        return full(module), monitor.grad_norm, budget.tokens_seen, trainer.global_step

    (ours, norm, *totals), (other, other_norm, *_) = run_ranks(lambda rank: train(rank, "fsdp2"), 2)
    theirs, reference_norm, *reference_totals = run_ranks(lambda rank: train(rank, "ddp"), 2)[0]
    assert totals == reference_totals == [70, 3]
    assert norm == other_norm == pytest.approx(reference_norm, rel=1e-5)
    for a, b, c in zip(ours, other, theirs, strict=True):
        assert torch.equal(a, b)
        torch.testing.assert_close(a, c, rtol=1e-4, atol=1e-5)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("optimizer", [adamw, fused_adamw], ids=["unfused", "fused"])
def test_an_overflow_in_one_shard_skips_on_all_ranks(optimizer: Any) -> None:
    class Plant(Callback):
        def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
            if trainer.global_rank == 1 and trainer.global_step == 1:
                pl_module.head.weight.grad.to_local()[0, 0] = torch.inf

    def train(rank: int) -> Any:
        module, monitor = Sharded(optimizer), OverflowMonitor()
        trainer = quiet_trainer(devices=2, strategy=fsdp2(), plugins=[plugin()], callbacks=[monitor, Plant()])
        trainer.fit(module, loader(token_batches(COUNTS[rank][:4])))
        return full(module), monitor.skipped_steps, trainer.precision_plugin.scaler.get_scale()

    (first, *decision), (second, *other_decision) = run_ranks(train, 2)
    assert decision == other_decision == [1, 512.0]
    assert all(torch.isfinite(a).all() and torch.equal(a, b) for a, b in zip(first, second, strict=True))


class LateLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.always, self.late = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, late: bool) -> torch.Tensor:
        hidden: torch.Tensor = self.always(x)
        return self.late(hidden) if late else hidden


class UsedLate(pl.LightningModule):
    """Half of each block takes part in every second micro-batch only."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(LateLayer() for _ in range(2))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        for block in self.blocks:
            batch = block(batch, late=batch_idx % 2 == 1)
        return batch.float().square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.full
def test_a_layer_first_used_in_the_last_micro_batch_of_a_window_trains() -> None:
    """D54: torch's assertion otherwise, for a gradient in 16 bit beside others in fp32."""

    def train(rank: int, strategy: Any) -> list[torch.Tensor]:
        module = UsedLate()
        trainer = quiet_trainer(
            devices=2,
            strategy=strategy(),
            plugins=[AutocastPrecision("bf16-mixed")],
            callbacks=[AccumulationScheduler({0: 2})],
            max_steps=3,
        )
        data = torch.randn(12, 4, 8, generator=torch.Generator().manual_seed(rank))
        trainer.fit(module, loader(list(data)))
        return [p.full_tensor() if isinstance(p, DTensor) else p for p in weights(module)]

    sharded = run_ranks(lambda rank: train(rank, lambda: FSDP2Strategy(shard={LateLayer})), 2)
    copied = run_ranks(lambda rank: train(rank, lambda: DDPStrategy(find_unused_parameters=True)), 2)
    for ours, wanted in zip(sharded[0], copied[0], strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-2, atol=1e-4)
