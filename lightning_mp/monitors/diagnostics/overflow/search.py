"""Which micro-batch of a skipped window overflowed, where, and whether a smaller loss scale would have helped."""

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from lightning_mp.monitors.diagnostics.overflow.first_overflow import FirstOverflow
from lightning_mp.monitors.diagnostics.overflow.replay import MicroBatch, Replay, Trial

Verdict = Literal["scale", "range", "model", "data", "weights", "sum", "diverged"]

AnyRank = Callable[[bool], bool]


@dataclass(frozen=True)
class OverflowFinding:
    """Where a step overflowed on one rank, and why."""

    rank: int  #: the global rank.
    micro_batch: int  #: its place in the accumulation window, counted from 0.
    num_micro_batches: int  #: length of the window.
    batch_idx: int  #: index of the batch in the epoch.
    #: "scale" (finite at a smaller loss scale), "range" (finite in fp32, too large for 16 bit at any scale), "model"
    #: (not finite at any scale; nor in fp32, where that could be tried), "data" (the batch holds non-finite numbers),
    #: "weights" (a weight or buffer does), "sum" (finite by itself, not when added up), "diverged" ("range" or "model"
    #: in a run whose weights have exploded).
    verdict: Verdict
    first_overflow: FirstOverflow | None  #: the first tensor that was not finite; None for "sum".
    #: the largest power of two below the loss scale at which the micro-batch is finite; None if it was not looked for
    #: or there is none down to 1.
    finite_scale: float | None = None
    finite_in_fp32: bool | None = None  #: whether it is finite in full precision; None if that was not tried.


@dataclass(frozen=True)
class SearchResult:
    """A finding of this rank, if any, and what went wrong with the search itself; "" if nothing did."""

    finding: OverflowFinding | None
    error: str = ""


def largest_finite_scale(scale: float, is_finite: Callable[[float], bool]) -> float:
    """The largest ``scale / 2^k``, k >= 1, that is finite; by bisection.

    >>> from lightning_mp.monitors.diagnostics.overflow.search import largest_finite_scale
    >>> largest_finite_scale(65536.0, lambda scale: scale <= 5000)
    4096.0
    """
    most = max(1, math.ceil(math.log2(scale)))
    halvings = bisect_left(range(most), True, lo=1, key=lambda k: is_finite(math.ldexp(scale, -k)))
    return math.ldexp(scale, -halvings)


def search_overflow(
    replay: Replay, window: Sequence[MicroBatch], loss_scale: float, *, rank: int, any_rank: AnyRank
) -> SearchResult:
    """Runs a window again until a micro-batch overflows, then that one at other scales.

    All ranks run the same, whatever each of them finds: every decision is made by ``any_rank``.
    """
    for index, micro_batch in enumerate(window):
        trial = replay.run(micro_batch, loss_scale, watched=True, accumulated=index > 0)
        if any_rank(bool(trial.error)):
            return SearchResult(None, trial.error or "it failed on another rank")
        if any_rank(not trial.finite):
            break
    else:
        return SearchResult(None)
    finding = partial(OverflowFinding, rank, index, len(window), micro_batch.batch_idx)
    if not any_rank(trial.first_overflow is not None):
        return SearchResult(None if trial.finite else finding("sum", None))
    finite_scale = _try_scales(replay, micro_batch, trial, loss_scale, any_rank)
    undecided = (
        trial.first_overflow is not None
        and trial.first_overflow.phase not in ("data", "weights")
        and finite_scale is None
    )
    in_fp32 = replay.run_in_float32(micro_batch) if any_rank(undecided) else None
    if trial.first_overflow is None:
        return SearchResult(None)
    finite_in_fp32 = in_fp32.finite if in_fp32 is not None and undecided else None
    verdict = _verdict(trial.first_overflow, finite_scale, finite_in_fp32)
    return SearchResult(finding(verdict, trial.first_overflow, finite_scale, finite_in_fp32))


def _try_scales(
    replay: Replay, micro_batch: MicroBatch, trial: Trial, loss_scale: float, any_rank: AnyRank
) -> float | None:
    """The largest scale at which all ranks are finite that are finite at any scale; None on the others."""
    in_backward = trial.first_overflow is not None and trial.first_overflow.phase == "backward" and loss_scale > 1.0
    if not any_rank(in_backward):
        return None
    can_be_finite = replay.run(micro_batch, 1.0).finite and in_backward
    if not any_rank(can_be_finite):
        return None

    def is_finite(scale: float) -> bool:
        finite = replay.run(micro_batch, scale).finite
        return not any_rank(can_be_finite and not finite)

    scale = largest_finite_scale(loss_scale, is_finite)
    return scale if can_be_finite else None


def _verdict(first_overflow: FirstOverflow, finite_scale: float | None, finite_in_fp32: bool | None) -> Verdict:
    if first_overflow.phase == "data":
        return "data"
    if first_overflow.phase == "weights":
        return "weights"
    if finite_scale is not None:
        return "scale"
    return "range" if finite_in_fp32 else "model"
