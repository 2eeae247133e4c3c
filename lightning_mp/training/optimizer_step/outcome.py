"""The outcome of an optimizer step: :class:`StepOutcome`, and the hooks that get it.

Lightning has no hook after the optimizer step, and nothing in it knows whether a step was skipped. Here every attempt
ends in a :class:`StepOutcome`, which reaches every callback, and the module, that has the method

.. code-block:: python

    def on_after_optimizer_step(self, trainer, pl_module, optimizer, outcome): ...  # Callback
    def on_after_optimizer_step(self, optimizer, outcome): ...  # LightningModule
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Self

import lightning.pytorch as pl

from lightning_mp.ground.core.run_state import RunState


@dataclass(frozen=True)
class StepOutcome:
    """One attempt at an optimizer step, as plain Python numbers."""

    step_index: int  #: attempts before this one, skipped ones included (``trainer.global_step`` when it was made).
    stepped: bool  #: whether the weights were changed.
    loss_scale: float = 1.0  #: the scale the loss was multiplied by; 1.0 where there is no scaler.
    #: two-norm of the true gradient over all ranks before clipping; not finite on an overflow; None where it was not
    #: computed (stock plugins).
    grad_norm: float | None = None
    #: tokens, samples or micro-batches that the gradient is the mean of, over all ranks; None where nothing is counted.
    items: float | None = None
    _nonfinite_parameters: Callable[[], list[str]] | None = field(default=None, repr=False, compare=False)

    @property
    def skipped(self) -> bool:
        """Whether the step was skipped: a gradient was not finite, or no micro-batch of the window had a loss."""
        return not self.stepped

    @property
    def overflowed(self) -> bool:
        """Whether the step was skipped because a gradient was not finite."""
        return self.skipped and self.grad_norm != 0.0  # which it is without a loss

    def nonfinite_parameters(self) -> list[str]:
        """Names of the parameters whose gradient on this rank held an inf or a nan, last layer first.

        Costs one small transfer, so read it only when the step was skipped. Empty where the plugin keeps no norms.
        """
        return [] if self._nonfinite_parameters is None else self._nonfinite_parameters()


class StepOutcomeSource:
    """What reports the outcomes of a run's steps; ``StepOutcomeDispatcher`` derives from it, and nothing else does.

    Use it to find out whether outcomes are reported, without importing the dispatcher.
    """

    @classmethod
    def of(cls, trainer: "pl.Trainer") -> Self | None:
        """The one of this Trainer's run; None where a stock plugin reports nothing."""
        return RunState.of(trainer).find(cls)
