"""The picture of a run, over tokens, and its final table."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from lightning_mp.core.messages import listed
from lightning_mp.demo.prepare import RunFolder
from lightning_mp.demo.settings import WITH_LOSS_SCALE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["SkippedStep", "Summary", "build_figure", "draw_report", "format_table", "smooth"]

#: The final training loss is a mean over this share of the steps, since single batches scatter.
_TAIL_SHARE = 0.05

_SKIPS_IN_TABLE = 5
_NAMES_IN_TABLE = 2


@dataclass(frozen=True)
class SkippedStep:
    """One optimizer step that was skipped.

    Attributes:
        step_index: Counted from 0, skipped ones included.
        loss_scale: The scale at that step.
        next_loss_scale: The scale after it, None if the run ended there.
        learning_rate: The rate at that step.
        next_learning_rate: The rate of the step after it, which is the same: the schedule holds.
        parameters: Names of the parameters with a non-finite gradient.
    """

    step_index: int
    loss_scale: float
    next_loss_scale: float | None
    learning_rate: float | None
    next_learning_rate: float | None
    parameters: tuple[str, ...]


@dataclass(frozen=True)
class Summary:
    """Figures of a run. Losses are in nats per token; a token is a byte.

    Attributes:
        tokens: Tokens trained on.
        budget_tokens: Tokens of the budget.
        optimizer_steps: Attempts, skipped ones included.
        skipped_steps: Attempts that did not change the weights.
        train_loss: Mean over the last 5% of the steps.
        validation_loss: The last one.
        tokens_per_second: Over the time in training, validation left out.
        mfu: Model FLOPs utilisation, None where the device's peak is not known.
        train_seconds: That time.
        peak_memory_bytes: Of one process; allocated on a CUDA device, else resident.
        device: What it ran on.
        skips: The skipped steps.
    """

    tokens: int
    budget_tokens: int
    optimizer_steps: int
    skipped_steps: int
    train_loss: float | None
    validation_loss: float | None
    tokens_per_second: float
    mfu: float | None
    train_seconds: float
    peak_memory_bytes: int
    device: str
    skips: tuple[SkippedStep, ...]

    @classmethod
    def of(cls, history: Mapping[str, Any], folder: Path) -> Self:
        """Works out the summary.

        Args:
            history: The content of ``history.json``.
            folder: Where the overflow reports stand.
        """
        steps = history["steps"]
        losses = steps["train_loss"]
        tail = losses[-max(1, round(_TAIL_SHARE * len(losses))) :]
        validation_losses = history["validation"]["loss"]
        return cls(
            tokens=history["tokens"],
            budget_tokens=history["budget_tokens"],
            optimizer_steps=len(losses),
            skipped_steps=sum(map(bool, steps["skipped"])),
            train_loss=sum(tail) / len(tail) if tail else None,
            validation_loss=validation_losses[-1] if validation_losses else None,
            tokens_per_second=history["tokens_per_second"] or 0.0,
            mfu=history["mfu"],
            train_seconds=history["train_seconds"],
            peak_memory_bytes=history["peak_memory_bytes"],
            device=history["device"],
            skips=tuple(_skips(steps, folder)),
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain values by name, with the losses in bits per byte besides."""
        bits = {
            f"{name}_bits_per_byte": None if loss is None else loss / math.log(2)
            for name, loss in (("train", self.train_loss), ("validation", self.validation_loss))
        }
        return asdict(self) | bits


def format_table(summary: Summary, folder: RunFolder) -> str:
    """The table for the terminal."""
    share = summary.tokens / summary.budget_tokens
    memory = "allocated on the GPU" if summary.device not in ("cpu", "mps") else "resident"
    rows = [
        ("tokens", f"{summary.tokens:,}"),
        ("budget", f"{summary.budget_tokens:,} ({'spent exactly' if share == 1 else f'{share:.1%} spent'})"),
        ("optimizer steps", f"{summary.optimizer_steps:,}"),
        ("skipped", f"{summary.skipped_steps:,}"),
        ("train loss", _loss(summary.train_loss)),
        ("validation loss", _loss(summary.validation_loss)),
        ("tokens per second", f"{summary.tokens_per_second:,.0f} on {summary.device}"),
        *([("MFU", f"{summary.mfu:.1%}")] if summary.mfu is not None else []),
        ("time in training", f"{summary.train_seconds:.1f} s"),
        ("peak memory", f"{summary.peak_memory_bytes / 2**20:,.0f} MiB {memory}"),
    ]
    rows += [("skipped step", text) for text in map(_describe_skip, summary.skips[:_SKIPS_IN_TABLE])]
    if len(summary.skips) > _SKIPS_IN_TABLE:
        rows.append(("", f"and {len(summary.skips) - _SKIPS_IN_TABLE} more, see {folder.summary.name}"))
    files = (folder.report, folder.summary, folder.sample, folder.path / "csv", folder.path / "tensorboard")
    rows.append(("results in", str(folder.path)))
    rows.append(("", ", ".join(file.name for file in (*files, folder.checkpoint) if file.exists())))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def _loss(loss: float | None) -> str:
    return "none" if loss is None else f"{loss:.3f} nats, {loss / math.log(2):.3f} bits per byte"


def _describe_skip(skip: SkippedStep) -> str:
    scale = f"loss scale {skip.loss_scale:g}"
    if skip.next_loss_scale is not None:
        scale += f" -> {skip.next_loss_scale:g}"
    text = f"{skip.step_index}: {scale}"
    if skip.learning_rate is not None and skip.next_learning_rate is not None:
        verb = "held at" if skip.learning_rate == skip.next_learning_rate else f"{skip.learning_rate:.3e} ->"
        text += f", learning rate {verb} {skip.next_learning_rate:.3e}"
    return f"{text}, not finite: {listed(skip.parameters, _NAMES_IN_TABLE) or 'unknown'}"


def _skips(steps: Mapping[str, Any], folder: Path) -> list[SkippedStep]:
    skips = []
    for index, skipped in enumerate(steps["skipped"]):
        if not skipped:
            continue
        report = folder / f"overflow_step_{index}.json"
        names = json.loads(report.read_text())["parameters"] if report.is_file() else []
        is_last = index + 1 == len(steps["skipped"])
        skips.append(
            SkippedStep(
                step_index=index,
                loss_scale=steps["loss_scale"][index],
                next_loss_scale=None if is_last else steps["loss_scale"][index + 1],
                learning_rate=steps["learning_rate"][index],
                next_learning_rate=None if is_last else steps["learning_rate"][index + 1],
                parameters=tuple(names),
            )
        )
    return skips


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
            # a run that was cut short fills the picture, and its title says how far it came
            panel.set_xlim(0, max(1, history["tokens"]) * 1.02)
            if history["tokens"] == history["budget_tokens"]:
                panel.axvline(history["budget_tokens"], color=_GREEN, linestyle=_DASHES, linewidth=1.6, label="budget")
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
    if precision in WITH_LOSS_SCALE:
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
    speed = history["tokens_per_second"] or 0.0
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
