"""Outcomes of steps made by Lightning's own precision plugins."""

from collections.abc import Callable
from typing import Any, Self

import lightning.pytorch as pl
from torch import Tensor
from torch.optim import Optimizer

from lightning_mp import seams
from lightning_mp.holds import InstanceMethod
from lightning_mp.outcome import StepDispatcher, StepReport
from lightning_mp.precision.guard import NonFiniteGuard, refuse_unguardable
from lightning_mp.precision.ranks import stepping_ranks

__all__ = ["StockStepObserver"]


class StockStepObserver:
    """Wraps ``trainer.precision_plugin.optimizer_step`` on the instance and sees what happened in it.

    The optimizer's own public hook tells whether its ``step`` ran. If it ran with ``optimizer.found_inf`` set (fused
    optimizers), the flag decides, and is read one step late like everywhere else. There is no gradient norm: that would
    cost a pass, which only the guard pays.

    Args:
        trainer: a Trainer with a precision plugin that is not ours.
        pl_module: its module.
        guard: skip non-finite steps where there is no loss scaler that does.

    Raises:
        MisconfigurationException: if ``guard`` is asked for where no guard can look.
    """

    def __init__(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", *, guard: bool = False) -> None:
        if guard:
            refuse_unguardable(trainer, trainer.optimizers)
        self._trainer = trainer
        self._guards = guard
        self._dispatcher = StepDispatcher(trainer, pl_module)
        self._method: InstanceMethod | None = None

    def attach(self) -> Self:
        """Starts watching."""
        self._dispatcher.attach(self._trainer.optimizers)
        self._method = InstanceMethod(self._trainer.precision_plugin, "optimizer_step", self._optimizer_step)
        return self

    def skipped_before(self, skipped_steps: int) -> None:
        """So many steps of the run were skipped before it was resumed."""
        self._dispatcher.skipped_steps = skipped_steps

    def detach(self) -> None:
        """Puts the plugin's own method back."""
        if self._method is not None:
            self._method.restore()
            self._method = None
        self._dispatcher.detach()

    def _optimizer_step(
        self, optimizer: Optimizer, model: "pl.LightningModule", closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        assert self._method is not None
        scaler = getattr(self._trainer.precision_plugin, "scaler", None)
        scaling = scaler if scaler is not None and scaler.is_enabled() else None
        scale: Tensor | None = None
        guard: NonFiniteGuard | None = None

        def closure_then_settle() -> Any:
            nonlocal scale, guard
            result = closure()
            self._dispatcher.settle()
            current = seams.grad_scaler_scale(scaling) if scaling is not None else None
            scale = current.clone() if current is not None else None
            if self._guards and scaling is None:
                guard = NonFiniteGuard(optimizer, stepping_ranks(self._trainer), model)
            return result

        flags: list[Tensor | None] = []
        handle = optimizer.register_step_pre_hook(
            lambda stepping, *_: flags.append(getattr(stepping, "found_inf", None))
        )
        try:
            result = self._method.original(optimizer, model=model, closure=closure_then_settle, **kwargs)
        finally:
            handle.remove()
            if guard is not None:
                guard.release()
        if guard is not None:
            self._dispatcher.record(optimizer, guard.report(), settle_now=guard.waited)
            return result
        flag = flags[-1] if flags else None
        found_inf: Tensor | bool = flag if flag is not None else not flags
        self._dispatcher.record(optimizer, StepReport(found_inf, scale), settle_now=flag is None)
        return result
