"""Forecasts of the final loss and of the time left: coverage of the band by simulation, robustness, refusals."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_mp.monitors.diagnostics.forecast import CorrelatedNoise, LossForecast, forecast_loss, forecast_seconds

BUDGET = 1e8


def curve(tokens: Tensor, e: float, b: float, beta: float) -> Tensor:
    return e + b * tokens**-beta


def run(
    e: float, b: float, beta: float, *, points: int, noise: float, seed: int, correlation: float = 0.0
) -> tuple[Tensor, Tensor]:
    """A synthetic history: tokens and noisy losses."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.linspace(BUDGET / points, BUDGET, points, dtype=torch.float64)
    errors = noise_with_memory(points, correlation, generator)
    return tokens, curve(tokens, e, b, beta) + noise * errors


def noise_with_memory(points: int, correlation: float, generator: torch.Generator) -> Tensor:
    """AR(1) of variance 1, from its stationary state."""
    fresh = torch.randn(points, generator=generator, dtype=torch.float64).tolist()
    errors = fresh[:1]
    for value in fresh[1:]:
        errors.append(correlation * errors[-1] + math.sqrt(1 - correlation**2) * value)
    return torch.tensor(errors, dtype=torch.float64)


def forecast(tokens: Tensor, losses: Tensor, reach: float, **arguments: Any) -> LossForecast:
    return forecast_loss(tokens.tolist(), losses.tolist(), BUDGET * reach, **arguments)


@pytest.mark.parametrize("constants", [(2.0, 300.0, 0.35), (0.0, 20.0, 0.15), (1.5, 3000.0, 0.6), (3.0, 1e6, 1.0)])
def test_a_curve_without_noise_is_continued(constants: tuple[float, float, float]) -> None:
    tokens, losses = run(*constants, points=80, noise=0.0, seed=0)
    found = forecast(tokens, losses, 4.0)
    truth = float(curve(torch.tensor(4 * BUDGET, dtype=torch.float64), *constants))
    assert found.loss == pytest.approx(truth, rel=2e-4)
    assert found.beta == pytest.approx(constants[2], rel=0.02)
    assert found.e == pytest.approx(constants[0], rel=0.01, abs=0.01)
    assert found.warnings == ()


@pytest.mark.parametrize(
    ("correlation", "confidence", "reach", "points"),
    [(0.0, 0.9, 3.0, 300), (0.8, 0.9, 2.0, 300), (0.8, 0.95, 5.0, 300), (0.95, 0.95, 2.0, 300)],
)
@pytest.mark.full
def test_the_band_holds_the_truth_as_often_as_it_says(
    correlation: float, confidence: float, reach: float, points: int
) -> None:
    """120 runs; of a fair band all but one in 400 such tests stay inside three standard deviations.

    Seen: 0.79 in place of 0.90 where noise remembers 0.8 from point to point.
    """
    constants, runs = (2.0, 300.0, 0.35), 120
    truth = float(curve(torch.tensor(reach * BUDGET, dtype=torch.float64), *constants))
    held = 0
    for seed in range(runs):
        tokens, losses = run(*constants, points=points, noise=0.03, seed=seed, correlation=correlation)
        found = forecast(tokens, losses, reach, confidence=confidence, samples=400, seed=seed)
        held += found.low <= truth <= found.high
    deviation = math.sqrt(confidence * (1 - confidence) / runs)
    assert abs(held / runs - confidence) <= 3 * deviation


def test_spikes_do_not_pull_and_losses_that_are_not_finite_are_left_out() -> None:
    tokens, losses = run(2.0, 300.0, 0.35, points=200, noise=0.01, seed=0)
    clean = forecast(tokens, losses, 2.0)
    spiked = losses.clone()
    spiked[50::40] += 5.0
    spiked[100::60] = torch.nan
    spiked[101] = torch.inf
    found = forecast(tokens, spiked, 2.0)
    assert found.loss == pytest.approx(clean.loss, rel=3e-3)
    assert found.points < clean.points


def test_the_band_widens_with_noise_and_with_reach() -> None:
    widths = []
    for noise, reach in ((0.01, 1.0), (0.01, 2.0), (0.01, 4.0), (0.04, 4.0)):
        found = forecast(*run(2.0, 300.0, 0.35, points=100, noise=noise, seed=1), reach)
        assert found.low <= found.loss <= found.high
        widths.append(found.high - found.low)
    assert widths == sorted(widths)


def test_many_points_are_averaged_and_noise_is_that_of_the_means() -> None:
    found = forecast(*run(2.0, 300.0, 0.35, points=5000, noise=0.2, seed=0), 2.0)
    assert found.points == 4751 // 24, "all of one size"
    assert found.noise == pytest.approx(0.2 / math.sqrt(24), rel=0.25)
    truth = float(curve(torch.tensor(2 * BUDGET, dtype=torch.float64), 2.0, 300.0, 0.35))
    assert found.loss == pytest.approx(truth, rel=0.01)


def test_the_same_points_give_the_same_forecast_and_nobodys_random_numbers_change() -> None:
    history = run(2.0, 300.0, 0.35, points=60, noise=0.02, seed=0)
    state = torch.get_rng_state()
    assert forecast(*history, 2.0) == forecast(*history, 2.0)
    assert forecast(*history, 2.0).low != forecast(*history, 2.0, seed=1).low
    assert torch.equal(torch.get_rng_state(), state)


def test_far_reach_a_flat_curve_and_a_strange_one_are_warned_about() -> None:
    history = run(2.0, 300.0, 0.35, points=60, noise=0.01, seed=0)
    assert forecast(*history, 8.0).warnings == ("it reaches 8 times as far as the run so far",)
    tokens, _ = history
    assert "the loss does not fall" in forecast(tokens, 2 + tokens / BUDGET, 2.0).warnings
    bent = forecast(*run(2.0, 1e20, 3.0, points=60, noise=0.0, seed=0), 2.0)
    assert any("ran into its bound" in warning for warning in bent.warnings)
    text = str(forecast(*history, 8.0))
    assert text.startswith("loss 2.")
    assert " at 90%) after 800M tokens; it reaches 8 times" in text


def test_seconds_left_from_recent_speed() -> None:
    """Speeds 100, 50, 100, 200 tokens a second; 450 tokens in 5 seconds, 900 to go."""
    found = forecast_seconds([10.0, 11.0, 13.0, 14.0, 15.0], [50, 150, 250, 350, 550], 1450)
    assert found.tokens_per_second == 100.0
    assert found.seconds == 9.0
    assert found.low == 900 / 125  # quartiles of the four speeds: 87.5 and 125
    assert found.high == 900 / 87.5
    assert forecast_seconds([0.0, 1.0], [0, 10], 5).seconds == 0.0


def test_a_curve_that_stands_still_goes_on_so() -> None:
    """More than half of the residuals are 0, and with them their robust spread."""
    found = forecast(torch.linspace(1e6, BUDGET, 40, dtype=torch.float64), torch.full((40,), 2.0), 2.0)
    assert (found.loss, found.low, found.high) == pytest.approx((2.0, 2.0, 2.0), rel=1e-12)
    assert found.warnings == ("the loss does not fall",)


@pytest.mark.parametrize(("correlation", "estimate"), [(0.0, (0.0, 0.1)), (0.8, (0.75, 0.9))])
def test_noise_remembers_as_long_as_before_three_constants_were_fitted(
    correlation: float, estimate: tuple[float, float]
) -> None:
    """The residuals of a fit to 150 points with a memory of 0.8 have less of it, and less variance."""
    x = torch.linspace(0.01, 1, 150, dtype=torch.float64)
    design = torch.stack([torch.ones_like(x), x**-0.35, x**-0.35 * x.log()], 1)
    basis, _ = torch.linalg.qr(design)
    shown, memories, variances = [], [], []
    for seed in range(12):
        noise = noise_with_memory(150, correlation, torch.Generator().manual_seed(seed))
        residuals = noise - basis @ (basis.T @ noise)
        found = CorrelatedNoise.of(residuals, design)
        again = found.draw(100, torch.Generator().manual_seed(seed))
        shown.append(float(residuals.square().mean()))
        memories.append(float((found.memory * (1 - found.white_share) * found.probability).sum()))
        variances.append(float(again.square().mean(1).median()))
    low, high = estimate
    assert low <= sum(memories) / 12 <= high
    assert sum(shown) / 12 < sum(variances) / 12
    assert sum(variances) / 12 == pytest.approx(1.0, abs=0.35)


def test_restricted_likelihood_is_that_of_dense_matrices() -> None:
    """Patterson and Thompson 1971, by the inverse of the whole covariance."""
    generator = torch.Generator().manual_seed(0)
    design = torch.randn(12, 3, generator=generator, dtype=torch.float64)
    residuals = torch.randn(12, generator=generator, dtype=torch.float64)
    found = CorrelatedNoise.of(residuals, design)
    lag = (torch.arange(12)[:, None] - torch.arange(12)).abs()
    basis, _ = torch.linalg.qr(design)
    logs = []
    for rho, white in zip(found.memory.tolist(), found.white_share.tolist(), strict=True):
        inverse = torch.linalg.inv((1 - white) * rho**lag + white * torch.eye(12, dtype=torch.float64))
        information = basis.T @ inverse @ basis
        projector = inverse - inverse @ basis @ torch.linalg.inv(information) @ basis.T @ inverse
        squares = residuals @ projector @ residuals
        logs.append(0.5 * (torch.logdet(inverse) - torch.logdet(information)) - 9 / 2 * squares.log())
    # Noise without a memory has the weight of eight pairs beforehand.
    expected = (torch.stack(logs) + torch.where(found.memory > 0, 1.0, 8.0).log()).softmax(0)
    torch.testing.assert_close(found.probability, expected)
