"""How a fit accumulates: what callbacks request of the controller, checked against each other."""

from dataclasses import dataclass
from typing import Any

from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_mp.training.accumulation.accumulate_grad_batches import AccumulateGradBatches, TotalSteps
from lightning_mp.training.accumulation.schedule import Unit, WindowSchedule
from lightning_mp.training.gradients.sync import Sync
from lightning_mp.training.tokens.budget import TokenBudget
from lightning_mp.training.tokens.loss_weighting import CountFunction, WeightBy, Weighting


@dataclass
class AccumulationSettings:
    """The settings of one ``fit``. Callbacks fill them in before it starts, and not later.

    What does change during a fit is in :class:`lightning_mp.training.accumulation.windows.AccumulationState`.
    """

    constant: int = 1  # micro-batches per window without a schedule: `Trainer(accumulate_grad_batches=...)`
    schedule: WindowSchedule | None = None  # how long windows are
    sync: Sync = "window"  # when sharded gradients are reduced
    saves_partial_gradients: bool = False  # checkpoints may be written inside a window, and hold its gradient so far
    carries_over: bool = False  # a window may continue in the next epoch
    weighting: Weighting | None = None  # what micro-batches weigh; None while nothing was requested
    weighs_by_loss: bool = False  # a precision plugin or MicroBatchOnOOM has them weigh what their loss averages over
    follows_trainer: bool = False  # nothing but weights was requested: windows are Lightning's
    budget: TokenBudget | None = None  # where the run ends
    # optimizer steps of the whole schedule, for `trainer.estimated_stepping_batches`
    total_steps: TotalSteps | None = None

    @property
    def tokens_for(self) -> str:
        """The part for which tokens must be counted, whatever micro-batches weigh."""
        if self.budget is not None:
            return "ChinchillaBudget"
        return "AccumulationScheduler" if "token" in self.units else ""

    @property
    def units(self) -> frozenset[Unit]:
        """What must be counted for the schedule."""
        return self.schedule.units if self.schedule is not None else frozenset()

    def follow(
        self, schedule: WindowSchedule, sync: Sync, *, partial_gradients: bool, carry_over: bool, total: TotalSteps
    ) -> None:
        """Lengths of windows come from ``schedule``, asked once when a window opens."""
        if self.constant != 1:
            raise MisconfigurationException(
                f"Trainer(accumulate_grad_batches={self.constant}) and an AccumulationScheduler both set the number of"
                " micro-batches per optimizer step. Leave accumulate_grad_batches out, or remove the callback."
            )
        if self.schedule is not None:
            raise MisconfigurationException("There are two AccumulationSchedulers; merge them into one schedule.")
        self.schedule, self.sync, self.total_steps = schedule, sync, total
        self.saves_partial_gradients, self.carries_over = partial_gradients, carry_over

    def idle_value(self) -> int:
        """The value of ``trainer.accumulate_grad_batches`` where no window is open."""
        total = self.total_steps
        return self.constant if total is None else AccumulateGradBatches(self.constant, total=total)

    def weigh(self, weight_by: WeightBy | None, count: CountFunction | None, **counts: Any) -> None:
        """Micro-batches are weighted, or counted, as one more callback requests: see :meth:`Weighting.joined_by`."""
        self.weighting = (self.weighting or Weighting(None)).joined_by(weight_by, count, **counts)

    def weigh_losses(self) -> None:
        """Micro-batches are weighted by what their losses average over, also where callbacks only count."""
        self.weighs_by_loss = True

    def spend(self, budget: TokenBudget) -> None:
        """The run ends on ``budget``."""
        if self.budget is not None:
            raise MisconfigurationException(
                "There are two ChinchillaBudgets; a run has one budget. Remove one of them."
            )
        self.budget = budget


def refuse_counts_of_unseen_batches(settings: AccumulationSettings) -> None:
    """Refuses what must count a batch before a ``training_step(dataloader_iter)`` has fetched it."""
    known = settings.weighting
    counts = known is not None and (known.weight_by in ("token", "sample") or known.count or known.input_count)
    only_weighs = settings.follows_trainer or settings.schedule is not None
    if counts or settings.tokens_for or "sample" in settings.units or (known is not None and not only_weighs):
        raise MisconfigurationException(
            "training_step(dataloader_iter) fetches its batches itself, so nothing can count their tokens or samples"
            " before. Use training_step(batch, batch_idx), or only AccumulationScheduler with thresholds in epochs or"
            " steps and weight_by='auto' or 'batch'."
        )
