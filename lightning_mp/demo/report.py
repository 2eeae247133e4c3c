"""What a run came to: the final table, and the picture over tokens."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_mp.core.messages import listed
from lightning_mp.core.pictures import BLUE, GREEN, GREY, ORANGE, PURPLE
from lightning_mp.demo.settings import SCALED_PRECISIONS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["build_figure", "draw_report", "format_table", "smooth", "summarise"]

#: The final training loss is a mean over this share of the steps, since single batches scatter.
_TAIL_SHARE = 0.05
_SKIPS_IN_TABLE = 5


def summarise(history: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The figures of a run, from ``history.json`` and the overflow reports in its folder.

    Losses are in nats per token; a token is a byte.
    """
    steps, validation = history["steps"], history["validation"]["loss"]
    tail = steps["train_loss"][-max(1, round(_TAIL_SHARE * len(steps["train_loss"]))) :]
    train_loss, validation_loss = sum(tail) / len(tail), validation[-1] if validation else None
    copied = ("tokens", "budget_tokens", "tokens_per_second", "mfu", "train_seconds", "peak_memory_bytes", "device")
    return {
        **{name: history[name] for name in copied},
        "optimizer_steps": len(steps["tokens"]),
        "skipped_steps": sum(steps["skipped"]),
        "train_loss": train_loss,
        "train_bits_per_byte": train_loss / math.log(2),
        "validation_loss": validation_loss,
        "validation_bits_per_byte": None if validation_loss is None else validation_loss / math.log(2),
        "skips": [_skip(steps, step, folder) for step, skipped in enumerate(steps["skipped"]) if skipped],
    }


def _skip(steps: Mapping[str, Any], step: int, folder: Path) -> dict[str, Any]:
    report = folder / f"overflow_step_{step}.json"
    skip = {"step_index": step, "parameters": json.loads(report.read_text())["parameters"] if report.is_file() else []}
    for name in ("loss_scale", "learning_rate"):
        skip[name], skip[f"next_{name}"] = (*steps[name], None)[step : step + 2]
    return skip


def format_table(summary: Mapping[str, Any], folder: Path) -> str:
    """The table for the terminal."""
    share = summary["tokens"] / summary["budget_tokens"]
    memory = "allocated on the GPU" if summary["device"] not in ("cpu", "mps") else "resident"
    skips = summary["skips"]
    rows = [
        ("tokens", f"{summary['tokens']:,}"),
        ("budget", f"{summary['budget_tokens']:,} ({'spent exactly' if share == 1 else f'{share:.1%} spent'})"),
        ("optimizer steps", f"{summary['optimizer_steps']:,}"),
        ("skipped", f"{summary['skipped_steps']:,}"),
        ("train loss", f"{_loss(summary['train_loss'])}, mean of the last {_TAIL_SHARE:.0%} of the steps"),
        ("validation loss", _loss(summary["validation_loss"])),
        ("tokens per second", f"{summary['tokens_per_second'] or 0:,.0f} on {summary['device']}"),
        *([("MFU", f"{summary['mfu']:.1%}")] if summary["mfu"] is not None else []),
        ("time in training", f"{summary['train_seconds']:.1f} s, validation left out"),
        ("peak memory", f"{summary['peak_memory_bytes'] / 2**20:,.0f} MiB {memory}"),
        *(("skipped step", _describe_skip(skip)) for skip in skips[:_SKIPS_IN_TABLE]),
        *([("", f"and {len(skips) - _SKIPS_IN_TABLE} more, see summary.json")] if len(skips) > _SKIPS_IN_TABLE else []),
        ("results in", str(folder)),
        ("", ", ".join(sorted(path.name for path in folder.iterdir()))),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def _loss(loss: float | None) -> str:
    return "none" if loss is None else f"{loss:.3f} nats, {loss / math.log(2):.3f} bits per byte"


def _describe_skip(skip: Mapping[str, Any]) -> str:
    text = f"{skip['step_index']}: loss scale {skip['loss_scale']:g}"
    if skip["next_loss_scale"] is not None:
        now, following = skip["learning_rate"], skip["next_learning_rate"]
        verb = "held at" if now == following else f"{now:.3e} ->"
        text += f" -> {skip['next_loss_scale']:g}, learning rate {verb} {following:.3e}"
    return f"{text}, not finite: {listed(skip['parameters'], 2) or 'unknown'}"


_STYLE: dict[Any, Any] = {"axes.titlelocation": "left", "axes.titleweight": "bold", "axes.grid": True}
_STYLE |= {"axes.spines.top": False, "axes.spines.right": False, "grid.color": "#DDDDDD", "legend.frameon": False}


def smooth(values: Sequence[float], half_life: float) -> list[float]:
    """Exponential moving average, corrected for its start (Kingma and Ba 2015, arXiv:1412.6980, section 3).

    After ``half_life`` entries a value has half its weight; entries that are not finite are left out.

    Example:
        >>> smooth([1.0, 1.0, 3.0], half_life=1.0)
        [1.0, 1.0, 2.142857142857143]
    """
    keep, average, weight, smoothed = 0.5 ** (1.0 / half_life), 0.0, 0.0, []
    for value in values:
        if math.isfinite(value):
            average, weight = keep * average + (1 - keep) * value, keep * weight + (1 - keep)
        smoothed.append(average / weight if weight else math.nan)
    return smoothed


def draw_report(history: Mapping[str, Any], path: Path) -> None:
    """Draws the content of ``history.json`` and writes the picture as PNG."""
    build_figure(history).savefig(path, dpi=150)


def build_figure(history: Mapping[str, Any]) -> "Figure":
    """Three panels over one axis of tokens: loss; loss scale or gradient norm; learning rate."""
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    tokens, budget, steps = history["tokens"], history["budget_tokens"], history["steps"]
    skips = [at for at, skipped in zip(steps["tokens"], steps["skipped"], strict=True) if skipped]
    with mpl.rc_context(_STYLE):
        # Not pyplot: it would choose a window system and keep the figure alive.
        figure = Figure(figsize=(9.5, 10.5), layout="constrained")
        loss, scale, rate = figure.subplots(3, 1, sharex=True, height_ratios=(2.2, 1, 1))
        _draw_loss(loss, history)
        _draw_scale(scale, history)
        _draw_learning_rate(rate, history)
        for panel in (loss, scale, rate):
            for number, at in enumerate(skips):
                panel.axvline(at, color=PURPLE, linewidth=1.6, zorder=1.5, label="_" * number + "skipped step")
            # a run that was cut short fills the picture, and its title says how far it came
            panel.set_xlim(0, max(1, tokens) * 1.02)
            if tokens == budget:
                panel.axvline(budget, color=GREEN, linestyle="--", linewidth=1.6, label="budget")
        loss.legend(loc="upper right", bbox_to_anchor=(0.97, 1.0))
        rate.set_xlabel("tokens trained on")
        rate.xaxis.set_major_formatter(EngFormatter(sep=" "))
        figure.suptitle(_title(history), ha="left", x=0.01)
    return figure


def _draw_loss(panel: "Axes", history: Mapping[str, Any]) -> None:
    tokens, losses, validation = history["steps"]["tokens"], history["steps"]["train_loss"], history["validation"]
    panel.plot(tokens, losses, color=BLUE, alpha=0.25, linewidth=0.8)
    panel.plot(tokens, smooth(losses, max(1.0, len(losses) / 120)), color=BLUE, linewidth=2, label="train (smoothed)")
    panel.plot(validation["tokens"], validation["loss"], "o-", color=ORANGE, markersize=5, label="validation")
    panel.set(title="Loss", ylabel="nats per byte")
    to_bits: Any = lambda nats: nats / math.log(2)  # noqa: E731
    to_nats: Any = lambda bits: bits * math.log(2)  # noqa: E731
    panel.secondary_yaxis("right", functions=(to_bits, to_nats)).set_ylabel("bits per byte")
    finite = [loss for loss in (*losses, *validation["loss"]) if math.isfinite(loss)]
    if finite:
        # a single batch far above a uniform guess would flatten the rest
        panel.set_ylim(min(finite) - 0.1, min(max(finite), math.log(256)) + 0.2)


def _draw_scale(panel: "Axes", history: Mapping[str, Any]) -> None:
    steps, precision = history["steps"], history["settings"]["precision"]
    count = f"{sum(steps['skipped']):,} of {len(steps['tokens']):,} steps skipped"
    if precision in SCALED_PRECISIONS:
        scales = steps["loss_scale"]
        panel.set(title=f"Loss scale: {count}", ylabel="loss scale", ylim=(min(scales) / 2.5, max(scales) * 2.5))
        panel.set_yscale("log", base=2)
        panel.step(steps["tokens"], scales, where="pre", color=BLUE)
        return
    panel.set(title=f"{precision} has no loss scale; gradient norm: {count}", ylabel="gradient norm")
    if not any(steps["grad_norm"]):
        panel.text(0.5, 0.5, f"not measured in {precision}", transform=panel.transAxes, ha="center", color=GREY)
        return
    panel.set_yscale("log")
    panel.plot(steps["tokens"], [norm or math.nan for norm in steps["grad_norm"]], color=BLUE, linewidth=0.9)


def _draw_learning_rate(panel: "Axes", history: Mapping[str, Any]) -> None:
    tokens, micro_batch_tokens = history["steps"]["tokens"], history["plan"]["micro_batch_tokens"]
    panel.plot(tokens, history["steps"]["learning_rate"], color=BLUE, linewidth=2)
    panel.set(title="Learning rate", ylabel="learning rate")
    panel.set_ylim(bottom=0)
    step_tokens = [after - before for before, after in zip([0, *tokens], tokens, strict=False)]
    for at, before, after in zip(tokens, step_tokens, step_tokens[1:], strict=False):
        if after > before:
            panel.axvline(at, color=GREY, linestyle=":", linewidth=1.2)
            text = f" {after // micro_batch_tokens} micro-batches per step"
            panel.annotate(text, (at, 0.06), xycoords=("data", "axes fraction"), color=GREY, fontsize=9.5)


def _title(history: Mapping[str, Any]) -> str:
    plan, settings = history["plan"], history["settings"]
    devices = f"{settings['devices']} x {history['device']}" if settings["devices"] > 1 else history["device"]
    share = history["tokens"] / history["budget_tokens"]
    spent = "exactly its budget" if share == 1 else f"{share:.0%} of its budget"
    return (
        f"{plan['parameters']:,} parameters, {settings['precision']} on {devices}, "
        f"{history['tokens_per_second'] or 0:,.0f} tokens/s\n"
        f"{history['tokens']:,} tokens: {spent} of {settings['tokens_per_parameter']:g} per parameter"
    )
