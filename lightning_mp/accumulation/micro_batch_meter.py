"""What the first batch of a fit settles: how micro-batches are measured."""

from typing import Any

import lightning.pytorch as pl

from lightning_mp.accumulation.settings import AccumulationSettings
from lightning_mp.accumulation.windows import Window
from lightning_mp.core.trainer_ranks import data_rank, num_data_ranks
from lightning_mp.tokens import batch_tokens
from lightning_mp.tokens.budget import BudgetLimiter, TokenBudget
from lightning_mp.tokens.counter import AccumulationTotals, TokenCounter
from lightning_mp.tokens.loss_weighting import Measure
from lightning_mp.tokens.ragged_batches import RaggedBatches


class MicroBatchMeter:
    """Settles with the first batch how all of them are measured; trims the one in which the budget ends."""

    def __init__(
        self,
        trainer: "pl.Trainer",
        pl_module: "pl.LightningModule",
        settings: AccumulationSettings,
        counter: TokenCounter,
        first_batch: Any,
        *,
        by_loss: bool,
    ) -> None:
        assert settings.weighting is not None
        self.weighting = settings.weighting.resolved(
            first_batch,
            by_loss=by_loss,
            shifted=bool(trainer.strategy.broadcast(batch_tokens.shifts_labels_inside(pl_module, first_batch))),
            tokens_for=settings.tokens_for,
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
        self._is_alone = num_data_ranks(trainer) == 1

    def look(self, batch: Any, measure: Measure, window: Window, budget: TokenBudget | None) -> tuple[Measure, bool]:
        """Inspects the rows of a micro-batch, and trims it if the budget ends in it."""
        if self.weighting.takes_rows(batch):
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

    def restore_labels(self) -> None:
        """Puts the labels back into a trimmed batch: the data set may hold the very same container."""
        self.has_trimmed = False
        self._limiter.restore_labels()
