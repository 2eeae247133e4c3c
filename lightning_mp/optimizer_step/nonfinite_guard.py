"""Steps with non-finite gradients are left out, where a stock plugin without a loss scaler would make them."""

from collections.abc import Callable, Sequence

import lightning.pytorch as pl
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.optim import LBFGS, Optimizer

from lightning_mp.core.private_api import callbacks_of
from lightning_mp.gradients.fused_optimizers import applies_grad_scale, momentum_is_missing
from lightning_mp.gradients.replication import GradientReplication
from lightning_mp.optimizer_step.gradient_epilogue import GradientEpilogue
from lightning_mp.optimizer_step.gradient_observers import clips_by_itself, gradient_consumers
from lightning_mp.optimizer_step.outcome import StepReport


class NonFiniteGuard:
    """One step's gradients, looked at between the closure and the optimizer.

    Ranks agree by one reduction. A fused optimizer gets the flag and skips in its own kernel. Any other finds no
    gradients on a skip, and an optimizer leaves parameters without a gradient alone: weights, moments and weight decay.
    Hooks that may write are followed by another look (one pass): they can break gradients, and not heal them.
    """

    def __init__(self, optimizer: Optimizer, ranks: GradientReplication, model: "pl.LightningModule") -> None:
        self._optimizer = optimizer
        self._model = model
        self._epilogue = GradientEpilogue(optimizer, None, ranks=ranks, device=model.device)
        self._epilogue.reduce(None)
        self.waited = not applies_grad_scale(optimizer) or momentum_is_missing(optimizer)

    def clip(self, clip: Callable[[], None]) -> None:
        """For the moment after ``on_before_optimizer_step``: clips, unless the step is to be skipped."""
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
        """What came of it."""
        epilogue = self._epilogue
        return StepReport(epilogue.found_inf, None, epilogue.grad_norm, None, epilogue.parameters, epilogue.norms)

    def release(self) -> None:
        """Takes the flag off the optimizer after its step."""
        if hasattr(self._optimizer, "found_inf"):
            del self._optimizer.found_inf


def refuse_unguardable(optimizers: Sequence[Optimizer]) -> None:
    """Refuses what makes its steps where no guard can look."""
    for optimizer in optimizers:
        if isinstance(optimizer, LBFGS):
            raise several_evaluations(optimizer)


def several_evaluations(optimizer: Optimizer) -> MisconfigurationException:
    """For LBFGS at set-up, and for others once they ask for a second evaluation: no guard could undo the first."""
    return MisconfigurationException(
        f"OverflowMonitor(guard=True) cannot be used with {type(optimizer).__name__}, which evaluates gradients several"
        " times in one step. Leave guard out, or use another optimizer."
    )
