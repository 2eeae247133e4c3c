"""What monitors read of a run's counts and of its budget, without how windows are formed and weighed.

The accumulation controller and ``ChinchillaBudget`` derive from these two, so that code that only reads them depends on
this module alone.
"""

from typing import TYPE_CHECKING, Self

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from lightning_mp.core.run_state import RunState

if TYPE_CHECKING:
    from lightning_mp.tokens.counter import TokenCounter
    from lightning_mp.tokens.loss_weighting import Measure, WeightBy, Weighting


class RunCounts(Callback):
    """The callback that counts and weighs the micro-batches of a run."""

    #: The totals of all windows that are over.
    counter: "TokenCounter"

    @classmethod
    def of(cls, trainer: "pl.Trainer") -> Self | None:
        """The one that is active for this Trainer, if any."""
        return RunState.of(trainer).callback(cls)

    @property
    def is_open(self) -> bool:
        """Whether the last micro-batch left its window open."""
        raise NotImplementedError

    @property
    def weighting(self) -> "Weighting | None":
        """How micro-batches are measured, settled by the first batch; None where they are not weighted."""
        raise NotImplementedError

    @property
    def weight_by(self) -> "WeightBy | None":
        """How micro-batches are weighted; None where Lightning's division gives them equal weights."""
        raise NotImplementedError

    @property
    def measure(self) -> "Measure | None":
        """The current micro-batch; None where micro-batches are not weighted."""
        raise NotImplementedError

    @property
    def loss_factor(self) -> float | Tensor:
        """Factor of the current micro-batch's loss, in addition to Lightning's division."""
        raise NotImplementedError


class RunBudget(Callback):
    """A callback that ends the run on a budget."""

    @property
    def budget_tokens(self) -> int | None:
        """Tokens on which the run ends as planned now; None for a budget of another kind."""
        raise NotImplementedError
