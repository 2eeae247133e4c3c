"""What an observation of exponents says: shares lost, headroom and a better loss scale, per layer and over all."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Self

import torch
from torch import Tensor
from typing_extensions import override

from lightning_mp.ground.core.bit_layouts import FORMATS
from lightning_mp.ground.core.devices import sent_to
from lightning_mp.ground.core.messages import listed
from lightning_mp.ground.core.saved_state import ANY_NUMBER, COUNT, Schema, holding, listed_of, named, or_none
from lightning_mp.ground.core.text_columns import aligned
from lightning_mp.monitors.diagnostics.underflow.exponents import ExponentHistogram, ExponentTable, suggested_scale

_LAYERS_IN_TEXT = 10


@dataclass(frozen=True)
class UnderflowSummary:
    """One kind of values at one step, as shares between 0 and 1."""

    step_index: int  # optimizer steps before it, skipped ones included (`trainer.global_step`)
    scale: float  # what the values were multiplied by before they were judged
    underflow_fraction: float  # share of the non-zero values that the format rounds to zero
    subnormal_fraction: float  # share of the non-zero values that it keeps with fewer digits
    zero_fraction: float  # share of exact zeros among all values
    # how often the scale may double before the largest value overflows; -inf if one is not finite, inf if all are zero
    headroom_doublings: float
    # see `suggested_scale` of lightning_mp.monitors.diagnostics.underflow.exponents; None for activations, not scaled
    suggested_scale: float | None


def logged_numbers(summaries: Mapping[str, UnderflowSummary], suggested_scale: float | None) -> dict[str, float]:
    """What a monitor logs of the kinds that it watches; the suggestion under the first one. Infinite ones are not."""
    numbers: dict[str, float | None] = {}
    for kind, summary in summaries.items():
        behind = "" if kind == "gradients" else f"/{kind}"
        for name in ("underflow_fraction", "subnormal_fraction", "zero_fraction", "headroom_doublings"):
            numbers[f"mp/{name}{behind}"] = getattr(summary, name)
        numbers.setdefault(f"mp/suggested_scale{behind}", suggested_scale if kind == next(iter(summaries)) else None)
    return {name: value for name, value in numbers.items() if value is not None and math.isfinite(value)}


@dataclass(frozen=True)
class UnderflowObservation:
    """What was seen at one optimizer step. ``print`` shows the layers that lose most; headroom is in doublings."""

    step_index: int  #: optimizer steps before it, skipped ones included.
    format: str  #: name of the number format.
    scale: float  #: what gradients were multiplied by.
    #: by kind ("gradients", "activations", "activation_gradients"), then by the name of the parameter or module.
    #: Parameters in ``kept_in_fp32`` have an empty one.
    histograms: dict[str, dict[str, ExponentHistogram]]
    #: largest magnitude that backward held in 16 bit, times the scale, on any rank and over all micro-batches: what
    #: decides about overflow. None where no 16-bit gradient was seen.
    largest_in_backward: float | None = None
    #: parameters whose gradients were never in 16 bit, on this rank; they are not judged.
    kept_in_fp32: Sequence[str] = ()

    def whole(self, kind: str = "gradients") -> ExponentHistogram:
        """All layers together."""
        return ExponentHistogram.sum_of(self.histograms[kind].values())

    def summary(self, kind: str = "gradients") -> UnderflowSummary:
        """The shares over all layers."""
        histogram = self.whole(kind)
        lost = histogram.fraction_lost(self.format)
        held = self._as_held(kind)
        scaled = kind != "activations"
        return UnderflowSummary(
            self.step_index,
            self.scale if scaled else 1.0,
            lost.zero,
            lost.subnormal,
            histogram.zero_fraction,
            held.headroom_doublings(self.format),
            suggested_scale(held, self.format, self.scale) if scaled else None,
        )

    def _as_held(self, kind: str) -> ExponentHistogram:
        """What decides about overflow: of gradients, the largest that backward held in 16 bit, where it was seen."""
        histogram = self.whole(kind)
        if kind != "gradients" or self.largest_in_backward is None:
            return histogram
        if math.isfinite(self.largest_in_backward):
            return replace(histogram, largest=self.largest_in_backward, num_nonfinite=0)
        return replace(histogram, num_nonfinite=1)

    @override
    def __str__(self) -> str:
        lines = [f"Step {self.step_index}, {self.format} at scale {self.scale:.10g}"]
        for kind, by_name in self.histograms.items():
            ranked = sorted(
                ((name, h.fraction_lost(self.format), h) for name, h in by_name.items() if h.num_values),
                key=lambda row: (row[1].zero, row[1].subnormal),
                reverse=True,
            )
            shown = [
                ("all", self.whole(kind).fraction_lost(self.format), self._as_held(kind)),
                *ranked[:_LAYERS_IN_TEXT],
            ]
            rows = [
                (
                    name,
                    f"{lost.zero:6.2%}",
                    f"{lost.subnormal:.2%}",
                    f"{h.zero_fraction:6.1%}",
                    f"{h.largest:.1e}",
                    f"{h.headroom_doublings(self.format):+g}",
                )
                for name, lost, h in shown
            ]
            lines += aligned([(kind, "lost", "subnormal", "zeros", "largest", "headroom"), *rows])
            whole = self.whole(kind)
            if whole.num_nonfinite:
                lines.append(f"Not finite: {whole.num_nonfinite / whole.num_values:.2%}. The table is of the others.")
            if len(ranked) > _LAYERS_IN_TEXT:
                lines.append(f"... and {len(ranked) - _LAYERS_IN_TEXT} more, which lose less")
        if self.kept_in_fp32:
            names = listed(self.kept_in_fp32, _LAYERS_IN_TEXT)
            lines.append(f"Not counted, because their gradients are never in 16 bit: {names}")
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers and strings, for a checkpoint."""
        return asdict(self)

    @classmethod
    def unpack(
        cls,
        step_index: int,
        format: str,
        names: Mapping[str, Sequence[str]],
        numbers: Sequence[float],
        kept_in_fp32: Sequence[str],
    ) -> Self:
        """From what :func:`pack_observation` put together, once it is on the host; ``names`` by kind, in that order."""
        scale, largest, *counts = numbers
        histograms = {}
        for kind, rows in names.items():
            width = ExponentTable.width(rows)
            histograms[kind] = ExponentTable.decode(rows, counts[:width])
            counts = counts[width:]
        return cls(step_index, format, scale, histograms, largest if largest >= 0.0 else None, kept_in_fp32)

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> Self:
        """From :meth:`as_dict`."""
        histograms = {
            kind: {name: ExponentHistogram(**histogram) for name, histogram in by_name.items()}
            for kind, by_name in state["histograms"].items()
        }
        return cls(**{**state, "histograms": histograms, "kept_in_fp32": tuple(state["kept_in_fp32"])})


def pack_observation(scale: Tensor, largest: Tensor | None, tables: Iterable[ExponentTable]) -> Tensor:
    """Everything in one vector on the device of the tables, for one transfer."""
    vectors = [table.vector() for table in tables]
    numbers = scale, torch.full_like(scale, -1.0) if largest is None else largest
    return torch.cat([*(sent_to(number, vectors[0].device, vectors[0].dtype) for number in numbers), *vectors])


_COUNTS = Schema(
    "whole numbers by exponent",
    lambda value: isinstance(value, dict) and all(isinstance(e, int) and COUNT.accepts(n) for e, n in value.items()),
)
_HISTOGRAM = holding(
    {"counts": _COUNTS, "powers_of_two": _COUNTS, "num_zeros": COUNT, "num_nonfinite": COUNT, "largest": ANY_NUMBER}
)
_OBSERVATION = holding(
    {
        "step_index": COUNT,
        "format": Schema("the name of a number format", lambda value: value in tuple(FORMATS)),
        "scale": ANY_NUMBER,
        "histograms": named(named(_HISTOGRAM)),
        "largest_in_backward": or_none(ANY_NUMBER),
        "kept_in_fp32": Schema(
            "a list of names",
            lambda value: isinstance(value, list | tuple) and all(isinstance(name, str) for name in value),
        ),
    }
)
_SUMMARY = holding({f.name: ANY_NUMBER for f in fields(UnderflowSummary)} | {"suggested_scale": or_none(ANY_NUMBER)})
#: What a checkpoint holds of a monitor: the latest observation as :meth:`UnderflowObservation.as_dict`, and a history.
STATE_KINDS = {"latest": or_none(_OBSERVATION), "history": listed_of(named(_SUMMARY))}
