"""Real processes under DDP: the same decision and the same weights on every rank, the exact mean over all of them."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo import run_ranks
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy
from small_models import (
    Regression,
    TokenModel,
    adamw,
    at,
    fused_adamw,
    loader,
    plant_inf,
    quiet_trainer,
    token_batches,
    weights,
)

from lightning_mp import AccumulationScheduler, AutocastPrecision, ChinchillaBudget, LossScaler, OverflowMonitor

COUNTS = {0: [6, 3, 11, 8, 2, 9, 7], 1: [4, 10, 2, 5, 12, 3, 6]}


def ddp_trainer(world_size: int = 2, **arguments: Any) -> Any:
    return quiet_trainer(devices=world_size, strategy=DDPStrategy(process_group_backend="gloo"), **arguments)


def plugin(precision: str) -> list[Any]:
    if precision == "fp32":
        return []
    if precision == "bf16-mixed":
        return [AutocastPrecision("bf16-mixed")]
    return [AutocastPrecision("16-mixed", scaler=LossScaler(init_scale=1024.0))]


class CountReductions(Callback):
    """Bucket all-reduces that DDP makes in each window, through its public communication hook."""

    def __init__(self) -> None:
        self.per_window: list[int] = []
        self.current = 0
        self.buckets = 0

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

        # torch checks these annotations.
        def counting(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
            self.current += 1
            self.buckets = max(self.buckets, bucket.index() + 1)
            return allreduce_hook(state, bucket)

        trainer.model.register_comm_hook(None, counting)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.per_window.append(self.current)
        self.current = 0


@pytest.mark.parametrize("optimizer", [adamw, fused_adamw], ids=["unfused", "fused"])
@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed", "16-mixed"])
def test_the_mean_is_over_all_ranks_with_one_reduction_per_window(precision: str, optimizer: Any) -> None:
    """Promise 4: ragged token counts on two ranks equal one process that sees all tokens of a window."""

    def train(rank: int) -> tuple[list[torch.Tensor], list[int], int]:
        module = TokenModel(optimizer)
        counter = CountReductions()
        trainer = ddp_trainer(plugins=plugin(precision), callbacks=[counter, AccumulationScheduler({0: 3})])
        trainer.fit(module, loader(token_batches(COUNTS[rank])))
        return weights(module), counter.per_window, counter.buckets

    results = run_ranks(train, 2)
    (first, reductions, buckets), (second, _, _) = results
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert reductions == [buckets] * 3

    reference = TokenModel(adamw)
    optimizer_ = reference.make_optimizer(reference.parameters())
    batches = {rank: token_batches(counts) for rank, counts in COUNTS.items()}
    for window in ([0, 1, 2], [3, 4, 5], [6]):
        optimizer_.zero_grad()
        total = sum(COUNTS[rank][i] for rank in COUNTS for i in window)
        for rank, counts in COUNTS.items():
            for i in window:
                (reference.training_step(batches[rank][i], i) * counts[i] / total).backward()
        optimizer_.step()
    tolerance = 1e-5 if precision == "fp32" else 2e-2
    torch.testing.assert_close(first, weights(reference), rtol=0, atol=tolerance)


def test_an_overflow_in_one_ranks_own_gradients_skips_on_all() -> None:
    """Where DDP does not spread the inf itself: it is planted after the reduction, on rank 1 only."""

    def train(rank: int) -> Any:
        module = Regression(fused_adamw)
        monitor = OverflowMonitor()
        trainer = ddp_trainer(
            plugins=plugin("16-mixed"), callbacks=[monitor, at(plant_inf(), "on_after_backward", rank=1, step=1)]
        )
        batches = [[torch.randn(4, 8), torch.randn(4, 1)] for _ in range(4)]
        trainer.fit(module, loader(batches))
        return weights(module), monitor.skipped_steps, trainer.precision_plugin.scaler.get_scale()

    (first, *totals), (second, *other_totals) = run_ranks(train, 2)
    assert totals == other_totals == [1, 512.0]
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("tokens", [23, 50, 51, 77, 131])
def test_a_budget_lands_exactly_over_all_ranks(tokens: int) -> None:
    def train(rank: int) -> Any:
        module, budget = TokenModel(fused_adamw), ChinchillaBudget(tokens=tokens)
        trainer = ddp_trainer(
            plugins=plugin("16-mixed"), callbacks=[budget, AccumulationScheduler({0: 2})], max_epochs=-1
        )
        trainer.fit(module, loader(token_batches(COUNTS[rank])))
        return module.trained_tokens, budget.tokens_seen, trainer.global_step

    (mine, seen, steps), (other, other_seen, other_steps) = run_ranks(train, 2)
    assert mine + other == seen == other_seen == tokens
    assert steps == other_steps
