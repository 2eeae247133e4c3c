"""What a comparison found: figures, a table for people, plain values for machines, a picture."""

import math
import textwrap
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from lightning_mp.ground.core.cli_text import table_lines
from lightning_mp.ground.core.pictures import BLUE, GREEN, GREY, ORANGE, check_picture_ending
from lightning_mp.ground.core.quantities import format_bytes, format_quantity
from lightning_mp.monitors.comparison.paired_difference import PairedDifference
from lightning_mp.monitors.comparison.paired_runs import FinishedRun, PairedQuality
from lightning_mp.monitors.comparison.step_cost import StepCost

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MEMORY_THAT_COUNTS = 0.02  # less is as good as nothing
_COLOURS = {"not worse": GREEN, "worse": ORANGE, "cannot tell yet": BLUE}
_SMOOTHED_SHARE = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionComparison:
    """The result of a comparison; the first precision is the baseline."""

    costs: Mapping[str, StepCost]  # of each precision, by name
    quality: Mapping[str, PairedQuality]  # of each precision; empty without paired runs
    runs: tuple[FinishedRun, ...]  # the paired runs
    steps: int | None  # optimizer steps of each of them; None without
    monitor: str | None  # the validation metric that was compared; None for the training loss
    margin: float  # the increase of the loss that does not matter
    confidence: float  # of the intervals
    device: str  # what it ran on
    versions: Mapping[str, str]  # of torch, Lightning and this package
    gradient_reference: str  # the precision whose gradient the errors are against

    @property
    def baseline(self) -> str:
        """The name of the first precision."""
        return next(iter(self.costs))

    @property
    def candidates(self) -> tuple[str, ...]:
        """The names of the others."""
        return tuple(self.costs)[1:]

    def verdict(self, precision: str) -> str:
        """The verdict on the loss of one precision: "not worse", "worse" or "cannot tell yet"."""
        found = self.quality.get(precision)
        if found is None or found.difference is None:
            raise ValueError(
                f"There is no verdict on {precision!r}: pass steps= for paired runs, and name one of"
                f" {', '.join(self.candidates)}."
            )
        return found.difference.verdict

    def time_to_equal_loss(self, precision: str) -> float | None:
        """Time to the baseline's final loss over the baseline's time: time per batch times the steps it takes.

        None without paired runs, and where the loss was too flat to tell.
        """
        found = self.quality.get(precision)
        if found is None or found.steps_ratio is None:
            return None
        return found.steps_ratio * self.costs[precision].time_ratio

    @property
    def advice(self) -> tuple[str, ...]:
        """One sentence on each candidate: whether it pays on this machine, and for what."""
        return tuple(self._advice(name) for name in self.candidates)

    def _advice(self, name: str) -> str:
        cost, baseline = self.costs[name], self.costs[self.baseline]
        ratio = self.time_to_equal_loss(name)
        saved = 1 - cost.peak_bytes / baseline.peak_bytes
        found = self.quality.get(name)
        if found is not None and found.difference is not None and found.difference.verdict == "worse":
            return f"{name} does not pay here: {_how_much_worse(found.difference)}."
        memory = f"saves {saved:.0%} of the peak memory" if saved > _MEMORY_THAT_COUNTS else "saves no memory"
        fastest, slowest = cost.time_ratio_range
        if fastest == slowest:
            time = f"{name} takes {cost.time_ratio:.2f} times the time per batch in a single round, which may be chance"
            return f"{time}, and {memory}: time several rounds."
        if fastest < 1 <= slowest:
            time = f"{name} takes {fastest:.2f} to {slowest:.2f} times the time per batch, no clear gain, and {memory}"
        else:
            time = f"{name} takes {cost.time_ratio:.2f} times the time per batch and {memory}"
        if slowest >= 1:
            pays = "pays here only where memory is short" if saved > _MEMORY_THAT_COUNTS else "does not pay here"
            return f"{time}: it {pays}."
        if ratio is None:
            return f"{time}: it pays here."
        verb = "it pays here" if ratio < 1 else "it does not pay here"
        return f"{time}; {ratio:.2f} times the time to an equal loss: {verb}."

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON; null means unknown or not finite."""
        return {
            "device": self.device,
            "versions": dict(self.versions),
            "baseline": self.baseline,
            "steps": self.steps,
            "monitor": self.monitor,
            "margin": self.margin,
            "confidence": self.confidence,
            "gradient_reference": self.gradient_reference,
            "precisions": {name: self._precision_as_dict(name) for name in self.costs},
            "advice": list(self.advice),
        }

    def _precision_as_dict(self, name: str) -> dict[str, Any]:
        values: dict[str, Any] = {"cost": asdict(self.costs[name])}
        found = self.quality.get(name)
        if found is None:
            return values
        values["seeds"] = [run.seed for run in self.runs if run.precision == name]
        values["skipped_steps"] = [run.skipped_steps for run in self.runs if run.precision == name]
        values["final_losses"] = [_finite(loss) for loss in found.final_losses]
        if found.difference is not None:
            difference = found.difference
            values |= {
                "differences": [_finite(each) for each in difference.differences],
                "mean_difference": _finite(difference.mean),
                "interval": [_finite(end) for end in difference.interval],
                "verdict": difference.verdict,
                "more_seeds": difference.more_seeds,
                "steps_to_equal_loss": found.steps_ratio,
                "time_to_equal_loss": self.time_to_equal_loss(name),
            }
        return values

    def plot(self, path: str | Path) -> None:
        """Draws costs, and where there are paired runs their losses and differences; needs matplotlib."""
        draw_comparison(self, Path(path))

    @override
    def __str__(self) -> str:
        return self.text()

    def text(self, columns: int | None = None) -> str:
        """The tables and their conclusion, for lines of n characters; None for any length."""
        unit = self.costs[self.baseline].unit
        header = ["precision", "time", "ratio", "from", "to", f"{unit}/s", "memory", "error"]
        rows = [header]
        for name, cost in self.costs.items():
            error = "-" if cost.gradient_error is None else f"{cost.gradient_error:.1e}"
            ends = [f"{end:.2f}" for end in (cost.time_ratio, *cost.time_ratio_range)]
            seconds = f"{1e3 * cost.batch_seconds:.3g} ms"
            row = [name, seconds, *ends, format_quantity(cost.items_per_second), format_bytes(cost.peak_bytes), error]
            rows.append(row)
        lines = [f"One batch on {self.device}, ratios to {self.baseline}; memory at its peak; error of the gradient"]
        lines[0] += f" against {self.gradient_reference}"
        lines += table_lines(rows, columns)
        if self.quality:
            lines += ["", *self._quality_lines(columns)]
        advice = [line for each in self.advice for line in (textwrap.wrap(each, columns) if columns else [each])]
        return "\n".join([*lines, "", *advice])

    def _quality_lines(self, columns: int | None) -> list[str]:
        seeds = len(self.quality[self.baseline].final_losses)
        what = self.monitor or "training loss over the last tenth of the batches"
        percent = f"{self.confidence:.0%}"
        rows = [["precision", "loss", "difference", f"{percent} from", "to", "time to equal loss", "verdict"]]
        for name, found in self.quality.items():
            finite = [loss for loss in found.final_losses if math.isfinite(loss)]
            loss = f"{math.fsum(finite) / len(finite):.4f}" if finite else "-"
            row = [name, loss]
            if found.difference is None:
                rows.append([*row, "-", "-", "-", "1.00", "baseline"])
                continue
            values = (found.difference.mean, *found.difference.interval)
            time = self.time_to_equal_loss(name)
            row += [f"{value:+.4f}" if math.isfinite(value) else "-" for value in values]
            rows.append([*row, "-" if time is None else f"{time:.2f}", str(found.difference)])
        title = f"{what}, {seeds} paired seed{'s' if seeds != 1 else ''} of {self.steps} steps, margin {self.margin:g}"
        return [title, *table_lines(rows, columns, left=("verdict",)), *self._skip_lines(columns)]

    def _skip_lines(self, columns: int | None) -> list[str]:
        """Skipped steps change a short run more than a format does."""
        skipped = {name: sum(r.skipped_steps or 0 for r in self.runs if r.precision == name) for name in self.quality}
        of_all = len(self.quality[self.baseline].final_losses) * (self.steps or 0)
        said = [f"{name} {count:,} of {of_all:,}" for name, count in skipped.items() if count]
        if not said:
            return []
        text = f"Optimizer steps skipped after an overflow: {', '.join(said)}."
        return textwrap.wrap(text, columns) if columns else [text]


def _how_much_worse(difference: PairedDifference) -> str:
    if difference.diverged:
        return f"{difference.diverged} of {difference.seeds} runs diverged"
    low, high = difference.interval
    return f"its loss is higher by {difference.mean:.4f} ({low:.4f} to {high:.4f}), more than {difference.margin:g}"


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def draw_comparison(comparison: PrecisionComparison, path: Path) -> None:
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


def _draw_time(panel: "Axes", comparison: PrecisionComparison) -> None:
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
        panel.legend(edgecolor="white")  # over a bar


def _draw_memory(panel: "Axes", comparison: PrecisionComparison) -> None:
    names = list(comparison.costs)
    panel.barh(range(len(names)), [comparison.costs[name].peak_bytes / 2**20 for name in names], color=BLUE, alpha=0.8)
    panel.set(title="Peak memory", xlabel="MiB")
    panel.locator_params(axis="x", nbins=5)
    _named_rows(panel, names)


def _draw_differences(panel: "Axes", comparison: PrecisionComparison) -> None:
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


def _draw_losses(panel: "Axes", comparison: PrecisionComparison) -> None:
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
