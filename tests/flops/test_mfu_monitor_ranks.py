"""MFUMonitor on two real processes: tokens once, operations and peaks of all."""

from typing import Any

import pytest
import torch
from cpu_fsdp import CpuFsdp
from gloo import run_ranks
from lightning.pytorch.strategies import ModelParallelStrategy
from small_models import TokenModel, fit, shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from lightning_mp.callbacks.mfu_monitor import MFUMonitor
from lightning_mp.ground.flops.model_shape import module_flops_per_token

# torch warns of in-place operations on a sharded layer's output; there are none here.
pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")

FLOPS_PER_TOKEN = 6 * 8 * 11  # the head alone multiplies
PEAK = 1e6


class Ticking(TokenModel):
    """Every training step takes two seconds of a clock of its own."""

    now = 0.0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.now += 2.0
        return super().training_step(batch, batch_idx)


class Sharded(Ticking):
    def configure_model(self) -> None:
        shard(self, self.embedding, self.head)


class Parallel(Ticking):
    def configure_model(self) -> None:
        if not isinstance(self.head.weight, DTensor):
            plan = ColwiseParallel(output_layouts=Replicate())
            parallelize_module(self.head, self.device_mesh["tensor_parallel"], plan)


def batches(rows: list[int]) -> list[Any]:
    return [[torch.zeros(n, 5, dtype=torch.long), torch.ones(n, 5, dtype=torch.long)] for n in rows]


def measured(module: Ticking, rows: list[int], strategy: Any, **arguments: Any) -> Any:
    monitor = MFUMonitor(peak_flops=PEAK, **arguments)
    monitor._clock = lambda: module.now
    fit(module, batches(rows), monitor, devices=2, strategy=strategy)
    totals = monitor.throughput.totals
    work = monitor.throughput.work
    return monitor.total, totals.input_tokens, work.model_flops_per_token, work.peak_flops_per_second


STRATEGIES: dict[str, Any] = {
    "ddp": (Ticking, lambda: "ddp"),
    "fsdp1": (Ticking, CpuFsdp),
    "fsdp2": (Sharded, lambda: ModelParallelStrategy(2, 1, process_group_backend="gloo")),
}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", STRATEGIES)
def test_tokens_of_both_ranks_over_the_peak_of_both(name: str) -> None:
    """Ranks present 2 and 4 rows of 5 tokens at each of 4 steps; the first warms up."""

    def on_rank(rank: int) -> Any:
        make, strategy = STRATEGIES[name]
        return measured(make(), [2 + 2 * rank] * 4, strategy())

    for rates, input_tokens, flops, peak in run_ranks(on_rank, 2):
        assert input_tokens == 4 * 30
        assert rates.tokens_per_second == 3 * 30 / 6
        assert flops == FLOPS_PER_TOKEN
        assert peak == 2 * PEAK
        assert rates.mfu == rates.hfu == pytest.approx(FLOPS_PER_TOKEN * 15 / (2 * PEAK), rel=1e-12)
        assert rates.goodput == 1.0


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("given", ["exact", "6N"])
def test_tensor_parallel_ranks_share_tokens_and_work(given: str) -> None:
    """Both ranks see the same 10 tokens a step, and each does half of the head."""

    def on_rank(rank: int) -> Any:
        strategy = ModelParallelStrategy(1, 2, process_group_backend="gloo")
        return measured(Parallel(), [2] * 4, strategy, flops_per_token=given)

    for rates, input_tokens, flops, _ in run_ranks(on_rank, 2):
        assert input_tokens == 4 * 10
        assert rates.tokens_per_second == 10 / 2
        assert flops == FLOPS_PER_TOKEN
        assert rates.mfu == pytest.approx(FLOPS_PER_TOKEN * 5 / (2 * PEAK), rel=1e-12)


def test_conventions_count_the_whole_model_under_fsdp1() -> None:
    """Parameters are flat shards there."""

    def on_rank(rank: int) -> Any:
        return measured(Ticking(), [2] * 4, CpuFsdp(), flops_per_token="6N")

    expected = module_flops_per_token(Ticking(), "6N", 1)
    assert [flops for _, _, flops, _ in run_ranks(on_rank, 2)] == [expected] * 2
