"""Outcomes of steps made by Lightning's own precision plugins."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Self

import lightning.pytorch as pl
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from lightning_mp.ground.core import private_optimizer_api
from lightning_mp.ground.core.patches import Patch, Patches
from lightning_mp.ground.core.private_trainer_api import callbacks_of
from lightning_mp.training.gradients.fused_optimizers import applies_grad_scale, momentum_is_missing
from lightning_mp.training.gradients.replication import GradientReplication, gradient_replication
from lightning_mp.training.optimizer_step.gradient_epilogue import GradientEpilogue
from lightning_mp.training.optimizer_step.gradient_observers import clips_by_itself, gradient_consumers
from lightning_mp.training.optimizer_step.outcome_dispatcher import StepOutcomeDispatcher, StepReport


class NonFiniteGuard:
    """Checks one step's gradients between the closure and the optimizer.

    Ranks agree by one reduction. A fused optimizer gets the flag and skips in its own kernel. Any other finds no
    gradients on a skip, and an optimizer does not change parameters without a gradient, nor their moments.
    Hooks that may write are followed by another check (one pass): they can break gradients, but not repair them.
    """

    def __init__(self, optimizer: Optimizer, ranks: GradientReplication, model: "pl.LightningModule") -> None:
        self._optimizer = optimizer
        self._model = model
        self._epilogue = GradientEpilogue(optimizer, None, ranks=ranks, device=model.device)
        self._epilogue.reduce(None)
        self.waited = not applies_grad_scale(optimizer) or momentum_is_missing(optimizer)

    def clip(self, clip: Callable[[], None]) -> None:
        """Clips, unless the step is to be skipped; call it after ``on_before_optimizer_step``."""
        trainer = self._model.trainer
        if gradient_consumers(callbacks_of(trainer), self._model, trainer.global_step) == "writers":
            self._epilogue.check_again()
        if self._skips():
            return
        clip()
        if clips_by_itself(self._model):
            self._epilogue.check_again()
            self._skips()

    def _skips(self) -> bool:
        """Tells the optimizer; True if the host knows that the step is to be skipped."""
        if not self.waited:
            self._optimizer.found_inf = self._epilogue.found_inf  # type: ignore[attr-defined]  # torch's protocol
            return False
        if not self._epilogue.wait_for_decision():
            return False
        for parameter in self._epilogue.parameters:
            parameter.grad = None
        return True

    def report(self) -> StepReport:
        """The outcome of the checked step."""
        epilogue = self._epilogue
        return StepReport(epilogue.found_inf, None, epilogue.grad_norm, None, epilogue.parameters, epilogue.norms)

    def release(self) -> None:
        """Removes the flag from the optimizer after its step."""
        if hasattr(self._optimizer, "found_inf"):
            del self._optimizer.found_inf


def refuse_unguardable(optimizers: Sequence[Optimizer]) -> None:
    """Refuses optimizers that evaluate the loss inside of their step, where no guard can check the gradients."""
    for optimizer in optimizers:
        if isinstance(optimizer, LBFGS):
            raise several_evaluations(optimizer)


def several_evaluations(optimizer: Optimizer) -> MisconfigurationException:
    """For LBFGS at set-up, and for others once they evaluate a second time: no guard could undo the first."""
    return MisconfigurationException(
        f"OverflowMonitor(guard=True) cannot be used with {type(optimizer).__name__}, which evaluates gradients several"
        " times in one step. Leave guard out, or use another optimizer."
    )


class StockPluginObserver:
    """Wraps ``trainer.precision_plugin.optimizer_step`` on the instance and sees what happened in it.

    The optimizer's own public hook shows whether its ``step`` ran. If it ran with ``optimizer.found_inf`` set (fused
    optimizers), the flag decides, and is read one step late like everywhere else. There is no gradient norm: that would
    cost a pass, which only the guard pays.
    """

    def __init__(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", *, guard: bool = False) -> None:
        if guard:
            refuse_unguardable(trainer.optimizers)
        self._trainer = trainer
        self._guards = guard
        self._dispatcher = StepOutcomeDispatcher(trainer, pl_module)
        self._method: Patch | None = None

    def attach(self) -> Self:
        """Watches until the run ends."""
        Patches.of(self._trainer).at_end(self._dispatcher.detach)
        self._dispatcher.attach(self._trainer.optimizers)
        self._method = Patches.of(self._trainer).replace(
            self._trainer.precision_plugin, "optimizer_step", self._optimizer_step
        )
        return self

    def skipped_before(self, skipped_steps: int) -> None:
        """Sets the number of steps that were skipped before the run was resumed."""
        self._dispatcher.skipped_steps = skipped_steps

    def _optimizer_step(
        self, optimizer: Optimizer, model: "pl.LightningModule", closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        assert self._method is not None
        scaler = getattr(self._trainer.precision_plugin, "scaler", None)
        scaling = scaler if scaler is not None and scaler.is_enabled() else None
        scale: Tensor | None = None
        guard: NonFiniteGuard | None = None

        def closure_then_flush() -> Any:
            nonlocal scale, guard
            result = closure()
            self._dispatcher.flush_pending()
            current = private_optimizer_api.grad_scaler_scale(scaling) if scaling is not None else None
            scale = current.clone() if current is not None else None
            if guard is not None:
                raise several_evaluations(optimizer)
            if self._guards and scaling is None:
                guard = NonFiniteGuard(optimizer, gradient_replication(self._trainer), model)
            return result

        flags: list[Tensor | None] = []
        handle = optimizer.register_step_pre_hook(
            lambda stepping, *_: flags.append(getattr(stepping, "found_inf", None))
        )
        clipping = private_optimizer_api.replace_clipping(
            self._trainer.precision_plugin,
            lambda *args, **kwargs: _clip(guard, partial(clipping.original, *args, **kwargs)),
        )
        try:
            result = self._method.original(optimizer, model=model, closure=closure_then_flush, **kwargs)
        finally:
            handle.remove()
            clipping.undo()
            if guard is not None:
                guard.release()
        if guard is not None:
            self._dispatcher.record(optimizer, guard.report(), flush_now=guard.waited)
            return result
        flag = flags[-1] if flags else None
        found_inf: Tensor | bool = flag if flag is not None else not flags
        self._dispatcher.record(optimizer, StepReport(found_inf, scale), flush_now=flag is None)
        return result


def _clip(guard: NonFiniteGuard | None, clip: Callable[[], None]) -> None:
    if guard is None:
        clip()
    else:
        guard.clip(clip)
