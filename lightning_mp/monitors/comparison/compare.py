"""``compare_precisions``: measures cost and quality of precisions on the user's own model and machine."""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import Precision
from torch import nn
from tqdm import tqdm  # comes with Lightning

from lightning_mp._version import __version__
from lightning_mp.ground.core.arguments import whole_number
from lightning_mp.ground.core.devices import available_device_type, device_name
from lightning_mp.ground.core.random_state import random_state_kept
from lightning_mp.monitors.comparison.paired_difference import PairedDifference
from lightning_mp.monitors.comparison.paired_runs import FinishedRun, RunFile, ShownRun, paired_quality, run_pairs
from lightning_mp.monitors.comparison.precisions import PluginFactory, described, plugin_factories
from lightning_mp.monitors.comparison.result import PrecisionComparison
from lightning_mp.monitors.comparison.step_cost import (
    StepCost,
    TimedRound,
    gradient_of,
    measure_round,
    peak_bytes,
    relative_error,
)
from lightning_mp.monitors.comparison.trial import Experiment, TrainingData, Trial, run_trial

ModuleOrFactory = pl.LightningModule | Callable[[], pl.LightningModule]
_OWN_OPTIONS = {
    "precision": "pass precisions= instead",
    "plugins": "pass precisions= instead",
    "accelerator": "pass accelerator= instead",
    "max_steps": "pass steps= instead",
    "max_epochs": "pass steps= instead",
    "devices": "it runs on one device",
    "num_nodes": "it runs on one device",
    "strategy": "it runs on one device",
    "default_root_dir": "runs leave nothing behind",
}
_WARMUP_STEPS = 2
_TIMED_STEPS = 5
# fp32 is off by 1e-6 or so; more than this comes from random numbers that are not the same
_LARGEST_FP32_ERROR = 0.01


def compare_precisions(
    module: ModuleOrFactory,
    data: Any,
    precisions: Iterable[str | Precision | PluginFactory] | Mapping[str, str | Precision | PluginFactory] = (
        "32-true",
        "bf16-mixed",
    ),
    *,
    steps: int | None = None,
    seeds: int | Sequence[int] = 5,
    monitor: str | None = None,
    val_data: Any = None,
    margin: float = 0.004,
    confidence: float = 0.95,
    file: str | Path | None = None,
    accelerator: str = "auto",
    trainer_options: Mapping[str, Any] | None = None,
    rounds: int = 5,
    progress: bool | None = None,
) -> PrecisionComparison:
    """Compares precisions on your model: time per batch, peak memory, gradient error, and with ``steps`` the loss.

    Every run has its own ``Trainer`` on one device, without logger and checkpoints, and a fresh copy of the module.
    Times come from short interleaved runs of all precisions, so that a slowdown of the machine affects all of them.
    Losses come from pairs: with each seed all precisions start from the same weights and see the same data and the same
    random numbers, so that the difference of a pair shows the effect of the precision. The global random state is
    unchanged.

    Args:
        module: a LightningModule, whose weights all runs start from; or a function that makes one, which is called once
            per run, so that each seed has its own initial weights.
        data: a ``LightningDataModule``, a loader, a function that makes one of these, or one batch (a tensor, list,
            tuple or mapping), which is enough without ``steps``.
        precisions: the baseline first. Names of :data:`~lightning_mp.monitors.comparison.precisions.PRECISION_NAMES`,
            precision plugins, or functions that make one; a mapping gives them its own names.
        steps: optimizer steps of each paired run, of all its optimizers together as in ``Trainer(max_steps=...)``; None
            for no paired runs.
        seeds: how many pairs, or which seeds. Seeds added later continue in the same ``file``.
        monitor: name of a validation metric to compare, lower being better; validated once, at the end of each run.
            None compares the mean training loss over the last tenth of the batches, which a module in manual
            optimization has only if ``training_step`` returns it.
        val_data: a loader to validate on; a data module's own is used.
        margin: the largest acceptable increase of the loss, in its own unit; the default is meant for nats per token.
        confidence: confidence level of the intervals.
        file: file for finished runs, one line of JSON each. A comparison that was killed continues from it.
        accelerator: "cpu", "cuda", "mps", or "auto" for a GPU where there is one.
        trainer_options: arguments of the Trainer, such as ``gradient_clip_val``; each run gets copies.
        rounds: number of times that each precision is timed.
        progress: show a progress bar; None shows it on a terminal.

    Returns:
        The comparison: ``print`` it for a table, ``plot(path)`` for a plot, ``as_dict()`` for plain values.

    Raises:
        ValueError: an argument is wrong, the data is empty, ``file`` belongs to another comparison, a run of the
            baseline diverged, or the runs of a seed saw different data or weights.

    Source:
        Non-inferiority of paired differences, see
        :class:`~lightning_mp.monitors.comparison.paired_difference.PairedDifference`.

    Example:
        >>> from lightning.pytorch.demos.boring_classes import BoringModel
        >>> found = compare_precisions(BoringModel, torch.randn(4, 32), ["32-true", "bf16-mixed"], rounds=1)
        >>> found.costs["bf16-mixed"].gradient_error < 0.02
        True
    """
    experiment = Experiment(
        make_module=_factory(module),
        data=TrainingData(data, val_data),
        accelerator=available_device_type(accelerator),
        precisions=plugin_factories(precisions, available_device_type(accelerator)),
        trainer_options=dict(trainer_options or {}),
    )
    chosen = _seeds(seeds)
    _check(experiment, steps=steps, rounds=rounds, margin=margin, confidence=confidence, file=file, monitor=monitor)
    hidden = None if progress is None else not progress
    bar = tqdm(total=0, unit="step", dynamic_ncols=True, leave=False, disable=hidden)
    with random_state_kept(experiment.device), bar:
        first = _first_run(experiment, steps, monitor)
        run_file = None if file is None else RunFile(Path(file), _settings(experiment, steps, monitor, first))
        costs, reference = measure_costs(experiment, first.first_batch, rounds, bar)
        runs: list[FinishedRun] = []
        if steps is not None:
            runs = run_pairs(experiment, seeds=chosen, steps=steps, monitor=monitor, file=run_file, bar=bar)
    return PrecisionComparison(
        costs=costs,
        quality=paired_quality(runs, list(costs), margin=margin, confidence=confidence) if runs else {},
        runs=tuple(runs),
        steps=steps,
        monitor=monitor,
        margin=margin,
        confidence=confidence,
        device=device_name(experiment.device),
        versions=versions(),
        gradient_reference=reference,
    )


def _first_run(experiment: Experiment, steps: int | None, monitor: str | None) -> Trial:
    baseline = next(iter(experiment.precisions))
    first = run_trial(experiment, baseline, seed=0, steps=1, monitor=monitor)
    if steps is not None and monitor is None and not first.train_losses:
        raise ValueError(
            "`module` is optimized manually and its training_step returns no loss, so there is none to compare. Pass"
            " monitor= and a validation loader, return the loss, or leave steps out."
        )
    return first


def versions() -> dict[str, str]:
    """Of this package, Lightning and torch."""
    return {"lightning_mp": __version__, "lightning": pl.__version__, "torch": str(torch.__version__)}


def _check(
    experiment: Experiment,
    *,
    steps: int | None,
    rounds: int,
    margin: float,
    confidence: float,
    file: str | Path | None,
    monitor: str | None,
) -> None:
    whole_number(rounds, "rounds")
    if steps is not None:
        whole_number(steps, "steps")
    PairedDifference((0.0,), margin=margin, confidence=confidence)  # refuses what it cannot use
    for name in experiment.trainer_options:
        if name in _OWN_OPTIONS:
            raise ValueError(f"`trainer_options` has {name!r}, which compare_precisions() sets: {_OWN_OPTIONS[name]}.")
    if steps is not None and experiment.data.is_batch:
        raise ValueError(
            f"`steps` is {steps}, and `data` is a single batch, on which a loss says nothing. Pass a"
            " LightningDataModule or a loader, or leave steps out."
        )
    if steps is None and file is not None:
        raise ValueError(f"`file` {file} keeps paired runs, and there are none without steps. Pass steps=, or no file.")
    if steps is None and monitor is not None:
        raise ValueError(f"`monitor` {monitor!r} is of paired runs, and there are none without steps. Pass steps= too.")


def _seeds(seeds: int | Sequence[int]) -> list[int]:
    if isinstance(seeds, int) and not isinstance(seeds, bool) and seeds > 0:
        return list(range(seeds))
    if isinstance(seeds, list | tuple | range):
        chosen = list(seeds)
        if chosen and all(type(seed) is int for seed in chosen) and len(set(chosen)) == len(chosen):
            return chosen
    raise ValueError(f"`seeds` must be a positive number of pairs, or different whole numbers, got {seeds!r}.")


def _factory(module: ModuleOrFactory) -> Callable[[], pl.LightningModule]:
    if isinstance(module, nn.Module) or not callable(module):
        return partial(copy.deepcopy, _checked(module))
    return lambda: _checked(module())


def _checked(made: Any) -> pl.LightningModule:
    # torch.compile puts a module around it
    if not isinstance(getattr(made, "_orig_mod", made), pl.LightningModule):
        raise ValueError(
            "`module` must be a lightning.pytorch.LightningModule or a function that makes one, got"
            f" {type(made).__module__}.{type(made).__qualname__}."
        )
    return cast("pl.LightningModule", made)


def _settings(experiment: Experiment, steps: int | None, monitor: str | None, first: Trial) -> dict[str, Any]:
    """What the losses of the runs depend on, as far as it is known."""
    return {
        "steps": steps,
        "monitor": monitor,
        "precisions": {name: described(make()) for name, make in experiment.precisions.items()},
        "trainer_options": {name: _plain(value) for name, value in sorted(experiment.trainer_options.items())},
        "accelerator": experiment.accelerator,
        "weights": first.weights_digest,
        "data": first.data_digest,
        "versions": versions(),
    }


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if value is None or isinstance(value, str | int | float):
        return value
    text = repr(value)
    return type(value).__qualname__ if " at 0x" in text else text


def measure_costs(experiment: Experiment, batch: Any, rounds: int, bar: Any) -> tuple[dict[str, StepCost], str]:
    """What a batch costs in each precision, and the precision that the errors of gradients are against."""
    errors, reference = _gradient_errors(experiment, batch)
    peaks = {name: peak_bytes(experiment, name) for name in experiment.precisions}
    names = list(experiment.precisions)
    bar.total += len(names) * rounds * (_WARMUP_STEPS + _TIMED_STEPS)
    timed: dict[str, list[TimedRound]] = {name: [] for name in names}
    for number in range(rounds):
        # another one first in each round
        first = number % len(names)
        for name in names[first:] + names[:first]:
            shown = ShownRun(bar, f"{name}, timed")
            timed[name].append(
                measure_round(experiment, name, warmup=_WARMUP_STEPS, steps=_TIMED_STEPS, progress=shown)
            )
    costs = {}
    for name in names:
        pairs = zip(timed[name], timed[names[0]], strict=True)
        ratios = [ours.batch_seconds / theirs.batch_seconds for ours, theirs in pairs]
        costs[name] = StepCost(
            batch_seconds=median([each.batch_seconds for each in timed[name]]),
            time_ratio=median(ratios),
            time_ratio_range=(min(ratios), max(ratios)),
            items_per_second=median([each.items_per_second for each in timed[name]]),
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
