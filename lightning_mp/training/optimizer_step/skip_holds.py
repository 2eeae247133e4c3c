"""Guards that keep learning-rate schedulers and averaged weights unchanged on a skipped optimizer step.

Both wrap a public method on the instance, for the time of one ``fit``. The scheduler's own ``step`` is left alone: an
attribute set there would end up in ``scheduler.state_dict()``.
"""

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import WeightAveraging
from torch import Tensor
from torch.optim import Optimizer

from lightning_mp.ground.core.patches import Patch, Patches
from lightning_mp.ground.core.private_trainer_api import callbacks_of


class _SchedulerSnapshot:
    """What a step of a scheduler changed, its state and settings of the optimizer's groups, to take that back."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._state = deepcopy(scheduler.state_dict())
        optimizer: Optimizer = scheduler.optimizer
        # Groups as they are, not their numbers: until the outcome is known, groups may be added and removed.
        self._groups = [(group, _settings(group)) for group in optimizer.param_groups]
        self._written: list[dict[str, Any]] = []
        self._lengths: dict[str, int] = {}

    def after_step(self) -> None:
        """The scheduler has stepped."""
        self._written = [_settings(group) for group, _ in self._groups]
        self._lengths = {key: len(v) for key, v in self._scheduler.state_dict().items() if isinstance(v, list)}

    def restore(self) -> None:
        """Undoes the step; settings that others have changed since stay as they are."""
        state = _with_later_entries(self._state, self._scheduler.state_dict(), self._lengths)
        self._scheduler.load_state_dict(state)
        for (group, settings), written in zip(self._groups, self._written, strict=True):
            for key, value in settings.items():
                now = group.get(key)
                if isinstance(now, Tensor) and isinstance(value, Tensor):
                    now.copy_(torch.where(now == written[key], value, now))  # on the device, so that nothing waits
                elif now == written.get(key):
                    group[key] = value


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a parameter group as they are now."""
    return {
        key: value.clone() if isinstance(value, Tensor) else value for key, value in group.items() if key != "params"
    }


def _with_later_entries(before: dict[str, Any], now: dict[str, Any], lengths: Mapping[str, int]) -> dict[str, Any]:
    """A scheduler's state as it was; of lists (one entry per group) that have grown since its step, the new ones stay.

    >>> before, now = {"last_epoch": 3, "base_lrs": [0.1]}, {"last_epoch": 4, "base_lrs": [0.1, 0.5]}
    >>> _with_later_entries(before, now, {"base_lrs": 1})
    {'last_epoch': 3, 'base_lrs': [0.1, 0.5]}
    >>> _with_later_entries(before, now, {"base_lrs": 2})
    {'last_epoch': 3, 'base_lrs': [0.1]}
    """
    grown = {
        key: [*before[key], *now[key][length:]]
        for key, length in lengths.items()
        if isinstance(before.get(key), list) and isinstance(now.get(key), list)
    }
    return before | grown


class SkippedStepSchedulerGuard:
    """Holds ``interval="step"`` schedulers on a skipped step, by wrapping ``pl_module.lr_scheduler_step``.

    If the outcome of the step is known when Lightning steps the scheduler, a skip simply leaves it out. If it is still
    on its way (fused optimizers), the scheduler steps, and goes back when the outcome turns out to be a skip. That is
    before the next optimizer step, so every step that is made uses the learning rate it would have without skips.
    Schedulers with ``interval="epoch"`` count epochs and are left alone; before one of them steps, the outcome is
    waited for, since both may set the rate of one optimizer.
    """

    def __init__(
        self,
        trainer: "pl.Trainer",
        pl_module: "pl.LightningModule",
        last_skipped: Callable[[], bool | None],
        find_out: Callable[[], None],
    ) -> None:
        self._trainer = trainer
        self._pl_module = pl_module
        self._last_skipped = last_skipped
        self._find_out = find_out
        self._method: Patch | None = None
        self._snapshots: list[_SchedulerSnapshot] = []

    def attach(self) -> None:
        """Starts holding."""
        self._method = Patches.of(self._trainer).replace(self._pl_module, "lr_scheduler_step", self._step)

    def resolve(self, *, skipped: bool) -> None:
        """The outcome of the last step is known."""
        snapshots, self._snapshots = self._snapshots, []
        if skipped:
            for snapshot in reversed(snapshots):  # several schedulers may have set one rate, each from the one before
                snapshot.restore()

    def _step(self, scheduler: Any, metric: Any | None) -> None:
        assert self._method is not None
        counts_steps = any(
            config.scheduler is scheduler and config.interval == "step" for config in self._trainer.lr_scheduler_configs
        )
        if not counts_steps:
            if self._snapshots:
                self._find_out()
            self._method.original(scheduler, metric)
            return
        skipped = self._last_skipped()
        if skipped:
            return
        snapshot = _SchedulerSnapshot(scheduler) if skipped is None else None
        self._method.original(scheduler, metric)
        if snapshot is not None:
            snapshot.after_step()
            self._snapshots.append(snapshot)


class SkippedStepAveragingGuard:
    """Holds Lightning's ``WeightAveraging`` (EMA) on a skipped step, by wrapping its public ``should_update``.

    The method gets the index among the steps that were made, where Lightning counts attempts: every second step remains
    every second step. The average is updated at the end of the batch, so here the host waits for the outcome.
    """

    def __init__(
        self, trainer: "pl.Trainer", before_update: Callable[[], None], skipped_steps: Callable[[], int]
    ) -> None:
        self._trainer = trainer
        self._before_update = before_update
        self._skipped_steps = skipped_steps
        self._skipped = False

    def attach(self) -> None:
        """Starts holding."""
        for callback in callbacks_of(self._trainer):
            if isinstance(callback, WeightAveraging):
                self._hold(callback)

    def _hold(self, callback: WeightAveraging) -> None:
        def should_update(step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
            self._before_update()
            if step_idx is not None:
                if self._skipped:
                    return False
                step_idx -= self._skipped_steps()
            return bool(method.original(step_idx=step_idx, epoch_idx=epoch_idx))

        method = Patches.of(self._trainer).replace(callback, "should_update", should_update)

    def resolve(self, *, skipped: bool) -> None:
        """The outcome of the last step is known."""
        self._skipped = skipped
