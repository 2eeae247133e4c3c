"""What callbacks want of the window keeper, gathered and checked against each other."""

from dataclasses import dataclass, replace

from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_mp.gradient_sync import Sync
from lightning_mp.landing import TokenBudget
from lightning_mp.weighting import CountFunction, WeightBy, Weighting
from lightning_mp.window_schedule import WindowSchedule

__all__ = ["WindowRequests"]


@dataclass
class WindowRequests:
    """The wishes for one ``fit``.

    Attributes:
        constant: micro-batches per window where nobody gives a schedule: ``Trainer(accumulate_grad_batches=...)``.
        schedule: how long windows are.
        sync: when sharded gradients are reduced.
        saves_partial_gradients: checkpoints may be written inside a window, and hold its gradient so far.
        straddles_epochs: a window may go on in the next epoch.
        weighting: what micro-batches weigh; None while nobody has asked for anything.
        budget: where the run ends.
    """

    constant: int = 1
    schedule: WindowSchedule | None = None
    sync: Sync = "window"
    saves_partial_gradients: bool = False
    straddles_epochs: bool = False
    weighting: Weighting | None = None
    budget: TokenBudget | None = None

    def follow(
        self,
        schedule: WindowSchedule,
        *,
        sync: Sync = "window",
        save_partial_gradients: bool = False,
        straddle_epochs: bool = False,
    ) -> None:
        """Window lengths come from ``schedule``, asked once when a window opens.

        Args:
            schedule: says how long they are.
            sync: when sharded gradients are reduced, see :func:`lightning_mp.gradient_sync.gradient_sync`.
            save_partial_gradients: checkpoints may be written inside a window, and hold its gradient so far.
            straddle_epochs: a window may go on in the next epoch.

        Raises:
            MisconfigurationException: if the Trainer or another callback sets them already.
        """
        if self.constant != 1:
            raise MisconfigurationException(
                f"Trainer(accumulate_grad_batches={self.constant}) and an AccumulationScheduler both set the number of"
                " micro-batches per optimizer step. Leave accumulate_grad_batches out, or remove the callback."
            )
        if self.schedule is not None:
            raise MisconfigurationException("There are two AccumulationSchedulers; merge them into one schedule.")
        self.schedule = schedule
        self.sync = sync
        self.saves_partial_gradients = save_partial_gradients
        self.straddles_epochs = straddle_epochs

    def weigh(self, weight_by: WeightBy, count: CountFunction | None) -> None:
        """Micro-batches weigh what ``weight_by`` says; ``count`` overrides the labels.

        Raises:
            MisconfigurationException: if two callbacks count tokens in two ways.
        """
        known = self.weighting
        if known is None:
            self.weighting = Weighting(weight_by, count)
            return
        if count is not None and known.count is not None and known.count is not count:
            raise MisconfigurationException("Two callbacks count tokens with different count= functions; use one.")
        chosen = known.weight_by if known.weight_by != "auto" else weight_by
        self.weighting = Weighting(chosen, known.count if known.count is not None else count)

    def spend(self, budget: TokenBudget) -> None:
        """The run ends on ``budget``.

        Raises:
            MisconfigurationException: if there is a budget already.
        """
        if self.budget is not None:
            raise MisconfigurationException(
                "There are two ChinchillaBudgets; a run has one budget. Remove one of them."
            )
        self.budget = budget

    def end_at(self, tokens: int) -> None:
        """The run ends on so many tokens: its budget is another now, or it has one now and reaches it ("ceil")."""
        self.budget = TokenBudget(tokens, "ceil") if self.budget is None else replace(self.budget, tokens=tokens)
