"""A skipped step reported to a reader: what happened, where, and what to do; once per verdict, then counted."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

from typing_extensions import override

from lightning_mp.ground.core.messages import listed
from lightning_mp.monitors.diagnostics.overflow.first_overflow import FirstOverflow
from lightning_mp.monitors.diagnostics.overflow.search import OverflowFinding, SearchResult, Verdict
from lightning_mp.monitors.diagnostics.overflow.weight_growth import WeightGrowth

#: Begins the note of a report whose step was to be run again, and was not.
NOT_REPLAYED = "Not replayed: "
_RANKS_IN_TEXT = 4
_KINDS: dict[Verdict, str] = {
    "scale": "the loss scale was too high",
    "range": "numbers were too large for 16 bit",
    "model": "the model is not finite",
    "data": "the data is broken",
    "weights": "the weights are broken",
    "sum": "the sum of finite gradients is not",
    "diverged": "training has diverged",
}
_ANYWHERE = ("scale", "data", "sum", "diverged")


@dataclass(frozen=True)
class OverflowReport:
    """One skipped step, the same on all ranks."""

    step_index: int  #: attempts before it, skipped ones included.
    loss_scale: float  #: the scale at that step.
    #: parameters with a non-finite gradient on any rank, last layer first.
    parameters: list[str] = field(default_factory=list)
    #: ranks with such a gradient. Under DDP the reduction spreads it to all of them.
    ranks: list[int] = field(default_factory=list)
    #: what the replay found, one for each rank that went wrong by itself; empty without replay.
    findings: list[OverflowFinding] = field(default_factory=list)
    #: buffers that contain nan or +inf now, on any rank: what the forward of a skipped step wrote into running
    #: statistics stays there.
    buffers: list[str] = field(default_factory=list)
    note: str = ""  #: what could not be determined, and why; "" if nothing is missing.
    #: the weight that has grown most since the start of the run, if it indicates that training has diverged.
    growth: WeightGrowth | None = None

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers, strings, lists and dicts, for JSON."""
        return asdict(self)

    @property
    def kind(self) -> str:
        """The problem in a few words; the same for two reports of the same problem."""
        if not self.findings:
            where = f"with non-finite gradients in {self.parameters[0]}" if self.parameters else "without a known place"
            return f"not replayed, {where}" if self.note.startswith(NOT_REPLAYED) else where
        finding = self.findings[0]
        module = (finding.first_overflow.module if finding.first_overflow is not None else "") or "the training step"
        place = "" if finding.verdict in _ANYWHERE else f" in {module}"
        return f"because {_KINDS[finding.verdict]}{place}"

    @override
    def __str__(self) -> str:
        """One line."""
        parts = [f"Optimizer step {self.step_index} was skipped at loss scale {self.loss_scale:.10g}."]
        if self.parameters:
            parts.append(f"Non-finite gradients, last layer first: {listed(self.parameters)}.")
        for finding in self.findings[:_RANKS_IN_TEXT]:
            parts += _sentences(finding, self.loss_scale, self.growth)
        if self.growth is not None and not self.findings:
            parts.append(_diverged(self.growth))
        if len(self.findings) > _RANKS_IN_TEXT:
            others = [str(finding.rank) for finding in self.findings[_RANKS_IN_TEXT:]]
            parts.append(f"The same problem on ranks {listed(others, most=12)}.")
        if self.buffers:
            parts.append(
                f"The buffers {listed(self.buffers)} now hold non-finite numbers, which skipping the step does not"
                " undo. Reset them, or resume from a checkpoint."
            )
        if self.note:
            parts.append(self.note)
        return " ".join(parts)


def _sentences(finding: OverflowFinding, loss_scale: float, growth: WeightGrowth | None) -> list[str]:
    position = f"micro-batch {finding.micro_batch + 1} of {finding.num_micro_batches}"
    where = f"{position} (batch_idx {finding.batch_idx}) on rank {finding.rank}"
    advice = _diverged(growth) if finding.verdict == "diverged" and growth is not None else _advice(finding, loss_scale)
    if finding.first_overflow is None:
        return [f"Replay: up to {where} every gradient is finite, their sum is not.", advice]
    return [f"Replay of {where}: {_describe(finding.first_overflow)}.", advice]


def _diverged(growth: WeightGrowth) -> str:
    return (
        f"Verdict: training has diverged: the values of {growth.parameter} are now about {growth.rms:.2g}, up from"
        f" {growth.rms_at_start:.2g}. Resume from an earlier checkpoint with a lower learning rate, a warm-up or"
        " gradient clipping; neither the loss scale nor another format helps."
    )


def _describe(first: FirstOverflow) -> str:
    place = first.module or "training_step"
    if first.module_class:
        place += f" ({first.module_class})"
    tensor = f"{first.tensor} holds {first.kind} ({first.dtype}, shape {list(first.shape)})"
    if first.largest_input is not None:
        tensor += f"; its inputs reach {first.largest_input:.3g}"
    if first.phase == "data":
        return f"it starts in the data: {tensor}"
    if first.phase == "weights":
        return f"it starts in the weights of {place}: {tensor}"
    phase = {"forward": "the forward", "loss": "the loss", "backward": "the backward"}[first.phase]
    return f"it starts in {phase}, in {place}: {tensor}"


def _advice(finding: OverflowFinding, loss_scale: float) -> str:
    first = finding.first_overflow
    place = (first.module if first is not None else "") or "the training step"
    if finding.verdict == "scale" and finding.finite_scale is not None:
        halvings = round(math.log2(loss_scale / finding.finite_scale))
        return (
            f"Verdict: the loss scale was too high; at {finding.finite_scale:.10g}, {halvings}"
            f" {'halving' if halvings == 1 else 'halvings'} below, the micro-batch is finite. A dynamic scale corrects"
            " this by itself. If it happens more than once in a few hundred steps, use bf16, or LossScaler with a"
            " max_scale."
        )
    if finding.verdict == "range":
        return (
            f"Verdict: too large for {first.dtype if first is not None else 'fp16'}, whatever the loss scale; in"
            f" fp32 it is finite. Use bf16-mixed, or run {place} in fp32 with a PrecisionPolicy, or make its inputs"
            " smaller (normalisation, smaller initial weights)."
        )
    if finding.verdict == "model":
        tried = " nor in fp32" if finding.finite_in_fp32 is False else ""
        return (
            f"Verdict: the model is broken: not finite at loss scale 1{tried}, so no lower scale helps. Look in"
            f" {place} for a division by zero, a log or root of zero or less, or an exp of a large number."
        )
    if finding.verdict == "data":
        return "Verdict: the data is broken. Look at this batch; a non-finite number in a batch spoils every gradient."
    if finding.verdict == "weights":
        return (
            "Verdict: the weights are broken already, and every later step will be skipped. Resume from an earlier"
            " checkpoint, and find what wrote them: a checked step cannot have done so."
        )
    return (
        "Verdict: the sum of finite gradients does not fit into their dtype. Lower LossScaler(max_scale=...), or"
        " accumulate in fp32: MasterWeightsPrecision(fp32_gradients=True), or AutocastPrecision."
    )


class KnownByRank(NamedTuple):
    """What one rank knows of a skipped step; parameters by position."""

    rank: int
    parameters: list[int]
    buffers: list[str]
    result: SearchResult
    growth: WeightGrowth | None


def join_ranks(
    step_index: int,
    loss_scale: float,
    everybody: Sequence[KnownByRank],
    names: Sequence[str],
    note: str = "",
    *,
    expects_finding: bool = False,
) -> OverflowReport:
    """The report of all ranks; ``names`` are those of all parameters, ``expects_finding`` is set after a replay.

    >>> known = [KnownByRank(rank, [rank], [], SearchResult(None), None) for rank in (0, 1)]
    >>> join_ranks(3, 1024.0, known, ["up", "down"]).parameters
    ['down', 'up']
    """
    growth = next((known.growth for known in everybody if known.growth is not None), None)
    findings = [known.result.finding for known in everybody if known.result.finding is not None]
    if growth is not None:
        findings = [replace(f, verdict="diverged") if f.verdict in ("range", "model") else f for f in findings]
    errors = [f"rank {known.rank}: {known.result.error}" for known in everybody if known.result.error]
    if errors:
        note = f"The replay could not be made ({'; '.join(errors[:3])})."
    elif expects_finding and not findings:
        note = (
            "The replay was finite on every rank by itself: the overflow came from the reduction over ranks, from"
            " something that changes between two runs of the same batch, or from a hook on gradients."
        )
    together = sorted({index for known in everybody for index in known.parameters}, reverse=True)
    return OverflowReport(
        step_index,
        loss_scale,
        [names[index] for index in together],
        [known.rank for known in everybody if known.parameters],
        findings,
        sorted({name for known in everybody for name in known.buffers}),
        note,
        growth,
    )


class ReportTally:
    """Which reports are new, and how many there were of each kind.

    The same kind of trouble is what has the same verdict in the same module; the loss scale and a diverged run are the
    same wherever they show.

    >>> tally = ReportTally()
    >>> tally.is_new(OverflowReport(3, 1024.0, ["bias"])), tally.is_new(OverflowReport(4, 512.0, ["bias"]))
    (True, False)
    >>> tally.summary()
    'OverflowPostMortem: 2 optimizer steps were skipped: 2 with non-finite gradients in bias (first at step 3).'
    """

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._first_step: dict[str, int] = {}
        self._in_summary = 0

    @property
    def num_reports(self) -> int:
        """All reports so far."""
        return self._counts.total()

    @property
    def has_unreported(self) -> bool:
        """Whether reports were only counted since the last summary."""
        return self.num_reports > max(len(self._counts), self._in_summary)

    def is_new(self, report: OverflowReport) -> bool:
        """Counts a report; whether it is the first of its kind."""
        kind = report.kind
        self._counts[kind] += 1
        self._first_step.setdefault(kind, report.step_index)
        return self._counts[kind] == 1

    def is_summary_due(self) -> bool:
        """At 10, 100, 1000, ... reports, if there is more than was reported one by one."""
        number = str(self.num_reports)
        return number == "1" + "0" * (len(number) - 1) and number != "1" and self.has_unreported

    def summary(self) -> str:
        """One line: how many of each kind."""
        self._in_summary = self.num_reports
        parts = [
            f"{count} {kind} (first at step {self._first_step[kind]})" for kind, count in self._counts.most_common()
        ]
        return f"OverflowPostMortem: {self.num_reports} optimizer steps were skipped: {'; '.join(parts)}."
