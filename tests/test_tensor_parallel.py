"""Plugin and callbacks under tensor parallelism, plain parameters beside DTensors, two real processes."""

from typing import Any

import pytest
import torch
from gloo import run_ranks
from lightning.pytorch.strategies import ModelParallelStrategy
from small_models import TokenModel, loader, quiet_trainer, sgd, token_batches, weights
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from lightning_mp import AccumulationScheduler, AutocastPrecision, ChinchillaBudget, LossScaler, OverflowMonitor

COUNTS = [6, 3, 11, 8, 2, 9, 7]


class Parallel(TokenModel):
    """The head is cut by columns; the embedding stays a plain tensor on both ranks."""

    def configure_model(self) -> None:
        if not isinstance(self.head.weight, DTensor):
            plan = ColwiseParallel(output_layouts=Replicate())
            parallelize_module(self.head, self.device_mesh["tensor_parallel"], plan)


def train(module: TokenModel, **arguments: Any) -> Any:
    monitor, budget = OverflowMonitor(), ChinchillaBudget(tokens=70)
    trainer = quiet_trainer(
        plugins=[AutocastPrecision("16-mixed", scaler=LossScaler(init_scale=1024.0))],
        callbacks=[monitor, budget, AccumulationScheduler({0: 2})],
        gradient_clip_val=0.05,
        max_epochs=-1,
        **arguments,
    )
    trainer.fit(module, loader(token_batches(COUNTS)))
    full = [p.full_tensor() if isinstance(p, DTensor) else p for p in weights(module)]
    return full, monitor.grad_norm, module.trained_tokens, budget.tokens_seen, trainer.global_step


def test_it_equals_one_process_and_counts_shared_data_once() -> None:
    """D03, D20: mixed tensor kinds, one norm; both ranks see the same tokens."""

    def parallel(rank: int) -> Any:
        strategy = ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=2, process_group_backend="gloo")
        return train(Parallel(sgd), devices=2, strategy=strategy)

    expected, norm, *totals = train(TokenModel(sgd))
    assert totals[:2] == [70, 70]
    for ours, our_norm, *our_totals in run_ranks(parallel, 2):
        assert our_totals == totals
        assert our_norm == pytest.approx(norm, rel=1e-5)
        for a, b in zip(ours, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
