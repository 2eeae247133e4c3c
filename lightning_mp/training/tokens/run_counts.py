"""What monitors read of a run's counts and of its budget, without how windows are formed and weighed.

The accumulation controller and ``ChinchillaBudget`` derive from these two, so that code that only reads them depends on
this module alone.
"""

from collections.abc import Callable
from dataclasses import dataclass
from operator import sub
from typing import TYPE_CHECKING, Any, Self

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from lightning_mp.ground.core.run_state import RunState

if TYPE_CHECKING:
    from lightning_mp.training.tokens.counter import TokenCounter
    from lightning_mp.training.tokens.loss_weighting import Measure, WeightBy, Weighting


class RunCounts(Callback):
    """The callback that counts and weighs the micro-batches of a run."""

    #: The totals of all windows that are over.
    counter: "TokenCounter"

    @classmethod
    def of(cls, trainer: "pl.Trainer") -> Self | None:
        """The one that is active for this Trainer, if any."""
        return RunState.of(trainer).callback(cls)

    def at_first_batch(self, function: Callable[[Any], None]) -> None:
        """Calls ``function`` in this fit with its first micro-batch, once that is measured and its window is open."""
        raise NotImplementedError

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


@dataclass(frozen=True, slots=True)
class TokenCounterDelta:
    """Sums over all ranks since the last call."""

    windows: int  # accumulation windows read
    input_tokens: int  # tokens shown to the model, padding included
    nonpad_tokens: int  # those of them that an attention mask does not hide
    # those again without the ones of skipped steps. Negative where a step turns out to be skipped after its tokens were
    # read
    useful_tokens: int


class TokenCounterDeltas:
    """Differences of a counter. A budget counts skipped tokens by their labels; here they count in full."""

    def __init__(self, counter: "TokenCounter") -> None:
        self._counter = counter
        self._seen = self._look()

    @property
    def any(self) -> bool:
        """Whether there is something new."""
        return self._look() != self._seen

    def take(self) -> TokenCounterDelta:
        """Returns what is new since the last call."""
        before, self._seen = self._seen, self._look()
        windows, input_tokens, nonpad_tokens, skipped_tokens = map(sub, self._seen, before)
        return TokenCounterDelta(windows, input_tokens, nonpad_tokens, nonpad_tokens - skipped_tokens)

    def _look(self) -> tuple[int, int, int, int]:
        counter = self._counter
        return counter.windows, counter.input_tokens, counter.nonpad_tokens, counter.skipped_nonpad_tokens


class RunBudget(Callback):
    """A callback that ends the run on a budget."""

    @property
    def budget_tokens(self) -> int | None:
        """Tokens on which the run ends as planned now; None for a budget of another kind."""
        raise NotImplementedError
