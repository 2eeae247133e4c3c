"""Paired runs: each seed in every precision from the same weights over the same data, and what their losses say."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from lightning_mp.comparison.paired_difference import PairedDifference, differences_of
from lightning_mp.comparison.progress import Progress
from lightning_mp.comparison.run_file import FinishedRun, RunFile
from lightning_mp.comparison.trial import Experiment, Trial, run_trial

_TAIL_SHARE = 0.1  # of the batches; their mean is the final training loss


@dataclass(frozen=True, slots=True)
class PairedQuality:
    """How well a precision trains."""

    final_losses: tuple[float, ...]  # one per seed
    difference: PairedDifference | None  # to the baseline; None for the baseline itself
    # steps to the baseline's final loss over those of the baseline; None where the loss was too flat to tell
    steps_ratio: float | None


def final_loss(trial: Trial) -> float:
    """The validation metric, or without one the mean training loss over the last tenth of the batches."""
    if trial.metric is not None:
        return trial.metric
    tail = trial.train_losses[-max(1, round(_TAIL_SHARE * len(trial.train_losses))) :]
    return math.fsum(tail) / len(tail) if all(map(math.isfinite, tail)) else math.nan


def missing_runs(
    precisions: Iterable[str], seeds: Sequence[int], finished: Iterable[FinishedRun]
) -> list[tuple[int, str]]:
    """Seeds and precisions that have not run yet; all precisions of a seed follow each other.

    >>> missing_runs(["32-true", "bf16-mixed"], [0], [])
    [(0, '32-true'), (0, 'bf16-mixed')]
    """
    done = {(run.seed, run.precision) for run in finished}
    return [pair for seed in seeds for pair in ((seed, name) for name in precisions) if pair not in done]


def run_pairs(
    experiment: Experiment,
    *,
    seeds: Sequence[int],
    steps: int,
    monitor: str | None,
    file: RunFile | None,
    bar: Progress,
) -> list[FinishedRun]:
    """Makes the runs that are missing."""
    finished = file.read() if file is not None else []
    missing = missing_runs(experiment.precisions, seeds, finished)
    bar.expect(steps * len(missing))
    for seed, name in missing:
        shown = bar.callback(f"{name}, seed {seed}")
        trial = run_trial(experiment, name, seed=seed, steps=steps, callbacks=[shown], monitor=monitor)
        run = FinishedRun(
            precision=name,
            seed=seed,
            final_loss=final_loss(trial),
            train_losses=trial.train_losses,
            items=trial.items,
            seconds=trial.seconds,
            weights_digest=trial.weights_digest,
            data_digest=trial.data_digest,
        )
        check_pairs([*finished, run])
        if file is not None:
            file.append(run)
        finished.append(run)
    by_pair = {(run.seed, run.precision): run for run in finished}
    return [by_pair[seed, name] for seed in seeds for name in experiment.precisions]


def check_pairs(runs: Iterable[FinishedRun]) -> None:
    """Refuses runs of one seed that differ in more than the precision."""
    first: dict[int, FinishedRun] = {}
    for run in runs:
        other = first.setdefault(run.seed, run)
        for what, same, cure in (
            (
                "initial weights",
                run.weights_digest == other.weights_digest,
                "Let the function that makes the module draw its weights from torch's global generator",
            ),
            (
                "data",
                (run.data_digest, len(run.train_losses)) == (other.data_digest, len(other.train_losses)),
                "Pass a function that makes the data again for each run",
            ),
        ):
            if not same:
                raise ValueError(
                    f"compare_precisions() cannot pair the runs of seed {run.seed}: {run.precision} had other {what}"
                    f" than {other.precision}. {cure}."
                )


def paired_quality(
    runs: Iterable[FinishedRun], precisions: Sequence[str], *, margin: float, confidence: float
) -> dict[str, PairedQuality]:
    """What the runs say of each precision; the first one is the baseline."""
    by_precision: Mapping[str, dict[int, FinishedRun]] = {name: {} for name in precisions}
    for run in runs:
        by_precision[run.precision][run.seed] = run
    baseline = by_precision[precisions[0]]
    curves = [run.train_losses for run in baseline.values()]
    losses = {name: tuple(found[seed].final_loss for seed in baseline) for name, found in by_precision.items()}
    quality = {}
    for name, final_losses in losses.items():
        difference = PairedDifference(
            differences_of(final_losses, losses[precisions[0]]), margin=margin, confidence=confidence
        )
        ratio = 1.0 if name == precisions[0] else steps_to_equal_loss(difference.mean, curves)
        quality[name] = PairedQuality(final_losses, None if name == precisions[0] else difference, ratio)
    return quality


def steps_to_equal_loss(difference: float, baseline_curves: Sequence[Sequence[float]]) -> float | None:
    """Steps that a candidate takes to the baseline's final loss, over those of the baseline.

    Over its last half the baseline's loss is taken to fall as ``a - b ln(step)``; a candidate whose loss is higher by
    ``difference`` needs ``exp(difference / b)`` times the steps.

    >>> curve = [3.0 - 0.5 * math.log(step) for step in range(1, 101)]
    >>> round(steps_to_equal_loss(0.05, [curve]), 3)
    1.105
    """
    length = min(map(len, baseline_curves))
    batches = range(length // 2, length)
    if len(batches) < 3 or not math.isfinite(difference):
        return None
    x = [math.log(batch + 1) for batch in batches]
    y = [math.fsum(curve[batch] for curve in baseline_curves) / len(baseline_curves) for batch in batches]
    mean_x, mean_y = math.fsum(x) / len(x), math.fsum(y) / len(y)
    spread = math.fsum((each - mean_x) ** 2 for each in x)
    slope = math.fsum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / spread
    residuals = math.fsum((b - mean_y - slope * (a - mean_x)) ** 2 for a, b in zip(x, y, strict=True))
    error = math.sqrt(residuals / (len(x) - 2) / spread)
    if not -slope > 2 * error:
        return None
    return math.exp(min(difference / -slope, 700.0))
