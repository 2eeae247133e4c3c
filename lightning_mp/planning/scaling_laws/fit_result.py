"""What a fit of a scaling law returns: the law, and what it takes to trust it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_mp.flops.chinchilla import FLOPS_PER_PARAMETER_AND_TOKEN
from lightning_mp.planning.scaling_laws.runs import Run
from lightning_mp.planning.scaling_laws.scaling_law import ParametricLaw


@dataclass(frozen=True, slots=True)
class Interval:
    """Percentiles of the bootstrap."""

    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Certificate:
    """Why the minimum may be believed."""

    starts: int  # how many starting points were tried, all over the plane of the exponents
    agreeing: int  # how many of them ended at the best objective, to one part in a million
    gradient: float  # largest component of the gradient, as a share of the absolute terms it sums
    on_bound: bool  # whether E, alpha or beta ran into its bound: the runs do not determine the law
    converged: bool  # whether the best solution is a minimum, reached from a tenth of the starts, inside the bounds

    @property
    def problem(self) -> str:
        """Why the fit is not certified, and what to do; empty where it is."""
        if self.on_bound:
            return (
                "The runs do not determine the law: E, alpha or beta ran into its bound. Add runs that differ more in "
                "size and length."
            )
        if self.converged:
            return ""
        return (
            f"The fit is not certified: {self.agreeing} of {self.starts} starts agree and the gradient is "
            f"{self.gradient:.1e} of its terms. Look for wrong runs, or add more."
        )


@dataclass(frozen=True, slots=True)
class Outlier:
    """A run far off the fitted law."""

    number: int  # its place among the runs, counted from 1
    run: Run
    predicted_loss: float
    deviations: float  # log(loss / predicted) over the robust standard deviation of all runs


@dataclass(frozen=True, slots=True)
class HeldOut:
    """How well the smaller runs foretell the largest ones."""

    runs: int  # how many of the runs with the most compute were left out
    largest_error: float  # largest |log(predicted / loss)| over them: 0.01 is one percent of the loss
    mean_error: float  # mean of log(predicted / loss): above 0, the law is too pessimistic about larger runs


@dataclass(frozen=True, eq=False)
class ScalingLawFit:
    """A fitted law and its evidence."""

    law: ParametricLaw
    """The fitted law: pass it to :func:`~lightning_mp.planning.scaling_laws.optimum.compute_optimal` as ``law=``."""
    runs: tuple[Run, ...]
    certificate: Certificate
    noise: float
    """Robust standard deviation of log(loss / predicted) over the runs."""
    confidence: float
    """Share of the bootstrap inside an interval."""
    samples: Tensor
    """log A, log B, log E, alpha, beta of every bootstrap sample: shape (samples, 5), float64."""
    unconverged_samples: int
    """Bootstrap samples that did not converge. They are among the samples."""
    outliers: tuple[Outlier, ...]
    """Runs more than five robust standard deviations off the law. None is left out of the fit."""
    held_out: HeldOut | None
    """None when the runs are too few to leave any out."""

    @property
    def intervals(self) -> Mapping[str, Interval]:
        """Of E, A, B, alpha, beta, and of the exponent a of N = k C^a."""
        a, b, e, alpha, beta = self.samples.T
        values = {"E": e.exp(), "A": a.exp(), "B": b.exp(), "alpha": alpha, "beta": beta, "a": beta / (alpha + beta)}
        return {name: self._interval(value) for name, value in values.items()}

    def optimum_intervals(self, flops: float) -> Mapping[str, Interval]:
        """Intervals of the parameters, tokens and loss that are optimal for a compute budget."""
        a, b, e, alpha, beta = self.samples.T
        log_scale = (alpha.log() + a - beta.log() - b) / (alpha + beta)
        log_c = math.log(flops / FLOPS_PER_PARAMETER_AND_TOKEN)
        log_n = log_scale + beta / (alpha + beta) * log_c
        log_d = log_c - log_n
        loss = e.exp() + (a - alpha * log_n).exp() + (b - beta * log_d).exp()
        values = {"parameters": log_n.exp(), "tokens": log_d.exp(), "loss": loss}
        return {name: self._interval(value) for name, value in values.items()}

    def _interval(self, values: Tensor) -> Interval:
        tail = (1 - self.confidence) / 2
        low, high = values.quantile(torch.tensor([tail, 1 - tail], dtype=values.dtype)).tolist()
        return Interval(low, high)
