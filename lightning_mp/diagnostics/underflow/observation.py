"""What an observation of exponents says: shares lost, headroom and a better loss scale, per layer and over all."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

from lightning_mp.core.number_formats import FORMATS
from lightning_mp.core.saved_state import ANY_NUMBER, COUNT, Kind, holding, listed_of, named, or_none
from lightning_mp.diagnostics.underflow.exponents import ExponentHistogram, suggested_scale

__all__ = ["STATE_KINDS", "UnderflowObservation", "UnderflowSummary"]

_LAYERS_IN_TEXT = 10


@dataclass(frozen=True)
class UnderflowSummary:
    """One kind of values at one step, as shares between 0 and 1.

    Attributes:
        step_index: optimizer steps before it, skipped ones included (``trainer.global_step``).
        scale: what the values were multiplied by before they were judged.
        underflow_fraction: share of the non-zero values that the format rounds to zero.
        subnormal_fraction: share of the non-zero values that it keeps with fewer digits.
        zero_fraction: share of exact zeros among all values.
        headroom_doublings: how often the scale may double before the largest value overflows; -inf if one is not
            finite, inf if all are zero.
        suggested_scale: see :func:`lightning_mp.diagnostics.underflow.exponents.suggested_scale`; None for activations,
            which are not scaled.
    """

    step_index: int
    scale: float
    underflow_fraction: float
    subnormal_fraction: float
    zero_fraction: float
    headroom_doublings: float
    suggested_scale: float | None


@dataclass(frozen=True)
class UnderflowObservation:
    """What was seen at one optimizer step. ``print`` shows the layers that lose most; headroom is in doublings.

    Attributes:
        step_index: optimizer steps before it, skipped ones included.
        format: name of the number format.
        scale: what gradients were multiplied by.
        histograms: by kind ("gradients", "activations", "activation_gradients"), then by the name of the parameter or
            module.
    """

    step_index: int
    format: str
    scale: float
    histograms: dict[str, dict[str, ExponentHistogram]]

    def whole(self, kind: str = "gradients") -> ExponentHistogram:
        """All layers together."""
        return ExponentHistogram.sum_of(self.histograms[kind].values())

    def summary(self, kind: str = "gradients") -> UnderflowSummary:
        """The shares over all layers."""
        histogram = self.whole(kind)
        lost = histogram.fraction_lost(self.format)
        scaled = kind != "activations"
        return UnderflowSummary(
            self.step_index,
            self.scale if scaled else 1.0,
            lost.zero,
            lost.subnormal,
            histogram.zero_fraction,
            histogram.headroom_doublings(self.format),
            suggested_scale(histogram, self.format, self.scale) if scaled else None,
        )

    def __str__(self) -> str:
        lines = [f"Step {self.step_index}, {self.format} at scale {self.scale:g}"]
        for kind, by_name in self.histograms.items():
            ranked = sorted(
                ((name, h.fraction_lost(self.format), h) for name, h in by_name.items() if h.num_values),
                key=lambda row: (row[1].zero, row[1].subnormal),
                reverse=True,
            )
            shown = [("all", self.whole(kind).fraction_lost(self.format), self.whole(kind)), *ranked[:_LAYERS_IN_TEXT]]
            width = max(len(text) for text in (kind, *(name for name, _, _ in shown)))
            lines.append(f"{kind:<{width}}    lost  subnormal   zeros  largest  headroom")
            lines += [
                f"{name:<{width}}  {lost.zero:6.2%}    {lost.subnormal:7.2%}  {h.zero_fraction:6.1%}"
                f"  {h.largest:7.1e}  {h.headroom_doublings(self.format):+8g}"
                for name, lost, h in shown
            ]
            if len(ranked) > _LAYERS_IN_TEXT:
                lines.append(f"... and {len(ranked) - _LAYERS_IN_TEXT} more, which lose less")
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers and strings, for a checkpoint."""
        return asdict(self)

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> Self:
        """From :meth:`as_dict`."""
        histograms = {
            kind: {name: ExponentHistogram(**histogram) for name, histogram in by_name.items()}
            for kind, by_name in state["histograms"].items()
        }
        return cls(state["step_index"], state["format"], state["scale"], histograms)


_COUNTS = Kind(
    "whole numbers by exponent",
    lambda value: isinstance(value, dict) and all(isinstance(e, int) and COUNT.fits(n) for e, n in value.items()),
)
_HISTOGRAM = holding(
    {
        "counts": _COUNTS,
        "powers_of_two": _COUNTS,
        "num_zeros": COUNT,
        "num_nonfinite": COUNT,
        "largest": ANY_NUMBER,
    }
)
_OBSERVATION = holding(
    {
        "step_index": COUNT,
        "format": Kind("the name of a number format", lambda value: value in tuple(FORMATS)),
        "scale": ANY_NUMBER,
        "histograms": named(named(_HISTOGRAM)),
    }
)
_SUMMARY = holding({f.name: ANY_NUMBER for f in fields(UnderflowSummary)} | {"suggested_scale": or_none(ANY_NUMBER)})
#: What a checkpoint holds of a monitor: the latest observation as :meth:`UnderflowObservation.as_dict`, and a history.
STATE_KINDS = {"latest": or_none(_OBSERVATION), "history": listed_of(named(_SUMMARY))}
