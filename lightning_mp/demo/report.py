"""The picture of a run: loss, loss scale and learning rate against tokens."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["build_figure", "draw_report", "smooth"]

# Okabe and Ito's palette, told apart with every kind of colour blindness: https://jfly.uni-koeln.de/color/
_BLUE, _ORANGE, _GREEN, _PURPLE = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
_GREY, _LIGHT = "#555555", "#DDDDDD"
_DASHES = (0, (5, 3))

_STYLE: dict[Any, Any] = {
    "font.size": 11,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": _GREY,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": _LIGHT,
    "grid.linewidth": 0.8,
    "legend.frameon": False,
    "xtick.color": _GREY,
    "ytick.color": _GREY,
    "text.color": "#222222",
    "axes.labelcolor": "#222222",
}


def smooth(values: Sequence[float], half_life: float) -> list[float]:
    """Exponential moving average, corrected for its start (Kingma and Ba 2015, arXiv:1412.6980, section 3).

    Args:
        values: The series; entries that are not finite are left out of the average.
        half_life: After so many entries a value has half its weight.

    Example:
        >>> smooth([1.0, 1.0, 3.0], half_life=1.0)
        [1.0, 1.0, 2.142857142857143]
    """
    keep = 0.5 ** (1.0 / half_life)
    average = weight = 0.0
    smoothed = []
    for value in values:
        if math.isfinite(value):
            average = keep * average + (1 - keep) * value
            weight = keep * weight + (1 - keep)
        smoothed.append(average / weight if weight else math.nan)
    return smoothed


def draw_report(history: Mapping[str, Any], path: Path) -> None:
    """Draws a run and writes the picture as PNG.

    Args:
        history: The content of ``history.json``.
        path: The picture.
    """
    build_figure(history).savefig(path, dpi=150)


def build_figure(history: Mapping[str, Any]) -> "Figure":
    """The three panels, over one axis of tokens: loss; loss scale or gradient norm; learning rate."""
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with mpl.rc_context(_STYLE):
        # Not pyplot: it would choose a window system and keep the figure alive.
        figure = Figure(figsize=(9.5, 10.5), layout="constrained")
        FigureCanvasAgg(figure)
        loss, scale, rate = figure.subplots(3, 1, sharex=True, height_ratios=(2.2, 1, 1))
        _draw_loss(loss, history)
        _draw_scale(scale, history)
        _draw_learning_rate(rate, history)
        for panel in (loss, scale, rate):
            _mark_skips(panel, history)
            panel.axvline(history["budget_tokens"], color=_GREEN, linestyle=_DASHES, linewidth=1.6, label="budget")
            panel.set_xlim(0, history["budget_tokens"] * 1.02)
        loss.legend(loc="upper right", bbox_to_anchor=(0.97, 1.0))
        rate.set_xlabel("tokens trained on")
        rate.xaxis.set_major_formatter(_tokens_formatter())
        _write_title(figure, history)
    return figure


def _draw_loss(panel: "Axes", history: Mapping[str, Any]) -> None:
    tokens, losses = history["steps"]["tokens"], history["steps"]["train_loss"]
    panel.plot(tokens, losses, color=_BLUE, alpha=0.25, linewidth=0.8)
    panel.plot(tokens, smooth(losses, max(1.0, len(losses) / 120)), color=_BLUE, linewidth=2, label="train (smoothed)")
    validation = history["validation"]
    panel.plot(
        validation["tokens"], validation["loss"], "o-", color=_ORANGE, markersize=5, linewidth=1.2, label="validation"
    )
    panel.set_title("Loss")
    panel.set_ylabel("nats per byte")
    panel.secondary_yaxis("right", functions=(_nats_to_bits, _bits_to_nats)).set_ylabel("bits per byte")
    finite = [loss for loss in (*losses, *validation["loss"]) if math.isfinite(loss)]
    if finite:
        # a single batch far above a uniform guess would flatten the rest
        panel.set_ylim(min(finite) - 0.1, min(max(finite), math.log(256)) + 0.2)


def _draw_scale(panel: "Axes", history: Mapping[str, Any]) -> None:
    steps, precision = history["steps"], history["settings"]["precision"]
    skipped = sum(map(bool, steps["skipped"]))
    count = f"{skipped:,} of {len(steps['tokens']):,} steps skipped"
    if precision == "16-mixed":
        values, name, color = steps["loss_scale"], "loss scale", _BLUE
        panel.set_title(f"Loss scale: {count}")
        panel.set_yscale("log", base=2)
        known = [value for value in values if value]
        if known:
            panel.set_ylim(min(known) / 2.5, max(known) * 2.5)
        panel.step(steps["tokens"], [value or math.nan for value in values], where="pre", color=color, linewidth=1.8)
    else:
        values, name, color = steps["grad_norm"], "gradient norm", _BLUE
        panel.set_title(f"{precision} has no loss scale; gradient norm: {count}")
        if any(values):
            panel.set_yscale("log")
            panel.plot(steps["tokens"], [value or math.nan for value in values], color=color, linewidth=0.9)
        else:
            panel.text(0.5, 0.5, "not measured in 32-true", transform=panel.transAxes, ha="center", color=_GREY)
            panel.set_yticks([])
    panel.set_ylabel(name)


def _draw_learning_rate(panel: "Axes", history: Mapping[str, Any]) -> None:
    steps = history["steps"]
    tokens = steps["tokens"]
    rates = [math.nan if rate is None else rate for rate in steps["learning_rate"]]
    panel.plot(tokens, rates, color=_BLUE, linewidth=2)
    panel.set_title("Learning rate")
    panel.set_ylabel("learning rate")
    panel.set_ylim(bottom=0)
    panel.yaxis.set_major_formatter("{x:g}")
    micro_batch_tokens = history["plan"]["micro_batch_tokens"]
    for index in range(1, len(tokens) - 1):
        before = tokens[index - 1] - (tokens[index - 2] if index > 1 else 0)
        after = tokens[index] - tokens[index - 1]
        if after > before:
            panel.axvline(tokens[index - 1], color=_GREY, linestyle=":", linewidth=1.2)
            panel.annotate(
                f" {after // micro_batch_tokens} micro-batches per step",
                (tokens[index - 1], 0.06),
                xycoords=("data", "axes fraction"),
                color=_GREY,
                fontsize=9.5,
            )


def _mark_skips(panel: "Axes", history: Mapping[str, Any]) -> None:
    steps = history["steps"]
    at = [tokens for tokens, skipped in zip(steps["tokens"], steps["skipped"], strict=True) if skipped]
    for number, tokens in enumerate(at):
        label = "skipped step" if number == 0 else None
        panel.axvline(tokens, color=_PURPLE, linewidth=1.6, zorder=1.5, label=label)


def _write_title(figure: "Figure", history: Mapping[str, Any]) -> None:
    plan, settings = history["plan"], history["settings"]
    speed = history["tokens"] / history["train_seconds"] if history["train_seconds"] else 0.0
    devices = f"{settings['devices']} x {history['device']}" if settings["devices"] > 1 else history["device"]
    share = history["tokens"] / history["budget_tokens"]
    spent = "exactly its budget" if share == 1 else f"{share:.0%} of its budget"
    figure.suptitle(
        f"{plan['parameters']:,} parameters, {settings['precision']} on {devices}, {speed:,.0f} tokens/s\n"
        f"{history['tokens']:,} tokens: {spent} of {settings['tokens_per_parameter']:g} per parameter",
        fontsize=13,
        ha="left",
        x=0.01,
    )


def _nats_to_bits(nats: Any) -> Any:
    return nats / math.log(2)


def _bits_to_nats(bits: Any) -> Any:
    return bits * math.log(2)


def _tokens_formatter() -> Any:
    from matplotlib.ticker import EngFormatter

    return EngFormatter(sep=" ")
