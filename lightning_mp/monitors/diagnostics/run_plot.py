"""The picture of a run over its tokens: loss, loss scale or gradient norm, learning rate, and the steps skipped."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_mp.ground.core.pictures import BLUE, GREEN, GREY, ORANGE, PURPLE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_STYLE: dict[Any, Any] = {"axes.titlelocation": "left", "axes.titleweight": "bold", "axes.grid": True}
_STYLE |= {"axes.spines.top": False, "axes.spines.right": False, "grid.color": "#DDDDDD", "legend.frameon": False}


@dataclass(frozen=True)
class RunPlot:
    """A run, step by step, in three panels over one axis of tokens."""

    steps: Mapping[str, Sequence[Any]]
    validation: Mapping[str, Sequence[float]]
    precision: str
    has_loss_scale: bool
    micro_batch_tokens: int
    budget_tokens: int | None = None
    title: str = ""
    token: str = "token"
    highest_loss: float = math.inf

    def write(self, path: Path) -> None:
        """Writes the picture, in the format of the path's ending."""
        self.build_figure().savefig(path, dpi=150)

    def build_figure(self) -> "Figure":
        """The picture as a figure of matplotlib."""
        import matplotlib as mpl
        from matplotlib.figure import Figure
        from matplotlib.ticker import EngFormatter

        end = max(1, *self.steps["tokens"])
        with mpl.rc_context(_STYLE):
            # Not pyplot: it would choose a window system and keep the figure alive.
            figure = Figure(figsize=(9.5, 10.5), layout="constrained")
            loss, scale, rate = figure.subplots(3, 1, sharex=True, height_ratios=(2.2, 1, 1))
            self._draw_loss(loss)
            self._draw_scale(scale)
            self._draw_learning_rate(rate)
            for panel in (loss, scale, rate):
                for number, at in enumerate(self._skips()):
                    panel.axvline(at, color=PURPLE, linewidth=1.6, zorder=1.5, label="_" * number + "skipped step")
                # a run that was cut short fills the picture
                panel.set_xlim(0, end * 1.02)
                if end == self.budget_tokens:
                    panel.axvline(end, color=GREEN, linestyle="--", linewidth=1.6, label="budget")
            loss.legend(loc="upper right", bbox_to_anchor=(0.97, 1.0))
            rate.set_xlabel("tokens trained on")
            rate.xaxis.set_major_formatter(EngFormatter(sep=" "))
            figure.suptitle(self.title, ha="left", x=0.01)
        return figure

    def _skips(self) -> list[int]:
        return [at for at, skipped in zip(self.steps["tokens"], self.steps["skipped"], strict=True) if skipped]

    def _draw_loss(self, panel: "Axes") -> None:
        tokens, losses, validation = self.steps["tokens"], self.steps["train_loss"], self.validation
        smoothed = smooth(losses, max(1.0, len(losses) / 120))
        panel.plot(tokens, losses, color=BLUE, alpha=0.25, linewidth=0.8)
        panel.plot(tokens, smoothed, color=BLUE, linewidth=2, label="train (smoothed)")
        panel.plot(validation["tokens"], validation["loss"], "o-", color=ORANGE, markersize=5, label="validation")
        panel.set(title="Loss", ylabel=f"nats per {self.token}")
        to_bits: Any = lambda nats: nats / math.log(2)  # noqa: E731
        to_nats: Any = lambda bits: bits * math.log(2)  # noqa: E731
        panel.secondary_yaxis("right", functions=(to_bits, to_nats)).set_ylabel(f"bits per {self.token}")
        finite = [loss for loss in (*losses, *validation["loss"]) if math.isfinite(loss)]
        if finite:
            panel.set_ylim(min(finite) - 0.1, min(max(finite), self.highest_loss) + 0.2)

    def _draw_scale(self, panel: "Axes") -> None:
        tokens, scales, norms = (self.steps[column] for column in ("tokens", "loss_scale", "grad_norm"))
        count = f"{len(self._skips()):,} of {len(tokens):,} steps skipped"
        if self.has_loss_scale:
            panel.set(title=f"Loss scale: {count}", ylabel="loss scale", ylim=(min(scales) / 2.5, max(scales) * 2.5))
            panel.set_yscale("log", base=2)
            panel.step(tokens, scales, where="pre", color=BLUE)
            return
        panel.set(title=f"{self.precision} has no loss scale; gradient norm: {count}", ylabel="gradient norm")
        if not any(norms):
            text = f"not measured in {self.precision}"
            panel.text(0.5, 0.5, text, transform=panel.transAxes, ha="center", color=GREY)
            return
        panel.set_yscale("log")
        panel.plot(tokens, [norm or math.nan for norm in norms], color=BLUE, linewidth=0.9)

    def _draw_learning_rate(self, panel: "Axes") -> None:
        tokens = self.steps["tokens"]
        panel.plot(tokens, self.steps["learning_rate"], color=BLUE, linewidth=2)
        panel.set(title="Learning rate", ylabel="learning rate")
        panel.set_ylim(bottom=0)
        step_tokens = [after - before for before, after in zip([0, *tokens], tokens, strict=False)]
        for at, before, after in zip(tokens, step_tokens, step_tokens[1:], strict=False):
            if after > before:
                panel.axvline(at, color=GREY, linestyle=":", linewidth=1.2)
                text = f" {after // self.micro_batch_tokens} micro-batches per step"
                panel.annotate(text, (at, 0.06), xycoords=("data", "axes fraction"), color=GREY, fontsize=9.5)


def smooth(values: Sequence[float], half_life: float) -> list[float]:
    """Exponential moving average, corrected for its start (Kingma and Ba 2015, arXiv:1412.6980, section 3).

    After ``half_life`` entries a value has half its weight; entries that are not finite are left out.

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
