"""Steps with non-finite gradients are left out, where a stock plugin without a loss scaler would make them."""

from collections.abc import Sequence

import lightning.pytorch as pl
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.optim import LBFGS, Optimizer

from lightning_mp.fused_optimizers import applies_grad_scale, momentum_is_missing
from lightning_mp.outcome import StepReport
from lightning_mp.precision.epilogue import Epilogue
from lightning_mp.stepping_ranks import SteppingRanks

__all__ = ["NonFiniteGuard", "refuse_unguardable"]


class NonFiniteGuard:
    """One step's gradients, looked at between the closure and the optimizer.

    Ranks agree by one reduction. A fused optimizer gets the flag and skips in its own kernel. Any other finds no
    gradients on a skip, and an optimizer leaves parameters without a gradient alone: weights, moments and weight decay.

    Args:
        optimizer: its gradients are looked at, once.
        ranks: who steps together, and who holds the same gradients.
        model: the module it trains.
    """

    def __init__(self, optimizer: Optimizer, ranks: SteppingRanks, model: "pl.LightningModule") -> None:
        self._optimizer = optimizer
        self._epilogue = Epilogue(optimizer, None, ranks=ranks, device=model.device)
        self._epilogue.reduce(None)
        self.waited = not applies_grad_scale(optimizer) or momentum_is_missing(optimizer)
        if not self.waited:
            optimizer.found_inf = self._epilogue.found_inf  # type: ignore[attr-defined]  # torch's protocol
        elif self._epilogue.wait_for_decision():
            for parameter in self._epilogue.parameters:
                parameter.grad = None

    def report(self) -> StepReport:
        """What came of it."""
        epilogue = self._epilogue
        return StepReport(epilogue.found_inf, None, epilogue.grad_norm, None, epilogue.parameters, epilogue.norms)

    def release(self) -> None:
        """Takes the flag off the optimizer after its step."""
        if hasattr(self._optimizer, "found_inf"):
            del self._optimizer.found_inf


def refuse_unguardable(trainer: "pl.Trainer", optimizers: Sequence[Optimizer]) -> None:
    """Refuses what makes its steps where no guard can look.

    Raises:
        MisconfigurationException: names it.
    """
    if isinstance(trainer.strategy, DeepSpeedStrategy):
        raise MisconfigurationException(
            "OverflowMonitor(guard=True) cannot be used with DeepSpeed, which steps its own optimizer. It skips"
            " non-finite steps itself in fp16; for bf16 use strategy='fsdp' with AutocastPrecision('bf16-mixed')."
        )
    for optimizer in optimizers:
        if isinstance(optimizer, LBFGS):
            raise MisconfigurationException(
                "OverflowMonitor(guard=True) cannot be used with LBFGS, which evaluates gradients several times in one"
                " step. Leave guard out, or use another optimizer."
            )
