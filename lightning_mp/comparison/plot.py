"""The picture of a comparison."""

import math
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_mp.core.pictures import BLUE, GREEN, GREY, ORANGE, check_picture_ending

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from lightning_mp.comparison.result import PrecisionComparison

_COLOURS = {"not worse": GREEN, "worse": ORANGE, "cannot tell yet": BLUE}
_SMOOTHED_SHARE = 0.02


def draw_comparison(comparison: "PrecisionComparison", path: Path) -> None:
    """Draws time and memory over the baseline's, and with paired runs differences per seed and loss over time."""
    check_picture_ending(path)
    from matplotlib.figure import Figure

    has_runs = bool(comparison.quality)
    rows = len(comparison.costs)
    height = max(2.6, 0.45 * rows + 1.6)
    figure = Figure(figsize=(10, height * (2 if has_runs else 1)), layout="constrained")
    panels = figure.subplots(2 if has_runs else 1, 2, squeeze=False)
    _draw_time(panels[0][0], comparison)
    _draw_memory(panels[0][1], comparison)
    if has_runs:
        _draw_differences(panels[1][0], comparison)
        _draw_losses(panels[1][1], comparison)
    figure.suptitle(f"Precisions on {comparison.device}, against {comparison.baseline}", fontsize="medium")
    figure.savefig(path, dpi=120)


def _named_rows(panel: "Axes", names: list[str]) -> None:
    panel.set_yticks(range(len(names)), names)
    panel.invert_yaxis()
    panel.grid(axis="x", color="#DDDDDD")
    panel.set_axisbelow(True)


def _draw_time(panel: "Axes", comparison: "PrecisionComparison") -> None:
    names = list(comparison.costs)
    for row, name in enumerate(names):
        cost = comparison.costs[name]
        low, high = cost.time_ratio_range
        panel.barh(row, cost.time_ratio, color=BLUE, alpha=0.8)
        panel.plot((low, high), (row, row), color="black", linewidth=1.2)
        equal = comparison.time_to_equal_loss(name)
        if equal is not None and row:
            panel.plot(equal, row, "D", color=ORANGE, label="to equal loss" if row == 1 else "_")
    panel.axvline(1, color=GREY, linestyle="--", linewidth=1)
    panel.set(title="Time per batch, over the baseline's", xlabel="ratio; the line spans the rounds")
    _named_rows(panel, names)
    if panel.get_legend_handles_labels()[0]:
        panel.legend(frameon=False)


def _draw_memory(panel: "Axes", comparison: "PrecisionComparison") -> None:
    names = list(comparison.costs)
    panel.barh(range(len(names)), [comparison.costs[name].peak_bytes / 2**20 for name in names], color=BLUE, alpha=0.8)
    panel.set(title="Peak memory", xlabel="MiB")
    _named_rows(panel, names)


def _draw_differences(panel: "Axes", comparison: "PrecisionComparison") -> None:
    names = list(comparison.candidates)
    for row, name in enumerate(names):
        difference = comparison.quality[name].difference
        assert difference is not None
        colour = _COLOURS[difference.verdict]
        finite = [each for each in difference.differences if math.isfinite(each)]
        panel.plot(finite, [row] * len(finite), "|", color=GREY, markersize=9)
        if all(map(math.isfinite, difference.interval)):
            panel.plot(difference.interval, (row, row), color=colour, linewidth=3, solid_capstyle="butt")
            panel.plot(difference.mean, row, "o", color=colour)
    panel.axvline(0, color=GREY, linewidth=1)
    panel.axvline(comparison.margin, color=ORANGE, linestyle="--", linewidth=1, label="margin")
    panel.set(title=f"Loss, difference to {comparison.baseline}", xlabel="ticks: seeds; line: interval of the mean")
    _named_rows(panel, [f"{name}\n{comparison.verdict(name)}" for name in names])
    panel.set_ylim(len(names) - 0.5, -0.5)
    panel.legend(loc="best", frameon=False)


def _draw_losses(panel: "Axes", comparison: "PrecisionComparison") -> None:
    for name, cost in comparison.costs.items():
        curves = [run.train_losses for run in comparison.runs if run.precision == name]
        mean = [math.fsum(batch) / len(batch) for batch in zip(*curves, strict=True)]
        width = max(1, round(_SMOOTHED_SHARE * len(mean)))
        smooth = [math.fsum(mean[at : at + width]) / width for at in range(len(mean) - width + 1)]
        times = [(at + width) * cost.batch_seconds for at in range(len(smooth))]
        panel.plot(times, smooth, linewidth=1.2, label=name)
    panel.set(title="Training loss, mean of the seeds", xlabel="seconds, at the measured time per batch")
    panel.grid(color="#DDDDDD")
    panel.legend(frameon=False, fontsize="small")
