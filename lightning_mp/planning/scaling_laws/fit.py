"""A scaling law fitted to your own runs: a certified minimum, intervals, outliers, and a test of its forecast.

The published refit of Besiroglu et al. 2024 is not reproduced here: it needs the runs that they read off a figure of
Hoffmann et al. 2022, which do not come with this package. With such a CSV, :func:`fit_scaling_law` follows the same
procedure: Huber loss of 1e-3 on log losses, summed, many starts, bootstrap of the runs.
"""

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_mp.ground.core.arguments import whole_number
from lightning_mp.ground.flops.chinchilla import FLOPS_PER_PARAMETER_AND_TOKEN
from lightning_mp.planning.scaling_laws.huber_fit import PARAMETERS, LogRuns, Solutions, minimise, starts
from lightning_mp.planning.scaling_laws.runs import Run, RunsLike, read_runs
from lightning_mp.planning.scaling_laws.scaling_law import ParametricLaw, TrainedRange


@dataclass(frozen=True, slots=True)
class Interval:
    """Percentiles of the bootstrap."""

    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Certificate:
    """The evidence that the fit is a minimum."""

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
    """A run far from the fitted law."""

    number: int  # its place among the runs, counted from 1
    run: Run
    predicted_loss: float
    deviations: float  # log(loss / predicted) over the robust standard deviation of all runs


@dataclass(frozen=True, slots=True)
class HeldOut:
    """How well a fit to the smaller runs predicts the largest ones."""

    runs: int  # how many of the runs with the most compute were left out
    largest_error: float  # largest |log(predicted / loss)| over them: 0.01 is one percent of the loss
    mean_error: float  # mean of log(predicted / loss): above 0, the law is too pessimistic about larger runs


@dataclass(frozen=True, eq=False)
class ScalingLawFit:
    """A fitted law and its evidence."""

    #: The fitted law: pass it to :func:`~lightning_mp.planning.scaling_laws.optimum.compute_optimal` as ``law=``.
    law: ParametricLaw
    runs: tuple[Run, ...]
    certificate: Certificate
    noise: float  #: Robust standard deviation of log(loss / predicted) over the runs.
    confidence: float  #: Share of the bootstrap inside an interval.
    samples: Tensor  #: log A, log B, log E, alpha, beta of every bootstrap sample: shape (samples, 5), float64.
    unconverged_samples: int  #: Bootstrap samples that did not converge. They are among the samples.
    #: Runs more than five robust standard deviations off the law. None is left out of the fit.
    outliers: tuple[Outlier, ...]
    held_out: HeldOut | None  #: None when the runs are too few to leave any out.

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


FEWEST_RUNS = PARAMETERS + 1
_FEWEST_SIZES = 3
_SAME_OBJECTIVE = 1e-6
_AGREEING_SHARE = 0.1
_OUTLIER_DEVIATIONS = 5.0
_HELD_OUT_SHARE = 0.1
_NORMAL_MAD = 1.4826
_CHUNK_ELEMENTS = 60_000  # problems times runs: a batch of bootstrap problems that fits the cache of one core


def fit_scaling_law(
    runs: RunsLike, *, bootstrap_samples: int = 4000, confidence: float = 0.95, seed: int = 0
) -> ScalingLawFit:
    """Fits L(N, D) = E + A / N^alpha + B / D^beta to finished runs.

    ::

        minimise sum over runs of Huber_1e-3( log L_predicted - log L )      Hoffmann et al. 2022, equation 3
        from 64 starts all over (alpha, beta); the best one is certified
        then again for every bootstrap sample of the runs, from there

    Runs should differ both in size at equal compute and in compute: isoFLOP groups of five sizes at four budgets do.
    Losses must be final ones, of runs whose learning rate schedule ended with the run.

    Args:
        runs: A CSV file or records, see :func:`~lightning_mp.planning.scaling_laws.runs.read_runs`.
        bootstrap_samples: Number of resamples of the runs for the intervals.
        confidence: Share of the resamples inside an interval, from percentile to percentile. Such intervals are a
            little wide: in 100 simulated fits each of 20 and of 36 runs, with Gaussian noise of 1% in the loss, those
            of 80, 90 and 95% contained the true constants in 84 to 93, 93 to 98 and 96 to 99.
        seed: Seed of the resampling.

    Raises:
        ValueError: Fewer than six runs, fewer than three model sizes or run lengths, or an invalid value.
        FileNotFoundError: There is no such file.

    Warns:
        UserWarning: The fit is not certified: the message says why.

    Example:
        From noiseless runs of a known law, the fit recovers that law.

        >>> from lightning_mp.planning.scaling_laws.scaling_law import LAWS
        >>> truth = LAWS["besiroglu"]
        >>> runs = [
        ...     Run(n, 1e19 * 4**k / (6 * n), truth.loss(n, 1e19 * 4**k / (6 * n)))
        ...     for k in range(4) for n in (1e8, 3e8, 1e9, 3e9)
        ... ]
        >>> fit = fit_scaling_law(runs, bootstrap_samples=100)
        >>> round(fit.law.E, 4), round(fit.law.alpha, 4), round(fit.law.beta, 4), fit.certificate.converged
        (1.8172, 0.3478, 0.3658, True)
    """
    _check_options(bootstrap_samples, confidence)
    material = read_runs(runs)
    _check_runs(material)
    logs = _logarithms(material)
    with _one_thread():
        best, certificate = _from_many_starts(logs)
        bootstrap = _bootstrap(logs, best, bootstrap_samples, seed)
        held_out = _hold_out(material, best)
    law = _law(best, material)
    predicted = [math.log(law.loss(run.parameters, run.tokens)) for run in material]
    residuals = logs.loss - torch.tensor(predicted, dtype=torch.float64)
    noise = float(_NORMAL_MAD * (residuals - residuals.median()).abs().median())
    return ScalingLawFit(
        law=law,
        runs=material,
        certificate=certificate,
        noise=noise,
        confidence=confidence,
        samples=bootstrap.theta,
        unconverged_samples=int((~bootstrap.converged).sum()),
        outliers=_outliers(material, residuals, noise, law),
        held_out=held_out,
    )


@contextmanager
def _one_thread() -> Iterator[None]:
    """The tensors are small: more threads only wait for each other, for long where the cores are busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _check_options(bootstrap_samples: int, confidence: float) -> None:
    whole_number(bootstrap_samples, "bootstrap_samples", minimum=100)
    if not 0 < confidence < 1:
        raise ValueError(f"`confidence` must lie between 0 and 1, got {confidence!r}. For 95%, write 0.95.")


def _check_runs(runs: Sequence[Run]) -> None:
    if len(runs) < FEWEST_RUNS:
        raise ValueError(
            f"A law of {PARAMETERS} constants needs at least {FEWEST_RUNS} runs, got {len(runs)}. Twenty or more, over "
            "several sizes and budgets, give useful intervals."
        )
    for name, values in (
        ("model sizes", {run.parameters for run in runs}),
        ("run lengths in tokens", {run.tokens for run in runs}),
    ):
        if len(values) < _FEWEST_SIZES:
            raise ValueError(
                f"The runs have {len(values)} different {name}, and the law needs at least {_FEWEST_SIZES}. "
                "Add runs that differ there."
            )


def _logarithms(runs: Sequence[Run]) -> LogRuns:
    columns = torch.tensor([[run.parameters, run.tokens, run.loss] for run in runs], dtype=torch.float64).log()
    return LogRuns(parameters=columns[:, 0], tokens=columns[:, 1], loss=columns[:, 2])


def _from_many_starts(logs: LogRuns) -> tuple[Tensor, Certificate]:
    start = starts(logs)
    solutions = minimise(logs, start, torch.ones(len(start), len(logs.loss), dtype=torch.float64))
    best = int(solutions.objective.argmin())
    lowest = solutions.objective[best]
    # The second term: objectives of a perfect fit are rounding, and all alike.
    same = solutions.objective <= lowest * (1 + _SAME_OBJECTIVE) + 1e-18 * len(logs.loss)
    agreeing, on_bound = int(same.sum()), bool(solutions.bound[best])
    certificate = Certificate(
        starts=len(start),
        agreeing=agreeing,
        gradient=float(solutions.gradient[best]),
        on_bound=on_bound,
        converged=bool(solutions.converged[best]) and agreeing >= _AGREEING_SHARE * len(start) and not on_bound,
    )
    if not certificate.converged:
        warnings.warn(certificate.problem, stacklevel=3)
    return solutions.theta[best], certificate


def _law(theta: Tensor, runs: Sequence[Run]) -> ParametricLaw:
    a, b, e, alpha, beta = theta.tolist()
    sizes, lengths = [run.parameters for run in runs], [run.tokens for run in runs]
    return ParametricLaw(
        name="fit",
        E=math.exp(e),
        A=math.exp(a),
        B=math.exp(b),
        alpha=alpha,
        beta=beta,
        source=f"fitted to {len(runs)} runs",
        counts="parameters as the runs count them",
        trained=TrainedRange(parameters=(min(sizes), max(sizes)), tokens=(min(lengths), max(lengths))),
    )


def _bootstrap(logs: LogRuns, best: Tensor, samples: int, seed: int) -> Solutions:
    generator = torch.Generator().manual_seed(seed)
    count = len(logs.loss)
    drawn = torch.randint(count, (samples, count), generator=generator)
    weights = torch.zeros(samples, count, dtype=torch.float64)
    weights.scatter_add_(1, drawn, torch.ones(samples, count, dtype=torch.float64))
    chunks = weights.split(max(1, _CHUNK_ELEMENTS // count))
    parts = [minimise(logs, best.expand(len(chunk), PARAMETERS), chunk) for chunk in chunks]
    return Solutions(**{name: torch.cat([vars(part)[name] for part in parts]) for name in vars(parts[0])})


def _outliers(runs: Sequence[Run], residuals: Tensor, noise: float, law: ParametricLaw) -> tuple[Outlier, ...]:
    # A fit to exact runs leaves rounding, among which nothing is an outlier.
    floor = max(noise, 1e-9)
    return tuple(
        Outlier(number, run, law.loss(run.parameters, run.tokens), residual / floor)
        for number, (run, residual) in enumerate(zip(runs, residuals.tolist(), strict=True), start=1)
        if abs(residual) > _OUTLIER_DEVIATIONS * floor
    )


def _hold_out(runs: Sequence[Run], best: Tensor) -> HeldOut | None:
    """Fits again without the tenth of the runs with the most compute, and predicts those."""
    ordered = sorted(runs, key=lambda run: run.flops)
    count = max(1, round(_HELD_OUT_SHARE * len(ordered)))
    kept, left_out = ordered[:-count], ordered[-count:]
    try:
        _check_runs(kept)
    except ValueError:
        return None
    logs = _logarithms(kept)
    start = torch.cat([starts(logs, per_exponent=3), best[None]])
    solutions = minimise(logs, start, torch.ones(len(start), len(kept), dtype=torch.float64))
    law = _law(solutions.theta[int(solutions.objective.argmin())], kept)
    errors = [math.log(law.loss(run.parameters, run.tokens) / run.loss) for run in left_out]
    return HeldOut(runs=count, largest_error=max(map(abs, errors)), mean_error=math.fsum(errors) / count)
