"""Pictures of exponent histograms, with the range of a number format marked.

The first is laid out like Fig. 3 of Micikevicius et al., "Mixed Precision Training", 2017,
https://arxiv.org/abs/1710.03740: the share of values in each bin, the zeros apart on the left.
"""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lightning_mp.ground.core.bit_layouts import NumberFormat
from lightning_mp.ground.core.number_formats import FormatLike
from lightning_mp.ground.core.pictures import BLUE, GREY, ORANGE, YELLOW
from lightning_mp.monitors.diagnostics.underflow.exponents import ExponentHistogram, narrow_format
from lightning_mp.monitors.diagnostics.underflow.observation import UnderflowObservation

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LOST, _SUBNORMAL, _NORMAL, _ZEROS = ORANGE, YELLOW, BLUE, GREY
_STYLE: dict[Any, Any] = {"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}
_ZERO_GAP = 3
_MAX_LAYERS = 60


def plot_exponents(histogram: ExponentHistogram, target: FormatLike = "fp16", title: str = "") -> "Figure":
    """Share of values by exponent.

    Bars are coloured by what the format does to them: lost (rounded to zero), subnormal, normal, overflow. The shares
    on top are of the non-zero values. The bar of zeros is split where it would flatten the rest.
    """
    row = narrow_format(target)
    figure, axes = _new_figure((10, 4.5))
    low, normal, top = _limits(row)
    total = max(histogram.num_values, 1)
    shares = {e: 100 * number / total for e, number in histogram.counts.items()}
    left = min([low - 2, *shares])
    for e, share in shares.items():
        axes.bar(e + 0.5, share, width=0.9, color=_color(e, low, normal, top))
    zeros_at = left - _ZERO_GAP
    axes.bar(zeros_at + 0.5, 100 * histogram.zero_fraction, width=1.4, color=_ZEROS)
    lost = histogram.fraction_lost(row)
    normals = 1 - lost.zero - lost.subnormal - lost.overflow if lost.count else 0.0
    under_name = [f"\n{100 * share:.3g}%" for share in (lost.zero, lost.subnormal, normals, lost.overflow)]
    _mark_format(axes, row, left, max([top + 2, *shares]) + 1, under_name)
    step = max(1, math.ceil((max([top, *shares]) - left) / 20))
    ticks = list(range(-(-left // step) * step, max([top + 1, *shares]) + 2, step))
    axes.set_xticks([zeros_at + 0.5, *ticks], ["zero", *(f"$2^{{{e}}}$" for e in ticks)])
    axes.set_xlim(zeros_at - 1, max([top + 2, *shares]) + 1.5)
    axes.set_xlabel("magnitude of a value; each bar is one power of two wide; shares on top leave zeros out")
    axes.set_ylabel("% of all values")
    # The zeros may be most of all and would flatten the rest.
    highest = 1.25 * max(shares.values(), default=100.0)
    axes.set_ylim(0, highest)
    zeros = 100 * histogram.zero_fraction
    axes.text(zeros_at + 0.5, min(zeros, highest) + 0.02 * highest, f"{zeros:.3g}%", ha="center", fontsize=9)
    axes.set_title(title, loc="left", fontsize=11, pad=34)
    return figure


def plot_exponents_by_layer(
    histograms: Mapping[str, ExponentHistogram], target: FormatLike = "fp16", title: str = ""
) -> "Figure":
    """One line per layer: how dark a field is says which share of the layer's non-zero values has that exponent."""
    row = narrow_format(target)
    shown = _worst(histograms, row)
    figure, axes = _new_figure((10, 1.8 + 0.22 * max(len(shown), 3)))
    low, _, top = _limits(row)
    exponents = [e for name in shown for e in histograms[name].counts]
    left, right = min([low - 2, *exponents]), max([top + 2, *exponents])
    shares = [
        [histograms[name].counts.get(e, 0) / max(histograms[name].num_finite, 1) for e in range(left, right + 1)]
        for name in shown
    ]
    image = axes.imshow(
        shares or [[0.0]],
        aspect="auto",
        cmap="Blues",
        vmin=0.0,
        vmax=0.5,
        interpolation="nearest",
        extent=(left, right + 1, len(shown) - 0.5, -0.5),
    )
    _mark_format(axes, row, left, right + 1)
    axes.set_yticks(range(len(shown)), shown, fontsize=8)
    step = max(1, math.ceil((right - left) / 20))
    ticks = list(range(-(-left // step) * step, right + 2, step))
    axes.set_xticks(ticks, [f"$2^{{{e}}}$" for e in ticks])
    axes.set_xlabel("magnitude of a value")
    figure.colorbar(image, ax=axes, label="share of non-zero values", pad=0.01, extend="max")
    more = f" ({len(shown)} of {len(histograms)} layers, by share lost)" if len(shown) < len(histograms) else ""
    axes.set_title(title + more, loc="left", fontsize=11, pad=22)
    return figure


def plot_observation(
    observation: UnderflowObservation, target: FormatLike, kind: str = "gradients", *, by_layer: bool = False
) -> "Figure":
    """One kind of values of an observation: all layers together, or one line per layer of which values were counted."""
    scaled = "" if kind == "activations" else f", times {observation.scale:.10g}"
    title = f"{kind.replace('_', ' ').capitalize()} of optimizer step {observation.step_index}{scaled}"
    if by_layer:
        counted = {name: histogram for name, histogram in observation.histograms[kind].items() if histogram.num_values}
        if others := len(observation.histograms[kind]) - len(counted):
            title += f"; {others} that pass no 16 bit are left out"
        return plot_exponents_by_layer(counted, target, title)
    return plot_exponents(observation.whole(kind), target, title)


def add_to_tensorboard(writer: Any, tag: str, histogram: ExponentHistogram, step_index: int) -> None:
    """Adds the non-zero finite values to TensorBoard; the axis is the binary logarithm of their magnitude."""
    if not histogram.counts:
        return
    exponents = range(min(histogram.counts), max(histogram.counts) + 1)
    counts = [histogram.counts.get(e, 0) for e in exponents]
    writer.add_histogram_raw(
        tag,
        min=exponents[0],
        max=exponents[-1] + 1,
        num=sum(counts),
        sum=sum(e * n for e, n in zip(exponents, counts, strict=True)),
        sum_squares=sum(e * e * n for e, n in zip(exponents, counts, strict=True)),
        bucket_limits=[e + 1 for e in exponents],
        bucket_counts=counts,
        global_step=step_index,
    )


def _new_figure(size: tuple[float, float]) -> "tuple[Figure, Axes]":
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with mpl.rc_context(_STYLE):
        # Not pyplot: it would choose a window system and keep the figure alive.
        figure = Figure(figsize=size, layout="constrained")
        FigureCanvasAgg(figure)
        return figure, figure.subplots()


def _limits(row: NumberFormat) -> tuple[int, int, int]:
    """Exponents: of the smallest value that is kept (save its tie), of the smallest normal, past the largest."""
    return tuple(  # type: ignore[return-value]  # three of them
        math.frexp(value)[1] - 1 for value in (row.largest_rounded_to_zero, row.smallest_normal, 2 * row.largest_finite)
    )


def _color(exponent: int, low: int, normal: int, top: int) -> str:
    if exponent < low or exponent >= top:
        return _LOST
    return _SUBNORMAL if exponent < normal else _NORMAL


def _mark_format(axes: "Axes", row: NumberFormat, left: float, right: float, under_name: Sequence[str] = ()) -> None:
    low, normal, top = _limits(row)
    parts = [
        (left, low, _LOST, "lost"),
        (low, normal, _SUBNORMAL, "subnormal"),
        (normal, top, _NORMAL, f"{row.name} normal"),
        (top, right, _LOST, "overflow"),
    ]
    for (start, end, color, name), under in zip(parts, under_name or [""] * len(parts), strict=True):
        if under:
            axes.axvspan(start, end, color=color, alpha=0.07, linewidth=0)
        axes.text(
            (start + end) / 2,
            1.01,
            name + under,
            color=color,
            transform=axes.get_xaxis_transform(),
            ha="center",
            va="bottom",
            fontsize=9,
        )
    for limit in (low, normal, top):
        axes.axvline(limit, color="#222222", linewidth=0.9, linestyle=(0, (4, 3)))


def _worst(histograms: Mapping[str, ExponentHistogram], row: NumberFormat) -> list[str]:
    names = list(histograms)
    if len(names) <= _MAX_LAYERS:
        return names
    chosen = set(sorted(names, key=lambda name: histograms[name].fraction_lost(row).zero, reverse=True)[:_MAX_LAYERS])
    return [name for name in names if name in chosen]
