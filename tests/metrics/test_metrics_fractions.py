"""UnderflowFraction against real casts and ``number_formats.fraction_lost``, on one process and two."""

import pytest
import torch
from gloo import process_group, run_ranks
from torch.distributed import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from lightning_mp.ground.core.bit_layouts import FORMATS
from lightning_mp.ground.core.number_formats import fraction_lost
from lightning_mp.metrics import OverflowRate, UnderflowFraction, overflow_rate, underflow_fraction
from lightning_mp.monitors.diagnostics.underflow.exponents import ExponentHistogram


def spread(seed: int, size: int = 2000) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(size, generator=generator) * torch.exp2(torch.randint(-40, 10, (size,), generator=generator))
    values[::7] = 0
    return values


@pytest.mark.parametrize("name", ["fp16", "fp8_e5m2", "fp8_e4m3fn", "bf16"])
@pytest.mark.parametrize("scale", [1.0, 2.0**10, 1000.0])
def test_it_equals_a_cast(name, scale):
    # An exact tie if the scale is a power of two; else a little beside it, where fp32 would round the product.
    tie = FORMATS[name].largest_rounded_to_zero / (scale if scale != 1000.0 else 1001.0)
    values = torch.cat([spread(0), torch.tensor([tie, -tie, tie * 1.5])])
    scaled = values * scale
    became_zero = (scaled.to(FORMATS[name].torch_dtype).float() == 0) & (values != 0)
    expected = became_zero.sum().item() / (values != 0).sum().item()
    assert underflow_fraction(values, name, scale).item() == pytest.approx(expected, abs=1e-7)
    assert underflow_fraction(values, name, torch.tensor(scale)).item() == pytest.approx(expected, abs=1e-7)
    assert fraction_lost(values, name, scale).zero == pytest.approx(expected, abs=1e-7)
    if scale != 1000.0:
        assert ExponentHistogram.of(values).fraction_lost(name, scale).zero == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_batches_count_by_their_values(dtype):
    batches = [spread(1, 100).to(dtype), spread(2, 900).to(dtype), torch.zeros(50, dtype=dtype)]
    metric = UnderflowFraction("fp8_e5m2")
    for batch in batches:
        metric.update(batch)
    assert metric.compute() == underflow_fraction(torch.cat(batches), "fp8_e5m2")
    assert metric.lost_values.dtype == metric.nonzero_values.dtype == torch.int64


def test_a_value_that_the_scale_brings_back_is_not_lost():
    metric = UnderflowFraction()
    metric.update(torch.tensor([1e-8]))
    metric.update(torch.tensor([1e-8]), scale=torch.tensor(2.0**16))
    assert metric.compute() == 0.5


def test_zeros_only_give_zero():
    assert underflow_fraction(torch.zeros(3)) == 0.0


def test_shards_and_ranks_are_added():
    values = spread(3, 64)

    def count(rank):
        with process_group():
            mesh = init_device_mesh("cpu", (2,))
            metric = UnderflowFraction()
            metric.update(distribute_tensor(values, mesh, [Shard(0)]))
            return metric.compute().item(), metric.nonzero_values.item()

    (first, first_count), (second, second_count) = run_ranks(count, 2)
    assert first == second == underflow_fraction(values).item()
    assert first_count + second_count == (values != 0).sum().item()


@pytest.mark.parametrize("as_input", [bool, torch.tensor, lambda flag: torch.tensor([float(flag)])])
def test_rate_is_skipped_over_attempted(as_input):
    flags = [True, False, False, True, False]
    metric = OverflowRate()
    for flag in flags:
        metric.update(as_input(flag))
    assert metric.compute().item() == pytest.approx(2 / 5)
    assert metric.compute() == overflow_rate(torch.tensor(flags)) == overflow_rate(torch.tensor(flags).float())
    assert (metric.skipped_steps.dtype, metric.attempted_steps.dtype) == (torch.int64, torch.int64)


def test_without_a_step_the_rate_is_zero():
    assert overflow_rate(torch.empty(0, dtype=torch.bool)) == 0.0


def test_counts_stay_exact_past_2_to_the_24():
    metric = OverflowRate()
    metric.update(torch.tensor([True]))
    metric.attempted_steps += 2**24
    metric.update(False)
    assert metric.attempted_steps == 2**24 + 2
    assert metric.bfloat16().attempted_steps.dtype == torch.int64


def test_ranks_are_added():
    def count(rank):
        metric = OverflowRate()
        with process_group():
            for flag in ([True, False], [True, True, True, False, False])[rank]:
                metric.update(flag)
            return metric.compute().item(), metric.attempted_steps.item()

    assert run_ranks(count, 2) == [(pytest.approx(4 / 7), 2), (pytest.approx(4 / 7), 5)]
