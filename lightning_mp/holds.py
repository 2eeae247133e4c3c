"""What must not move on a skipped optimizer step: learning-rate schedulers and averaged weights.

Both wrap a public method on the instance, for the time of one ``fit``. The scheduler's own ``step`` is left alone: an
attribute set there would end up in ``scheduler.state_dict()``.
"""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import WeightAveraging
from torch import Tensor
from torch.optim import Optimizer

from lightning_mp.seams import callbacks_of

__all__ = ["AveragingHold", "InstanceMethod", "LearningRateHold"]


class InstanceMethod:
    """A public method replaced on one instance, and put back as it was.

    Example:
        >>> class Greeter:
        ...     def greet(self) -> str:
        ...         return "hello"
        >>> greeter = Greeter()
        >>> method = InstanceMethod(greeter, "greet", lambda: "wrapped " + method.original())
        >>> greeter.greet()
        'wrapped hello'
        >>> method.restore()
        >>> greeter.greet(), vars(greeter)
        ('hello', {})
    """

    def __init__(self, owner: object, name: str, replacement: Callable[..., Any]) -> None:
        self._owner = owner
        self._name = name
        self._own_attribute = vars(owner).get(name)
        self.original: Callable[..., Any] = getattr(owner, name)
        setattr(owner, name, replacement)

    def restore(self) -> None:
        """Puts the original back."""
        if self._own_attribute is not None:
            setattr(self._owner, self._name, self._own_attribute)
        else:
            delattr(self._owner, self._name)


class _SchedulerSnapshot:
    """A scheduler's state and the optimizer settings it drives, to go back to."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._state = deepcopy(scheduler.state_dict())
        optimizer: Optimizer = scheduler.optimizer
        self._settings = [
            {
                key: value.clone() if isinstance(value, Tensor) else value
                for key, value in group.items()
                if key != "params"
            }
            for group in optimizer.param_groups
        ]

    def restore(self) -> None:
        self._scheduler.load_state_dict(self._state)
        for group, settings in zip(self._scheduler.optimizer.param_groups, self._settings, strict=True):
            for key, value in settings.items():
                if isinstance(value, Tensor):
                    group[key].copy_(value)
                else:
                    group[key] = value


class LearningRateHold:
    """Holds ``interval="step"`` schedulers on a skipped step, by wrapping ``pl_module.lr_scheduler_step``.

    If the outcome of the step is known when Lightning steps the scheduler, a skip simply leaves it out. If it is still
    on its way (fused optimizers), the scheduler steps, and goes back when the outcome turns out to be a skip. That is
    before the next optimizer step, so every step that is made uses the learning rate it would have without skips.
    Schedulers with ``interval="epoch"`` count epochs and are left alone.
    """

    def __init__(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        self._trainer = trainer
        self._pl_module = pl_module
        self._method: InstanceMethod | None = None
        self._skipped: bool | None = False
        self._snapshots: list[_SchedulerSnapshot] = []

    def attach(self) -> None:
        """Starts holding."""
        self._method = InstanceMethod(self._pl_module, "lr_scheduler_step", self._step)

    def detach(self) -> None:
        """Puts the module's own method back."""
        if self._method is not None:
            self._method.restore()
            self._method = None

    def expect_outcome(self) -> None:
        """A step was made whose outcome is not known yet."""
        self._skipped = None

    def settle(self, *, skipped: bool) -> None:
        """The outcome of the last step is known."""
        self._skipped = skipped
        snapshots, self._snapshots = self._snapshots, []
        if skipped:
            for snapshot in reversed(snapshots):
                snapshot.restore()

    def _step(self, scheduler: Any, metric: Any | None) -> None:
        assert self._method is not None
        counts_steps = any(
            config.scheduler is scheduler and config.interval == "step" for config in self._trainer.lr_scheduler_configs
        )
        if counts_steps:
            if self._skipped:
                return
            if self._skipped is None:
                self._snapshots.append(_SchedulerSnapshot(scheduler))
        self._method.original(scheduler, metric)


class AveragingHold:
    """Holds Lightning's ``WeightAveraging`` (EMA) on a skipped step, by wrapping its public ``should_update``.

    The average is updated at the end of the batch, so here the outcome is waited for.

    Args:
        trainer: its ``WeightAveraging`` callbacks are held.
        before_asking: makes sure that the outcome of the last step is known.
    """

    def __init__(self, trainer: "pl.Trainer", before_asking: Callable[[], None]) -> None:
        self._trainer = trainer
        self._before_asking = before_asking
        self._methods: list[InstanceMethod] = []
        self._skipped = False

    def attach(self) -> None:
        """Starts holding."""
        for callback in callbacks_of(self._trainer):
            if isinstance(callback, WeightAveraging):
                self._hold(callback)

    def _hold(self, callback: WeightAveraging) -> None:
        def should_update(step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
            self._before_asking()
            if step_idx is not None and self._skipped:
                return False
            return bool(method.original(step_idx=step_idx, epoch_idx=epoch_idx))

        method = InstanceMethod(callback, "should_update", should_update)
        self._methods.append(method)

    def detach(self) -> None:
        """Puts the callbacks' own methods back."""
        for method in self._methods:
            method.restore()
        self._methods = []

    def settle(self, *, skipped: bool) -> None:
        """The outcome of the last step is known."""
        self._skipped = skipped
