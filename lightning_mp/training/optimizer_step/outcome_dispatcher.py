"""Turns the report of a precision plugin into the outcome of a step, and calls the hooks for it.

Learning-rate schedulers and averaged weights hold on a skipped step, whatever callbacks there are. With a fused
optimizer the decision is made on the device. Waiting for it would stop the host at every step, so the outcome arrives
exactly one optimizer step later, at the same step on every rank: after the next window's backward, before its weights
are changed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Self

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.profilers import PassThroughProfiler
from torch import Tensor
from torch.optim import Optimizer

from lightning_mp.ground.core import private_optimizer_api, private_trainer_api
from lightning_mp.ground.core.host_copy import HostCopy
from lightning_mp.ground.core.patches import Patches
from lightning_mp.ground.core.run_state import RunState
from lightning_mp.training.gradients.ranks_alike import RankConsistencyCheck
from lightning_mp.training.optimizer_step.outcome import StepOutcome, StepOutcomeSource
from lightning_mp.training.optimizer_step.scheduler_frequency import LearningRateFrequency
from lightning_mp.training.optimizer_step.skip_holds import SkippedStepAveragingGuard, SkippedStepSchedulerGuard


@dataclass(frozen=True)
class StepReport:
    """What a precision plugin knows at the end of a step, partly still on the device."""

    found_inf: Tensor | bool  # scalar tensor, 1.0 if the step is skipped; or the answer itself, where the host knows it
    loss_scale: Tensor | None = None  # scalar tensor, or None without a scaler
    grad_norm: Tensor | None = None  # scalar tensor, or None
    items: Tensor | None = None  # scalar tensor, or None
    parameters: Sequence[Tensor] = ()  # the parameters that had a gradient
    parameter_norms: Tensor | None = None  # two-norm of each one's local gradient, shape `[num_parameters]`, or None

    def numbers(self) -> HostCopy:
        """Starts one transfer of all scalars, in the order of the attributes; nan for those that are unknown."""
        scalars = [s for s in (self.found_inf, self.loss_scale, self.grad_norm, self.items) if isinstance(s, Tensor)]
        if not scalars:
            return HostCopy(torch.tensor([float(self.found_inf), torch.nan, torch.nan, torch.nan]))
        device = scalars[0].device
        dtype = torch.float32 if device.type == "mps" else torch.float64

        def on_device(scalar: Tensor | bool | None) -> Tensor:
            if isinstance(scalar, Tensor):
                return scalar.detach().to(device=device, dtype=dtype).reshape(())
            return torch.full((), torch.nan if scalar is None else float(scalar), dtype=dtype, device=device)

        return HostCopy(
            torch.stack([on_device(s) for s in (self.found_inf, self.loss_scale, self.grad_norm, self.items)])
        )

    def nonfinite_parameters(self, pl_module: "pl.LightningModule") -> list[str]:
        """Names of the parameters whose gradient on this rank was not finite, last one first; waits for the device."""
        if self.parameter_norms is None:
            return []
        finite = torch.isfinite(self.parameter_norms).tolist()
        bad = {id(p) for p, is_finite in zip(self.parameters, finite, strict=True) if not is_finite}
        return [name for name, p in pl_module.named_parameters() if id(p) in bad][::-1]


#: Steps in a row that change nothing, after which a warning says so: under a loss scale those without any gradient,
#: without one those that were skipped, as nothing ends such a run.
IDLE_STEPS = 10


@dataclass(frozen=True)
class _Pending:
    optimizer: Optimizer
    step_index: int
    report: StepReport
    numbers: HostCopy


class StepOutcomeDispatcher(StepOutcomeSource):
    """Turns reports into outcomes during one ``fit``; holds schedulers and averages on a skip, and calls the hooks."""

    def __init__(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        self._trainer = trainer
        self._pl_module = pl_module
        self._run = RunState.of(trainer)
        self.skipped_steps = self._run.skipped_steps
        self._pending: _Pending | None = None
        self._last_skipped: bool | None = False  # None while it is on its way
        self._learning_rate = SkippedStepSchedulerGuard(
            trainer, pl_module, lambda: self._last_skipped, self.flush_pending
        )
        self._frequency = LearningRateFrequency(trainer, lambda: self.skipped_steps)
        self._averaging = SkippedStepAveragingGuard(trainer, self.flush_pending, lambda: self.skipped_steps)
        self._profiler = private_trainer_api.profiler_of(trainer)
        self._callbacks: list[Callback] = []
        self._subscribers: list[Callback] = []
        self._idle_steps = 0

    def attach(self, optimizers: Sequence[Optimizer]) -> Self:
        """Starts to hold schedulers and averages on skips; ``optimizers`` are saved after the last outcome is read."""
        self._learning_rate.attach()
        self._frequency.attach()
        self._averaging.attach()
        RankConsistencyCheck(self._trainer, optimizers)
        for optimizer in optimizers:
            self.flush_before_saving(optimizer)
        self._run.keep(self, self.flush_pending)
        return self

    def flush_before_saving(self, optimizer: Optimizer) -> None:
        """Reads the last outcome before this optimizer's state is saved."""
        private_optimizer_api.make_room_for_hooks(optimizer)
        handle = optimizer.register_state_dict_pre_hook(lambda _: self.flush_pending())
        Patches.of(self._trainer).at_end(handle.remove)

    def detach(self) -> None:
        """Reads the last outcome and stops reporting. Replaced methods are restored when the run ends."""
        try:
            self.flush_pending()
        finally:
            self._run.skipped_steps = self.skipped_steps
            self._run.drop(self)

    def record(self, optimizer: Optimizer, report: StepReport, *, flush_now: bool) -> None:
        """Stores the report of the step that was just made."""
        self.flush_pending()
        self._pending = _Pending(optimizer, self._trainer.global_step, report, report.numbers())
        self._last_skipped = None
        if flush_now:
            self.flush_pending()
        for config in self._trainer.lr_scheduler_configs:
            if type(config.frequency) is int:  # it is 1, or was made since the last step
                self._frequency.attach()
                break

    def flush_pending(self) -> None:
        """Reads the outcome of the last step, if it is not known yet: rolls back on a skip, then calls the hooks."""
        # Taken before anything is called: hooks below may have this method called again.
        pending, self._pending = self._pending, None
        if pending is None:
            return
        subscribers = self._subscribed_callbacks()
        found_inf, loss_scale, grad_norm, items = pending.numbers.read()
        outcome = StepOutcome(
            step_index=pending.step_index,
            stepped=found_inf == 0.0,
            loss_scale=1.0 if pending.report.loss_scale is None else loss_scale,
            grad_norm=None if pending.report.grad_norm is None else grad_norm,
            items=None if pending.report.items is None else items,
            _nonfinite_parameters=partial(pending.report.nonfinite_parameters, self._pl_module),
        )
        self._last_skipped = skipped = not outcome.stepped
        self.skipped_steps += skipped
        self._warn_if_idle(outcome, pending)
        # Before the hooks, which see learning rates as they are after a skip.
        self._learning_rate.resolve(skipped=skipped)
        self._averaging.resolve(skipped=skipped)
        for callback in subscribers:
            hook = callback.on_after_optimizer_step  # type: ignore[attr-defined]
            if type(self._profiler) is PassThroughProfiler:
                hook(self._trainer, self._pl_module, pending.optimizer, outcome)
                continue
            with self._profiler.profile(f"[Callback]{callback.state_key}.on_after_optimizer_step"):
                hook(self._trainer, self._pl_module, pending.optimizer, outcome)
        module_hook = getattr(self._pl_module, "on_after_optimizer_step", None)
        if module_hook is not None:
            module_hook(pending.optimizer, outcome)

    def steps_taken(self) -> int:
        """Steps that changed weights, over all runs; in the middle of a step, before it.

        Waits for the outcome of the last step if that is still on its way.
        """
        pending, skipped_steps = self._pending, self.skipped_steps
        if pending is not None and pending.step_index < self._trainer.global_step:
            skipped_steps += pending.numbers.read()[0] != 0.0
        return self._trainer.global_step - skipped_steps

    def _warn_if_idle(self, outcome: StepOutcome, pending: _Pending) -> None:
        is_scaled = pending.report.loss_scale is not None
        is_idle = outcome.stepped and outcome.grad_norm == 0.0 if is_scaled else not outcome.stepped
        self._idle_steps = self._idle_steps + 1 if is_idle else 0
        if self._idle_steps == IDLE_STEPS and not is_scaled:
            if any(hasattr(callback, "skip_streak") for callback in self._subscribers):
                return  # OverflowMonitor says so itself, and ends such a run
            rank_zero_warn(
                f"The last {IDLE_STEPS} steps of {type(pending.optimizer).__name__} were skipped: gradients were not"
                " finite, or there was no loss. More of them do not end the run. OverflowMonitor() would end it, and"
                " OverflowPostMortem(replay=True) names the layer.",
                category=RuntimeWarning,
            )
        elif self._idle_steps == IDLE_STEPS:
            rank_zero_warn(
                f"The last {IDLE_STEPS} steps of {type(pending.optimizer).__name__} had no gradient, or zeros, at loss"
                f" scale {outcome.loss_scale:.10g}. Remove code that clears or replaces non-finite gradients; if"
                " gradients underflow (zeros at a much lower scale, too), raise LossScaler(init_scale=...) or train in"
                " 'bf16-mixed'.",
                category=RuntimeWarning,
            )

    def _subscribed_callbacks(self) -> list[Callback]:
        """Callbacks that have the hook; looked for again when the Trainer's list is another."""
        callbacks = vars(self._trainer)["callbacks"]
        if callbacks != self._callbacks:
            self._callbacks = list(callbacks)
            self._subscribers = [c for c in callbacks if getattr(c, "on_after_optimizer_step", None) is not None]
        return self._subscribers
