"""The estimator of the gradient noise scale, against gradients whose noise is known."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from gloo import run_group
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from lightning_mp.monitors.diagnostics.noise_scale import NoiseScaleAverage, square_share, unbiased_estimates
from lightning_mp.training.gradients.replication import GradientReplication

WINDOWS = 400


def simulate(seed: int, *, square: float, trace: float, batch: int, micro_batches: int, windows: int = WINDOWS) -> Any:
    """Gradients of 64 numbers around a fixed one, noise of unequal size in each: their scale is trace / square."""
    random = np.random.default_rng(seed)
    true = random.standard_normal(64)
    true *= np.sqrt(square) / np.linalg.norm(true)
    deviation = np.exp(0.5 * random.standard_normal(64))
    deviation *= np.sqrt(trace) / np.linalg.norm(deviation)
    average = NoiseScaleAverage(average_steps=500)
    for _ in range(windows):
        micro = true + random.standard_normal((micro_batches, 64)) * deviation / np.sqrt(batch)
        small, big = (micro[0] ** 2).sum(), (micro.mean(0) ** 2).sum()
        average.add(small, big, 1 / batch, 1 / (batch * micro_batches))
    return average.estimate()


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("trace", "batch", "micro_batches"), [(20.0, 4, 8), (30.0, 8, 4), (8.0, 2, 16)])
def test_within_a_tenth_after_400_windows(trace: float, batch: int, micro_batches: int) -> None:
    estimates = [
        simulate(seed, square=1.0, trace=trace, batch=batch, micro_batches=micro_batches) for seed in range(20)
    ]
    errors = np.array([estimate.samples / trace - 1 for estimate in estimates])
    assert np.abs(errors).max() < 0.1
    assert abs(errors.mean()) < 0.02
    assert all(estimate.batch_samples == pytest.approx(batch * micro_batches) for estimate in estimates)


@pytest.mark.full
def test_the_interval_holds_the_truth_as_often_as_it_says() -> None:
    """Also where batches are far too small to know: noise six times that of the batch."""
    for square, trace in [(1.0, 20.0), (1.863, 350.4)]:
        estimates = [simulate(seed, square=square, trace=trace, batch=4, micro_batches=8) for seed in range(60)]
        inside = sum(estimate.low <= trace / square <= estimate.high for estimate in estimates)
        assert 52 <= inside <= 60  # 57 expected; 52 is 3 standard deviations below


def test_the_interval_narrows_with_the_root_of_the_windows() -> None:
    few, many = (simulate(0, square=1.0, trace=20.0, batch=4, micro_batches=8, windows=number) for number in (25, 400))
    assert (many.high - many.low) < 0.4 * (few.high - few.low)


def test_without_a_visible_gradient_there_is_no_upper_end() -> None:
    estimates = [simulate(s, square=1e-6, trace=50.0, batch=4, micro_batches=4, windows=30) for s in range(20)]
    known = [estimate for estimate in estimates if estimate is not None]
    assert sum(np.isinf(estimate.high) for estimate in known) >= 0.8 * len(known) > 0
    shown = next(str(estimate) for estimate in known if np.isinf(estimate.high))
    assert "to no upper end yet" in shown


def test_estimates_equal_the_formulas_of_the_paper() -> None:
    """Appendix A.1, written with sizes instead of their inverses."""
    small, big, b, B = 7.3, 2.9, 6.0, 31.0
    square, trace = unbiased_estimates(small, big, 1 / b, 1 / B)
    assert square == pytest.approx((B * big - b * small) / (B - b), rel=1e-12)
    assert trace == pytest.approx((small - big) / (1 / b - 1 / B), rel=1e-12)


def test_averages_forget_with_their_time_constant_and_have_no_start_bias() -> None:
    average = NoiseScaleAverage(average_steps=10)
    for noise in [4.0] * 3 + [8.0] * 100:
        average.add(1 + noise / 4, 1 + noise / 16, 1 / 4, 1 / 16)
        if average.windows == 3:
            assert average.estimate().samples == pytest.approx(4.0)
    assert average.estimate().samples == pytest.approx(8.0, rel=1e-3)


def test_state_goes_on_to_the_last_bit() -> None:
    values = np.random.default_rng(1).uniform(2, 3, (20, 2)).tolist()
    straight, first, second = (NoiseScaleAverage(average_steps=7) for _ in range(3))
    for index, (small, big) in enumerate(values):
        if index == 9:
            second.load_state_dict(first.state_dict())
        (first if index < 9 else second).add(small, big / 2, 0.25, 0.125, tokens_per_sample=3.0)
        straight.add(small, big / 2, 0.25, 0.125, tokens_per_sample=3.0)
    assert second.state_dict() == straight.state_dict()
    assert second.estimate() == straight.estimate()


def test_it_reads_as_advice() -> None:
    average = NoiseScaleAverage(average_steps=100)
    for small, big in [(3.0, 1.5), (3.4, 1.6), (2.6, 1.4), (3.0, 1.5)]:
        average.add(small, big, 1 / 4, 1 / 16, tokens_per_sample=10.0)
    estimate = average.estimate()
    assert estimate.tokens == pytest.approx(80.0, rel=1e-3)
    assert estimate.efficiency == pytest.approx(1 / (1 + 8 / 16), rel=1e-3)
    assert str(estimate).startswith("gradient noise scale 8 samples (95%: 7 to 9), 80 tokens, from 4 steps")


def test_gradients_whose_sum_is_still_to_be_made_are_left_for_the_next_backward() -> None:
    """The norm is that of the sum; the next backward adds to the parts."""

    def look(rank: int) -> Any:
        mesh = init_device_mesh("cpu", (2,))
        parameter = nn.Parameter(DTensor.from_local(torch.zeros(3), mesh, [Replicate()]))
        parameter.grad = DTensor.from_local(torch.full((3,), rank + 1.0), mesh, [Partial()])
        share = square_share([parameter], GradientReplication.every_rank())
        dist.all_reduce(share)
        return float(share), parameter.grad.placements, parameter.grad.to_local().tolist()

    for rank, (square, placements, own) in enumerate(run_group(look, 2)):
        assert square == pytest.approx(3 * 3.0**2)
        assert placements == (Partial(),)
        assert own == [rank + 1.0] * 3
