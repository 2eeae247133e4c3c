"""The costs of all precisions beside each other."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from lightning_mp.comparison.precisions import plugin_factories
from lightning_mp.comparison.progress import Progress
from lightning_mp.comparison.step_cost import (
    StepCost,
    TimedRound,
    gradient_of,
    measure_round,
    peak_bytes,
    relative_error,
)
from lightning_mp.comparison.trial import Experiment

_WARMUP_STEPS = 2
_TIMED_STEPS = 5
# fp32 is off by 1e-6 or so; more than this comes from random numbers that are not the same
_LARGEST_FP32_ERROR = 0.01


def measure_costs(experiment: Experiment, batch: Any, rounds: int, bar: Progress) -> tuple[dict[str, StepCost], str]:
    """What a batch costs in each precision, and the precision that the errors of gradients are against."""
    errors, reference = _gradient_errors(experiment, batch)
    peaks = {name: peak_bytes(experiment, name) for name in experiment.precisions}
    names = list(experiment.precisions)
    bar.expect(len(names) * rounds * (_WARMUP_STEPS + _TIMED_STEPS))
    timed: dict[str, list[TimedRound]] = {name: [] for name in names}
    for number in range(rounds):
        # another one first in each round
        first = number % len(names)
        for name in names[first:] + names[:first]:
            shown = bar.callback(f"{name}, timed")
            timed[name].append(
                measure_round(experiment, name, warmup=_WARMUP_STEPS, steps=_TIMED_STEPS, progress=shown)
            )
    costs = {}
    for name in names:
        pairs = zip(timed[name], timed[names[0]], strict=True)
        ratios = [ours.batch_seconds / theirs.batch_seconds for ours, theirs in pairs]
        costs[name] = StepCost(
            batch_seconds=_median([each.batch_seconds for each in timed[name]]),
            time_ratio=_median(ratios),
            time_ratio_range=(min(ratios), max(ratios)),
            items_per_second=_median([each.items_per_second for each in timed[name]]),
            unit=timed[name][0].unit,
            peak_bytes=peaks[name],
            gradient_error=errors[name],
        )
    return costs, reference


def _gradient_errors(experiment: Experiment, batch: Any) -> tuple[dict[str, float | None], str]:
    """The error of each precision's gradient, and against what."""
    references = replace(experiment, precisions=plugin_factories(("64-true", "32-true"), experiment.accelerator))
    fp32 = gradient_of(references, "32-true", batch)
    expected, against = fp32, "32-true"
    with suppress(RuntimeError, TypeError):  # no fp64 on this device, or not in one of the operations
        expected, against = gradient_of(references, "64-true", batch), "64-true"
    own_error = relative_error(fp32, expected)
    if own_error is None or own_error > _LARGEST_FP32_ERROR:
        reason = "no gradient is finite" if own_error is None else f"fp32 differs by {own_error:.0%} by chance"
        return dict.fromkeys(experiment.precisions), f"none ({reason})"
    return {
        name: relative_error(gradient_of(experiment, name, batch), expected) for name in experiment.precisions
    }, against


def _median(values: Sequence[float]) -> float:
    middle = len(values) // 2
    ordered = sorted(values)
    return ordered[middle] if len(values) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
