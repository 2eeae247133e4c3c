"""Paired runs: each seed in every precision from the same weights over the same data; their file, and what they say."""

import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import fmean, linear_regression, variance
from typing import Any, Self

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from typing_extensions import override

from lightning_mp.monitors.comparison.paired_difference import PairedDifference, differences_of
from lightning_mp.monitors.comparison.trial import Experiment, Trial, run_trial

_FORMAT = "lightning_mp precision comparison"


@dataclass(frozen=True, slots=True)
class FinishedRun:
    """One run of one precision with one seed."""

    precision: str  # its name in the comparison
    seed: int  # of weights, data and dropout
    final_loss: float  # what is compared; NaN or infinite if the run diverged
    train_losses: tuple[float, ...]  # of each batch
    items: int  # tokens or samples trained on
    seconds: float  # of the fit
    weights_digest: str  # of the initial weights
    data_digest: str  # of the data
    skipped_steps: int | None = None  # optimizer steps after an overflow; None where they are not counted

    def to_json(self) -> dict[str, Any]:
        """Plain values; null means a number that is not finite."""
        finite = [loss if math.isfinite(loss) else None for loss in (self.final_loss, *self.train_losses)]
        return {**asdict(self), "final_loss": finite[0], "train_losses": finite[1:]}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """The inverse of :meth:`to_json`."""
        losses = tuple(math.nan if loss is None else loss for loss in values["train_losses"])
        final = math.nan if values["final_loss"] is None else values["final_loss"]
        return cls(**{**values, "final_loss": final, "train_losses": losses})


class RunFile:
    """The runs of one comparison: a first line with its settings, then a line per run.

    A line is written at once and brought to the disk before the next run starts. What a kill left of a line is dropped.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self._path = path
        self._settings = dict(settings)
        self._key = hashlib.sha256(json.dumps(self._settings, sort_keys=True).encode()).hexdigest()[:16]
        header = {"format": _FORMAT, "comparison": self._key, "settings": self._settings}
        self._header = json.dumps(header, sort_keys=True)
        self._whole_bytes = 0
        self._runs = self._read()

    def read(self) -> list[FinishedRun]:
        """The runs that are complete, in the order in which they ended."""
        return list(self._runs)

    def append(self, run: FinishedRun) -> None:
        """Adds a run."""
        text = json.dumps({"comparison": self._key, **run.to_json()}) + "\n"
        if not self._whole_bytes:
            text = self._header + "\n" + text
        content = text.encode()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("ab") as file:
            file.truncate(self._whole_bytes)  # what a kill left of a line
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        self._whole_bytes += len(content)
        self._runs.append(run)

    def _read(self) -> list[FinishedRun]:
        try:
            content = self._path.read_bytes()
        except FileNotFoundError:
            return []
        lines = content.split(b"\n")[:-1]  # what follows the last newline is no whole line
        if not lines:
            if content and not self._header.encode().startswith(content):
                raise ValueError(self._refusal("it is not the file of a comparison"))
            return []
        self._check_header(lines[0])
        runs = []
        for number, line in enumerate(lines[1:], start=2):
            try:
                values = json.loads(line)
                if values.pop("comparison") != self._key:
                    raise ValueError
                runs.append(FinishedRun.from_json(values))
            except (ValueError, KeyError, TypeError, AttributeError):
                raise ValueError(self._refusal(f"line {number} cannot be read")) from None
        self._whole_bytes = len(content) - len(content.rpartition(b"\n")[2])
        return runs

    def _check_header(self, line: bytes) -> None:
        try:
            header = json.loads(line)
            known = header["format"] == _FORMAT
        except (ValueError, KeyError, TypeError):
            known = False
        if not known:
            raise ValueError(self._refusal("it is not the file of a comparison"))
        theirs = header["settings"]
        differing = [name for name in {**self._settings, **theirs} if theirs.get(name) != self._settings.get(name)]
        if differing:
            name = differing[0]
            raise ValueError(
                self._refusal(
                    f"its runs belong to another comparison: {name} was {theirs.get(name)!r} and is now"
                    f" {self._settings.get(name)!r}"
                )
            )

    def _refusal(self, reason: str) -> str:
        return f"`file` {self._path} cannot be continued: {reason}. Name another file, or delete this one."


class ShownRun(Callback):
    """One run on the bar over all runs."""

    def __init__(self, bar: Any, text: str) -> None:
        self._bar = bar
        self._steps = 0
        bar.set_description(text)

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        """Counts optimizer steps."""
        self._bar.update(trainer.global_step - self._steps)
        self._steps = trainer.global_step


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
    return fmean(tail) if all(map(math.isfinite, tail)) else math.nan


def run_pairs(
    experiment: Experiment, *, seeds: Sequence[int], steps: int, monitor: str | None, file: RunFile | None, bar: Any
) -> list[FinishedRun]:
    """Makes the runs that are missing, all precisions of a seed after each other."""
    finished = file.read() if file is not None else []
    by_pair = {(run.seed, run.precision): run for run in finished}
    missing = [pair for pair in product(seeds, experiment.precisions) if pair not in by_pair]
    bar.total += steps * len(missing)
    for seed, name in missing:
        shown = ShownRun(bar, f"{name}, seed {seed}")
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
            skipped_steps=trial.skipped_steps,
        )
        check_pairs([*finished, run])
        if file is not None:
            file.append(run)
        finished.append(run)
        by_pair[seed, name] = run
    return [by_pair[pair] for pair in product(seeds, experiment.precisions)]


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
    y = [fmean(curve[batch] for curve in baseline_curves) for batch in batches]
    slope, intercept = linear_regression(x, y)
    residuals = math.fsum((b - intercept - slope * a) ** 2 for a, b in zip(x, y, strict=True))
    error = math.sqrt(residuals / (len(x) - 2) / (len(x) - 1) / variance(x))
    if not -slope > 2 * error:
        return None
    return math.exp(min(difference / -slope, 700.0))
