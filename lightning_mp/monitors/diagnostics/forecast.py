"""Forecast of a run from its course so far: the final loss with a band, and the remaining seconds.

The loss curve of one run at a steady learning rate follows a power law in the tokens D (Hestness et al. 2017,
arXiv:1712.00409; Kaplan et al. 2020, arXiv:2001.08361, section 5)::

    L(D) = E + B D^-beta        with E >= 0, B >= 0 and beta in [0.05, 1.5]

For a fixed beta the law is linear in E and B, so every beta of a grid is fitted in closed form and the best is taken
(variable projection). Spikes are cut off at five robust standard deviations from a running median, and errors are
weighed by Huber's loss. The band comes from refits to the law plus more noise of the kind that the residuals show, with
its memory along the run (:class:`CorrelatedNoise`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from typing_extensions import override

from lightning_mp.ground.core.quantities import format_quantity

_MEMORIES = (0.3, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.925, 0.95, 0.97, 0.98)
_WHITE_SHARES = (0.0, 0.3, 0.6)


@dataclass(frozen=True)
class CorrelatedNoise:
    """What residuals reveal about their noise: one row per pair of rho and w.

    The losses of one run scatter around their law with a memory: smoothed losses, learning rates and data in order all
    correlate neighbours. The noise is taken for the sum of two Gaussian parts, one with a memory and one without::

        noise_t = sqrt(1 - w) x_t + sqrt(w) e_t         x_t = rho x_(t-1) + sqrt(1 - rho^2) u_t

    A fitted curve bends towards noise with a memory, so its residuals show less of both than there is. The restricted
    likelihood (Patterson and Thompson 1971, "Recovery of inter-block information when block sizes are unequal") allows
    for the constants that were fitted. It is computed on a grid of rho and w. Draws take rho, w and the variance in
    proportion to it, so what the residuals leave open about the noise is in them.
    """

    memory: Tensor  # rho, shape `[rows]`
    white_share: Tensor  # w, shape `[rows]`
    probability: Tensor  # of each pair, shape `[rows]`
    squares: Tensor  # sum of squares of the residuals without their memory, shape `[rows]`
    factors: Tensor  # Cholesky factors of the correlation between points, shape `[rows, points, points]`
    freedom: int  # how many of them are independent: points less fitted constants

    @classmethod
    def of(cls, residuals: Tensor, design: Tensor) -> "CorrelatedNoise":
        """From the residuals ``[points]`` of a fit and its derivatives by the constants ``[points, constants]``."""
        pairs = [(0.0, 0.0), *((rho, w) for rho in _MEMORIES for w in _WHITE_SHARES)]
        memory, white_share = torch.tensor(pairs, dtype=torch.float64).T
        points, constants = design.shape
        orthonormal, _ = torch.linalg.qr(design)
        columns = torch.cat([residuals[:, None], orthonormal], dim=1)
        place = torch.arange(points, dtype=torch.float64)
        remembered = memory[:, None, None] ** (place[:, None] - place).abs()
        share = white_share[:, None, None]
        factors = torch.linalg.cholesky((1 - share) * remembered + share * torch.eye(points, dtype=torch.float64))
        log_variances = 2 * factors.diagonal(dim1=1, dim2=2).log().sum(1)
        whitened = torch.linalg.solve_triangular(factors, columns, upper=False)
        products = whitened.mT @ whitened
        information = products[:, 1:, 1:]
        projected = torch.linalg.solve(information, products[:, 1:, :1])
        squares = (products[:, 0, 0] - (products[:, 0, 1:] * projected[:, :, 0]).sum(1)).clamp_min(1e-300)
        freedom = points - constants
        log_likelihood = -0.5 * (log_variances + torch.logdet(information) + freedom * squares.log())
        # Beforehand noise without memory is as likely as eight pairs with one: it is one point of the grid against 33.
        log_prior = torch.where(memory > 0, 1.0, 8.0).log()
        return cls(memory, white_share, (log_likelihood + log_prior).softmax(0), squares, factors, freedom)

    def draw(self, samples: int, generator: torch.Generator) -> Tensor:
        """More noise of the same kind, shape ``[samples, points]``."""
        rows = torch.multinomial(self.probability, samples, replacement=True, generator=generator)
        points = self.factors.shape[1]
        normal = torch.randn(samples, points + self.freedom, generator=generator, dtype=torch.float64)
        # The sum of squares over chi-squared: what is not known of the variance.
        deviation = (self.squares[rows] / normal[:, points:].square().sum(1)).sqrt()
        noise = normal[:, :points]
        for row in rows.unique().tolist():
            noise[rows == row] = noise[rows == row] @ self.factors[row].T
        return deviation[:, None] * noise


MIN_POINTS = 20
"""Fewer points than this say nothing about three constants."""
MIN_SPAN = 3.0
"""The last point must have this many times the tokens of the first one that is used."""
FAR_REACH = 5.0
"""Beyond this many times the tokens of the last point, a forecast is warned about."""

_WARMUP_SHARE = 0.05
_RUNNING_MEDIAN = 11
_CUT = 5.0
_MAX_BINS = 200
_HUBER = 1.345  # 95% of the efficiency of least squares on Gaussian errors: Huber 1981
_NORMAL_MAD = 1.4826
_REWEIGHTINGS = 8
_BETA_LOW, _BETA_HIGH, _BETAS = 0.05, 1.5, 200


@dataclass(frozen=True, slots=True)
class LossForecast:
    """The expected loss after a number of tokens."""

    tokens: float  # where
    loss: float  # the expected loss, the mean that single batches scatter around
    low: float  # lower end of the band
    high: float  # upper end of the band
    confidence: float  # how often such a band contains the expected loss, if the run follows the law
    e: float  # fitted loss that more tokens cannot reduce
    b: float  # fitted B
    beta: float  # fitted exponent
    noise: float  # robust standard deviation of the points around the law (of means, where there were many points)
    points: int  # how many points were used
    reach: float  # tokens forecast for, over tokens of the last point
    warnings: tuple[str, ...]  # why to trust it less; empty if nothing is amiss

    @override
    def __str__(self) -> str:
        band = f"{self.low:.4g} to {self.high:.4g} at {self.confidence:.0%}"
        return f"loss {self.loss:.4g} ({band}) after {format_quantity(self.tokens)} tokens" + "".join(
            f"; {warning}" for warning in self.warnings
        )


@dataclass(frozen=True, slots=True)
class SecondsForecast:
    """The seconds that a run still takes."""

    seconds: float  # the expectation, from the mean speed over the last points
    low: float  # at the speed of the fastest quarter of them
    high: float  # at the speed of the slowest quarter
    tokens_per_second: float  # the mean speed over them


def forecast_loss(
    tokens: Sequence[float],
    losses: Sequence[float],
    at_tokens: float,
    *,
    confidence: float = 0.9,
    samples: int = 1000,
    seed: int = 0,
) -> LossForecast:
    """Forecasts the loss at ``at_tokens`` from the points of a run so far.

    The first 5% of the tokens so far are left out as warm-up. More than 200 points are first averaged in groups of
    about equal length. The law does not know about a learning rate that is still to decay: such a run ends below the
    forecast, by a few percent.

    In simulations the bands of 90 and 95% contained the true loss as often as they claim, within 3 points in 100, for
    uncorrelated noise and for an autocorrelation of 0.8 and 0.95 between points. With few points, or noise that is a
    moving average, they contain it more often. Give losses as they were logged: a smoothed loss lags behind its tokens,
    most at the start of a run, which the law does not model.
    """
    _check(tokens, losses, at_tokens, confidence, samples)
    d, loss = _usable(tokens, losses)
    last_tokens = float(max(tokens))
    d, loss = _in_groups(d, _without_spikes(loss))
    scale = float(d[-1])
    x, at = d / scale, torch.tensor([at_tokens / scale], dtype=torch.float64)
    fit = _fit_robustly(x, loss)
    expected, fitted = float(fit.at(at)), fit.at(x)[0]
    noise = CorrelatedNoise.of(loss - fitted, _derivatives(x, fit.beta[0]))
    again = fitted + noise.draw(samples, torch.Generator().manual_seed(seed))
    # Of the law without noise too: what the grid of exponents leaves is in both.
    refitted = _fit(x, torch.cat([fitted[None], again])).at(at)[:, 0]
    tail = torch.tensor([(1 - confidence) / 2, (1 + confidence) / 2], dtype=torch.float64)
    below, above = (refitted[1:] - refitted[0]).quantile(tail).tolist()
    reach = at_tokens / last_tokens
    return LossForecast(
        tokens=float(at_tokens),
        loss=expected,
        # A fit that comes out this much too high or low was that much above or below the truth.
        low=max(expected - max(above, 0.0), 0.0),
        high=expected - min(below, 0.0),
        confidence=confidence,
        e=float(fit.e[0]),
        b=float(fit.b[0] * scale ** fit.beta[0]),
        beta=float(fit.beta[0]),
        noise=_spread(loss - fitted),
        points=len(d),
        reach=reach,
        warnings=_warnings(reach, fit),
    )


def forecast_seconds(seconds: Sequence[float], tokens: Sequence[float], at_tokens: float) -> SecondsForecast:
    """Forecasts the seconds from the last point until ``at_tokens``, from recent throughput.

    >>> forecast_seconds([0.0, 1.0, 2.0], [0, 100, 200], 1000).seconds
    8.0
    """
    if len(seconds) != len(tokens) or len(seconds) < 2:
        raise ValueError(
            f"forecast_seconds() needs two points or more with as many seconds as tokens, got {len(seconds)} and"
            f" {len(tokens)}."
        )
    if not (tokens[-1] > tokens[0] and seconds[-1] > seconds[0]):
        raise ValueError("forecast_seconds() needs progress: the last point must have more seconds and more tokens.")
    left = max(at_tokens - tokens[-1], 0.0)
    clock = torch.tensor(seconds, dtype=torch.float64)
    count = torch.tensor(tokens, dtype=torch.float64)
    steps = clock.diff() > 0
    speeds = count.diff()[steps] / clock.diff()[steps]
    slow, fast = speeds.quantile(torch.tensor([0.25, 0.75], dtype=torch.float64)).tolist()
    mean = (tokens[-1] - tokens[0]) / (seconds[-1] - seconds[0])
    slow, fast = min(slow, mean), max(fast, mean)
    return SecondsForecast(left / mean, left / fast, left / slow if slow > 0 else math.inf, mean)


# -- the points --------------------------------------------------------------------------------------------------------


def _check(tokens: Sequence[float], losses: Sequence[float], at_tokens: float, confidence: float, samples: int) -> None:
    if len(tokens) != len(losses):
        raise ValueError(f"forecast_loss() got {len(tokens)} token counts and {len(losses)} losses; give one for each.")
    if not 0 < confidence < 1:
        raise ValueError(f"`confidence` must be over 0 and below 1, got {confidence!r}. For 90% write 0.9.")
    if samples < 20:
        raise ValueError(f"`samples` must be 20 or more, got {samples!r}.")
    if any(not count > 0 for count in tokens) or any(b < a for a, b in pairwise(tokens)):
        raise ValueError("`tokens` must be positive and must not fall from one point to the next.")
    if not (math.isfinite(at_tokens) and (not tokens or at_tokens >= tokens[-1])):
        raise ValueError(
            f"`at_tokens` must be finite and not before the last point ({tokens[-1] if tokens else 0:.4g} tokens), got"
            f" {at_tokens!r}."
        )


def _usable(tokens: Sequence[float], losses: Sequence[float]) -> tuple[Tensor, Tensor]:
    d = torch.tensor(tokens, dtype=torch.float64)
    loss = torch.tensor(losses, dtype=torch.float64)
    keep = loss.isfinite() & (d >= _WARMUP_SHARE * d[-1] if len(d) else torch.ones(0, dtype=torch.bool))
    d, loss = d[keep], loss[keep]
    if len(d) < MIN_POINTS:
        raise ValueError(
            f"A forecast needs {MIN_POINTS} points or more with a finite loss after the first {_WARMUP_SHARE:.0%} of"
            f" the tokens so far, got {len(d)}. Wait for more, or log more often."
        )
    span = float(d[-1] / d[0])
    if span < MIN_SPAN:
        raise ValueError(
            f"A forecast needs points over a factor of {MIN_SPAN:g} in tokens, got a factor of {span:.3g}: the curve"
            " cannot be told apart from a straight line. Pass the points from the start of the run."
        )
    return d, loss


def _without_spikes(loss: Tensor) -> Tensor:
    """Losses no further from a running median than ordinary noise goes."""
    half = _RUNNING_MEDIAN // 2
    padded = torch.cat([loss[:1].expand(half), loss, loss[-1:].expand(half)])
    middle = padded.unfold(0, _RUNNING_MEDIAN, 1).median(dim=1).values
    reach = _CUT * _spread(loss - middle)
    return middle + (loss - middle).clamp(-reach, reach)


def _in_groups(d: Tensor, loss: Tensor) -> tuple[Tensor, Tensor]:
    """Means of neighbours, so that the work does not grow with the run."""
    if len(d) <= _MAX_BINS:
        return d, loss
    size = -(-len(d) // _MAX_BINS)
    # All of one size, or their noise would differ; the few that are left over are the first ones.
    first = len(d) % size
    return d[first:].view(-1, size).mean(1), loss[first:].view(-1, size).mean(1)


def _spread(residuals: Tensor) -> float:
    return _NORMAL_MAD * float((residuals - residuals.median()).abs().median())


# -- the fit -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Fit:
    """One law per row."""

    e: Tensor
    b: Tensor
    beta: Tensor

    def at(self, d: Tensor) -> Tensor:
        """Losses at ``d``, shape ``[laws, len(d)]``."""
        return self.e[:, None] + self.b[:, None] * d[None, :] ** -self.beta[:, None]


def _fit_robustly(d: Tensor, loss: Tensor) -> _Fit:
    """One law for one run: weights of Huber's loss, and ever finer grids of beta around the best one so far."""
    fit = _fit(d, loss[None])
    step = math.log(_BETA_HIGH / _BETA_LOW) / (_BETAS - 1)
    for _ in range(_REWEIGHTINGS):
        residuals = loss - fit.at(d)[0]
        scale = _NORMAL_MAD * residuals.abs().median()
        weights = (_HUBER * scale / residuals.abs().clamp_min(1e-300)).clamp_max(1.0) if scale > 0 else None
        near = torch.linspace(-1.5 * step, 1.5 * step, 11, dtype=torch.float64).exp()
        fit = _fit(d, loss[None], (fit.beta * near).clamp(_BETA_LOW, _BETA_HIGH), weights)
        step *= 0.6
    return fit


def _fit(d: Tensor, losses: Tensor, betas: Tensor | None = None, weights: Tensor | None = None) -> _Fit:
    """For every row of ``losses`` the best beta of a grid, by least squares in E and B."""
    if betas is None:
        betas = torch.logspace(math.log10(_BETA_LOW), math.log10(_BETA_HIGH), _BETAS, dtype=torch.float64)
    share = torch.ones_like(d) / len(d) if weights is None else weights / weights.sum()
    x = d[:, None] ** -betas
    mean_x, mean_y = share @ x, (losses @ share)[:, None]
    dx, dy = x - mean_x, losses - mean_y
    variance_x = share @ dx.square()
    b = ((dy * share) @ dx / variance_x).clamp_min(0.0)
    e = mean_y - b * mean_x
    error = (dy.square() @ share)[:, None] - b.square() * variance_x
    # On the bound E = 0 the best B is that of a line through the origin.
    origin_b = ((losses * share) @ x / (share @ x.square())).clamp_min(0.0)
    origin_error = (losses.square() @ share)[:, None] - origin_b.square() * (share @ x.square())
    best = torch.where(e < 0, origin_error, error).argmin(dim=1, keepdim=True)
    return _Fit(
        torch.where(e < 0, 0.0, e).gather(1, best)[:, 0],
        torch.where(e < 0, origin_b, b).gather(1, best)[:, 0],
        betas[best[:, 0]],
    )


def _derivatives(d: Tensor, beta: Tensor) -> Tensor:
    """Of the law by its constants, up to factors, shape ``[points, 3]``."""
    power = d**-beta
    return torch.stack([torch.ones_like(d), power, power * d.log()], dim=1)


def _warnings(reach: float, fit: _Fit) -> tuple[str, ...]:
    found = []
    if reach > FAR_REACH:
        found.append(f"it reaches {reach:.3g} times as far as the run so far")
    if float(fit.b[0]) <= 0:
        found.append("the loss does not fall")
    elif not _BETA_LOW * 1.01 < float(fit.beta[0]) < _BETA_HIGH * 0.99:
        found.append(f"the exponent ran into its bound ({float(fit.beta[0]):.3g}), so the points do not show the law")
    return tuple(found)
