"""Fits of L(N, D) = E + A / N^alpha + B / D^beta, many at once: a safeguarded Newton method over a batch of problems.

The objective is that of Hoffmann et al. 2022 (arXiv:2203.15556), equation 3, as a sum over runs::

    sum_i weight_i Huber_delta( logsumexp(a - alpha log N_i, b - beta log D_i, e) - log L_i )

with a = log A, b = log B, e = log E. Besiroglu et al. 2024 (arXiv:2404.10102) show what goes wrong elsewhere: the mean
in place of the sum, with an absolute tolerance, stops near its start. Here the gradient and the Hessian are exact and
every test for the end has no unit, so the scale of the objective cannot matter.

All problems of a batch share the runs and differ in their weights (a bootstrap) or in their start (many starts). That
they are solved together is why this is no call of ``scipy.optimize.minimize``, which takes one at a time.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

DELTA = 1e-3
"""Width of the Huber loss in log loss: Hoffmann et al. 2022, section 3.3. Almost the sum of absolute errors."""

PARAMETERS = 5
_GRADIENT_TOLERANCE = 1e-6
_EXACT = 1e-9  # log residuals below this are a perfect fit, whose gradient is rounding
_MAX_ITERATIONS = 600
# Log A and log B are free; E from nothing up to all of the loss; exponents within what a power law can mean.
_LOWEST_EXPONENT, _HIGHEST_EXPONENT = 1e-3, 5.0
_SMALLEST_E_SHARE = 1e-6


@dataclass(frozen=True)
class LogRuns:
    """The runs of a fit, in logarithms, float64, shape (runs,)."""

    parameters: Tensor
    tokens: Tensor
    loss: Tensor


@dataclass(frozen=True)
class Solutions:
    """One row per problem of the batch."""

    theta: Tensor  # log A, log B, log E, alpha, beta: shape (problems, 5)
    objective: Tensor  # weighted sum of the Huber losses: shape (problems,)
    #: Largest component of the gradient as a share of the sum of absolute terms in it: no unit, 0 at a minimum.
    gradient: Tensor
    converged: Tensor  # whether the gradient is below its tolerance, or the fit is exact
    bound: Tensor  # whether the minimum lies on a bound of E, alpha or beta: the runs do not determine all constants


def minimise(runs: LogRuns, start: Tensor, weights: Tensor, delta: float = DELTA) -> Solutions:
    """Minimises a batch of problems, each from its own start with its own weights."""
    batch = _Batch(runs, delta)
    theta = batch.into_bounds(batch.centred(start))
    damping = torch.ones(len(theta), dtype=theta.dtype)
    state = batch.evaluate(theta, weights)
    active = torch.arange(len(theta))
    for _ in range(_MAX_ITERATIONS):
        open_problems = (state.gradient[active] > _GRADIENT_TOLERANCE) & (state.residual[active] > _EXACT)
        active = active[open_problems & (damping[active] < 1e16)]
        if len(active) == 0:
            break
        here = state.at(active)
        trial = batch.into_bounds(theta[active] + here.step(damping[active]))
        there = batch.evaluate(trial, weights[active])
        better = there.objective < here.objective
        winners = active[better]
        theta[winners] = trial[better]
        state.take(winners, there.at(better))
        damping[active] = torch.where(better, (damping[active] / 2).clamp_min(1e-6), damping[active] * 10)
    return Solutions(
        theta=batch.uncentred(theta),
        objective=state.objective,
        gradient=state.gradient,
        converged=(state.gradient <= _GRADIENT_TOLERANCE) | (state.residual <= _EXACT),
        bound=(batch.blocked(theta, state.slope)).any(dim=1),
    )


def starts(runs: LogRuns, per_exponent: int = 8) -> Tensor:
    """Starting points all over the plane of the two exponents.

    For fixed exponents the law is linear in E, A and B, so these come from least squares on the relative errors
    (variable projection), with what came out negative replaced by a small share.
    """
    exponents = torch.logspace(-1.3, 0.2, per_exponent, dtype=torch.float64)
    alpha, beta = (grid.flatten() for grid in torch.meshgrid(exponents, exponents, indexing="ij"))
    log_n, log_d = runs.parameters - runs.parameters.mean(), runs.tokens - runs.tokens.mean()
    terms = torch.stack(
        [torch.exp(-alpha[:, None] * log_n), torch.exp(-beta[:, None] * log_d), torch.ones(len(alpha), len(log_n))],
        dim=2,
    )
    design = terms / runs.loss.exp()[:, None]
    solved = torch.linalg.lstsq(design, torch.ones(len(alpha), len(log_n), 1, dtype=torch.float64)).solution
    share = 0.02 * runs.loss.exp().min()
    logs = solved.squeeze(2).clamp_min(float(share)).log()
    logs[:, 0] += alpha * runs.parameters.mean()
    logs[:, 1] += beta * runs.tokens.mean()
    return torch.cat([logs, alpha[:, None], beta[:, None]], dim=1)


@dataclass
class _State:
    objective: Tensor
    slope: Tensor
    hessian: Tensor
    #: Gauss-Newton matrix of the quadratic that touches the Huber loss from above: positive, of the right units.
    majorant: Tensor
    gradient: Tensor
    residual: Tensor
    free: Tensor

    def at(self, rows: Tensor) -> "_State":
        return _State(**{name: value[rows] for name, value in vars(self).items()})

    def take(self, rows: Tensor, other: "_State") -> None:
        for name, value in vars(self).items():
            value[rows] = getattr(other, name)

    def step(self, damping: Tensor) -> Tensor:
        """-(H + damping G)^-1 g over the free variables; steepest in the metric of G where H is not positive."""
        free = self.free[:, :, None] & self.free[:, None, :]
        identity = torch.eye(PARAMETERS, dtype=self.slope.dtype)
        ridge = self.majorant + 1e-10 * self.majorant.diagonal(dim1=1, dim2=2).clamp_min(1e-300).diag_embed()
        matrix = torch.where(free, self.hessian + damping[:, None, None] * ridge, identity)
        fallback = torch.where(free, (1 + damping[:, None, None]) * ridge, identity)
        # Unit diagonal before the factorisation: the variables have very different curvatures.
        scale = fallback.diagonal(dim1=1, dim2=2).clamp_min(1e-300).rsqrt()
        scaled = scale[:, :, None] * scale[:, None, :]
        factor, failed = torch.linalg.cholesky_ex(matrix * scaled)
        fallback_factor, _ = torch.linalg.cholesky_ex(fallback * scaled + 1e-12 * identity)
        factor = torch.where((failed > 0)[:, None, None], fallback_factor, factor)
        slope = torch.where(self.free, self.slope, 0.0) * scale
        return -torch.cholesky_solve(slope[:, :, None], factor).squeeze(2) * scale


class _Batch:
    """The objective and its derivatives for many problems, the logarithms centred for conditioning."""

    def __init__(self, runs: LogRuns, delta: float) -> None:
        self.delta = delta
        self.loss = runs.loss
        self.means = torch.stack([runs.parameters.mean(), runs.tokens.mean()])
        # Derivatives of the three exponents by (a, b, e, alpha, beta): shape (runs, 3, 5).
        self.design = torch.eye(3, PARAMETERS, dtype=torch.float64).repeat(len(runs.loss), 1, 1)
        self.design[:, 0, 3] = self.means[0] - runs.parameters
        self.design[:, 1, 4] = self.means[1] - runs.tokens
        self.squares = torch.einsum("rij,rik->rijk", self.design, self.design)
        free = float("inf")
        lowest_e = float(runs.loss.min() + torch.log(torch.tensor(_SMALLEST_E_SHARE)))
        self.low = torch.tensor([-free, -free, lowest_e, _LOWEST_EXPONENT, _LOWEST_EXPONENT], dtype=torch.float64)
        self.high = torch.tensor([free, free, free, _HIGHEST_EXPONENT, _HIGHEST_EXPONENT], dtype=torch.float64)

    def centred(self, theta: Tensor) -> Tensor:
        return torch.cat([theta[:, :2] - theta[:, 3:] * self.means, theta[:, 2:]], dim=1)

    def uncentred(self, theta: Tensor) -> Tensor:
        return torch.cat([theta[:, :2] + theta[:, 3:] * self.means, theta[:, 2:]], dim=1)

    def into_bounds(self, theta: Tensor) -> Tensor:
        return torch.minimum(torch.maximum(theta, self.low), self.high)

    def blocked(self, theta: Tensor, slope: Tensor) -> Tensor:
        """Variables on a bound that the objective would push across."""
        return ((theta <= self.low) & (slope > 0)) | ((theta >= self.high) & (slope < 0))

    def evaluate(self, theta: Tensor, weights: Tensor) -> _State:
        exponents = torch.einsum("rij,pj->pri", self.design, theta)
        shares = exponents.softmax(2)
        residual = exponents.logsumexp(2) - self.loss
        size = residual.abs()
        inside = size <= self.delta
        huber = torch.where(inside, 0.5 * residual**2, self.delta * (size - 0.5 * self.delta))
        by_theta = torch.einsum("pri,rij->prj", shares, self.design)  # derivatives of the residuals
        push = weights * residual.clamp(-self.delta, self.delta)
        pushed = push[:, :, None] * shares
        slope = torch.einsum("pri,rij->pj", pushed, self.design)
        # Each term of the sum in absolute value: what the gradient is small against.
        scale = torch.einsum("pri,rij->pj", pushed.abs(), self.design.abs())
        bend = torch.where(inside, weights, 0.0) - push  # curvature of Huber, minus that of logsumexp's p p^T
        hessian = _weighted(bend, by_theta) + torch.einsum("pri,rijk->pjk", pushed, self.squares)
        free = ~self.blocked(theta, slope)
        share = torch.where(free, slope.abs() / scale.clamp_min(1e-300), 0.0)
        return _State(
            objective=(weights * huber).sum(dim=1),
            slope=slope,
            hessian=hessian,
            majorant=_weighted(weights * (self.delta / size.clamp_min(self.delta)), by_theta),
            gradient=share.max(dim=1).values,
            residual=torch.where(weights > 0, size, 0.0).max(dim=1).values,
            free=free,
        )


def _weighted(weights: Tensor, vectors: Tensor) -> Tensor:
    """Weighted sums over runs of each vector times itself, shape (problems, 5, 5)."""
    return torch.einsum("prj,prk->pjk", weights[:, :, None] * vectors, vectors)
