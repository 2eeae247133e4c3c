"""Plots of a fitted scaling law: runs on isoFLOP curves, and the compute-optimal frontier with its band."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_mp.ground.core.quantities import format_quantity
from lightning_mp.ground.flops.chinchilla import FLOPS_PER_PARAMETER_AND_TOKEN
from lightning_mp.planning.scaling_laws.fit import ScalingLawFit
from lightning_mp.planning.scaling_laws.runs import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SAME_BUDGET = 1.25  # runs within this factor of compute belong to one isoFLOP curve
_MOST_CURVES = 9
_SPARE = 1.1  # curves reach beyond the runs by this factor
_STYLE: dict[Any, Any] = {
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "svg.hashsalt": "lightning_mp",
}


def draw_fit(fit: ScalingLawFit, path: str | Path, flops: float | None = None) -> None:
    """Plots a fit and writes the image; the file name sets the format.

    Args:
        fit: A fit.
        path: The image file, such as "fit.png".
        flops: Compute at which the frontier ends; None uses ten times the largest run.
    """
    build_figure(fit, flops).savefig(path, dpi=150)


def build_figure(fit: ScalingLawFit, flops: float | None = None) -> "Figure":
    """Two panels: loss against parameters at equal compute; best parameters and tokens against compute.

    A fit that is not certified has the first one only, and says so in its title.
    """
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    end = flops or 10 * max(run.flops for run in fit.runs)
    with mpl.rc_context(_STYLE):
        # Not pyplot: it would choose a window system and keep the figure alive.
        figure = Figure(figsize=(12, 5.2), layout="constrained")
        FigureCanvasAgg(figure)
        if not fit.certificate.converged:
            figure.suptitle(f"NOT CERTIFIED\n{fit.certificate.problem}", color="tab:red", wrap=True)
            _draw_iso_flops(figure.subplots(), fit)
            return figure
        curves, frontier = figure.subplots(1, 2)
        _draw_iso_flops(curves, fit)
        _draw_frontier(frontier, fit, end)
    return figure


def budgets_of(runs: tuple[Run, ...]) -> list[float]:
    """The budgets at which curves are drawn: where runs share one, those; else spread over all of them.

    >>> runs = [Run(n, c / (6 * n), 3.0) for c in (1e18, 1e19) for n in (1e7, 2e7, 3e7)]
    >>> [f"{budget:.0e}" for budget in budgets_of(tuple(runs))]
    ['1e+18', '1e+19']
    """
    groups: list[list[float]] = []
    for flops in sorted(run.flops for run in runs):
        if groups and flops < groups[-1][0] * _SAME_BUDGET:
            groups[-1].append(flops)
        else:
            groups.append([flops])
    if len(groups) <= _MOST_CURVES:
        return [math.exp(math.fsum(map(math.log, group)) / len(group)) for group in groups]
    low, high = groups[0][0], groups[-1][-1]
    return [low * (high / low) ** ((index + 0.5) / 6) for index in range(6)]


def _draw_iso_flops(panel: "Axes", fit: ScalingLawFit) -> None:
    from matplotlib import colormaps

    colors, law = colormaps["viridis"], fit.law
    all_flops = [run.flops for run in fit.runs]
    low, high = math.log(min(all_flops)), math.log(max(all_flops))

    def color(flops: float) -> tuple[float, float, float, float]:
        # The bright end of the colour map does not show on white.
        return colors(0.88 * (math.log(flops) - low) / max(high - low, 1e-9))

    outliers = {outlier.number for outlier in fit.outliers}
    for number, run in enumerate(fit.runs, start=1):
        marker, size = ("x", 30) if number in outliers else ("o", 12)
        panel.scatter(run.parameters, run.loss, color=color(run.flops), marker=marker, s=size, linewidths=1.2)
    ratios = [run.tokens / run.parameters for run in fit.runs]
    for budget in budgets_of(fit.runs):
        # As far as the runs go in tokens per parameter, and a little more.
        first, last = (
            math.sqrt(budget / (FLOPS_PER_PARAMETER_AND_TOKEN * ratio)) for ratio in (max(ratios), min(ratios))
        )
        first, last = first / _SPARE, last * _SPARE
        sizes = [first * (last / first) ** (step / 100) for step in range(101)]
        losses = [law.loss(size, budget / (FLOPS_PER_PARAMETER_AND_TOKEN * size)) for size in sizes]
        panel.plot(sizes, losses, color=color(budget), linewidth=1.4, label=f"{format_quantity(budget)} FLOPs")
        best, tokens = law.frontier.optimum(budget)
        if first <= best <= last:
            panel.plot(best, law.loss(best, tokens), "*", color=color(budget), markersize=11, markeredgecolor="black")
    panel.set(
        xscale="log", xlabel="parameters N", ylabel="loss, nats per token", title="Runs, and the law at equal compute"
    )
    panel.plot([], [], "k*", markersize=9, label="compute-optimal")
    if outliers:
        panel.plot([], [], "kx", markersize=6, label="outlier", linestyle="none")
    panel.legend(loc="upper right")


def _draw_frontier(panel: "Axes", fit: ScalingLawFit, end: float) -> None:
    all_flops = [run.flops for run in fit.runs]
    start = min(all_flops)
    budgets = [start * (end / start) ** (step / 60) for step in range(61)]
    intervals = [fit.optimum_intervals(budget) for budget in budgets]
    optima = [fit.law.frontier.optimum(budget) for budget in budgets]
    for index, (name, color) in enumerate((("parameters", "tab:blue"), ("tokens", "tab:orange"))):
        exponent = (fit.law.frontier.exponent, 1 - fit.law.frontier.exponent)[index]
        panel.plot(budgets, [best[index] for best in optima], color=color, label=f"{name}: C^{exponent:.3f}")
        panel.fill_between(
            budgets,
            [row[name].low for row in intervals],
            [row[name].high for row in intervals],
            color=color,
            alpha=0.2,
            linewidth=0,
            label=f"{100 * fit.confidence:g}% of the bootstrap",
        )
    panel.axvline(max(all_flops), color="grey", linestyle=":", label="largest run")
    panel.set(
        xscale="log", yscale="log", xlabel="compute C = 6 N D, FLOPs", title="Compute-optimal parameters and tokens"
    )
    panel.legend(loc="upper left")
