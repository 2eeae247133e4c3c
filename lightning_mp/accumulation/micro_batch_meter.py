"""What the first batch and the first loss of a fit settle: how micro-batches are measured, and what they weigh."""

from typing import TYPE_CHECKING, Any, NamedTuple

import lightning.pytorch as pl
from lightning.fabric.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor

from lightning_mp.accumulation.settings import AccumulationSettings
from lightning_mp.accumulation.windows import Window
from lightning_mp.distributed.process_groups import data_rank, num_data_ranks
from lightning_mp.modules.stage_placeholder import is_pipelined
from lightning_mp.tokens import batch_tokens
from lightning_mp.tokens.budget import BudgetLimiter, TokenBudget
from lightning_mp.tokens.counter import AccumulationTotals, TokenCounter
from lightning_mp.tokens.loss_weighting import Measure, Weighting
from lightning_mp.tokens.ragged_batches import RaggedBatches

if TYPE_CHECKING:
    from lightning_mp.tokens.loss_average import CountCheck, LossAverage


class MicroBatchMeter:
    """Settles with the first batch how all of them are measured; trims the one in which the budget ends."""

    def __init__(
        self,
        trainer: "pl.Trainer",
        pl_module: "pl.LightningModule",
        settings: AccumulationSettings,
        counter: TokenCounter,
        first_batch: Any,
    ) -> None:
        assert settings.weighting is not None
        self.weighting = settings.weighting.resolved(
            first_batch,
            shifted=bool(trainer.strategy.broadcast(batch_tokens.shifts_labels_inside(pl_module, first_batch))),
            needs_tokens=settings.needs_tokens,
            needs_samples=settings.needs_samples,
        )
        self.schedule_counts = settings.schedule is not None and not settings.schedule.units <= {"epoch", "step"}
        self.looks_at_rows = self.weighting.counts_rows
        self.has_trimmed = False
        self._limiter = BudgetLimiter(counter, self.weighting, data_rank(trainer), pl_module.device)
        self._ragged = RaggedBatches(
            "accumulation weighs micro-batches, or counts samples, by them.",
            "If the loss is a mean over something else, pass count=, a function from a batch to the number that its"
            " loss is a mean over, or put a tensor with one row per sample first.",
        )
        # Until the first loss has shown whether it knows its number.
        self._awaits_loss = settings.weighting.weight_by == "auto" and not settings.weighting.count_weighs
        self._unlooked: Any = None
        self._is_alone = num_data_ranks(trainer) == 1

    def look(self, batch: Any, measure: Measure, window: Window, budget: TokenBudget | None) -> tuple[Measure, bool]:
        """Looks at the rows of a micro-batch, and trims it if the budget ends in it."""
        if self.weighting.takes_rows(batch):
            if self._awaits_loss:
                self._unlooked = batch
            else:
                self._ragged.look(batch)
        if budget is None:
            return measure, False
        position, totals = (window.position, window.totals) if window.is_open else (0, AccumulationTotals())
        # What other ranks hold is not known without asking them.
        certain_tokens = measure.most_tokens if self._is_alone else 0
        if self._limiter.is_far_from_the_end(budget, position, certain_tokens):
            return measure, False
        assert totals is not None
        self.has_trimmed = True
        return self._limiter.begin_micro_batch(budget, totals, position, measure, batch)

    def weighs_rows(self) -> None:
        """The first loss has not shown what it averages over: the rows of batches matter."""
        self._awaits_loss, batch, self._unlooked = False, self._unlooked, None
        if batch is not None:
            self._ragged.look(batch)

    def restore_labels(self) -> None:
        """Puts the labels back into a trimmed batch: the data set may hold the very same container."""
        self.has_trimmed = False
        self._limiter.restore_labels()


class FirstLoss(NamedTuple):
    """What the first loss has settled for a fit."""

    average: "LossAverage | None" = None  # what losses average over, if that decides what micro-batches weigh
    check: "CountCheck | None" = None  # that it is what micro-batches are weighed by


def inspect_first_loss(
    trainer: "pl.Trainer",
    settings: AccumulationSettings,
    weighting: Weighting | None,
    measure: Measure,
    loss: Tensor,
) -> FirstLoss:
    """Decides with the first loss what micro-batches weigh, on all ranks alike, and reports it."""
    from lightning_mp.tokens.loss_average import CountCheck, LossAverage

    asked = settings.weighting
    assert asked is not None
    assert weighting is not None
    if is_pipelined(trainer):
        if settings.follows_trainer:
            rank_zero_info(
                "Micro-batches of one step are weighted by their number of"
                f" {weighting.weight_by}s: the stages of a pipeline do not see what the loss averages over."
            )
        return FirstLoss()
    if asked.weight_by is None and not settings.weighs_by_loss:
        return FirstLoss()
    found = [average for average in LossAverage.of(loss) if average.count(loss) is not None]
    if asked.weight_by is not None and (asked.weight_by != "auto" or asked.count_weighs):
        if len(found) == 1 and found[0].is_over_targets and weighting.weight_by == "token":
            return FirstLoss(check=CountCheck(found[0], "count=" if asked.count_weighs else "their target tokens"))
        return FirstLoss()
    shows = bool(trainer.strategy.reduce_boolean_decision(len(found) == 1, all=True))
    by_default = f"are weighted by their number of {weighting.weight_by}s" if asked.weight_by else "weigh the same"
    if len(found) > 1:
        numbers = " and ".join(f"{float(average.count(loss) or 0):g}" for average in found)
        rank_zero_warn(
            f"Gradient accumulation: the loss adds means over {numbers} items, so no single weight makes micro-batches"
            f" equal to one large batch; they {by_default}. Divide all sums by the same number, or use one micro-batch"
            " per step."
        )
    elif shows:
        counted = float(found[0].count(loss) or 0)
        is_same = asked.weight_by == "auto" and counted == float(measure.items)
        what = f"their number of {weighting.weight_by}s" if is_same else "what their loss averages over"
        rank_zero_info(f"Gradient accumulation: micro-batches are weighted by {what}, {counted:g} in the first one.")
    else:
        rank_zero_info(
            f"Gradient accumulation: micro-batches {by_default}, because the loss does not show what it averages over"
            " (it is a sum, or compiled). To weight them by your own count, use AccumulationScheduler(count=...)."
        )
    return FirstLoss(found[0] if shows else None)
