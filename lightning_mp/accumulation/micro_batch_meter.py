"""Measures the micro-batches of one fit, and trims the one in which its budget ends."""

from typing import Any

import lightning.pytorch as pl

from lightning_mp.accumulation.settings import AccumulationSettings
from lightning_mp.accumulation.state import Window
from lightning_mp.distributed.data_ranks import data_rank, num_data_ranks
from lightning_mp.tokens import batch_tokens
from lightning_mp.tokens.budget import BudgetLimiter, OpenWindow, TokenBudget
from lightning_mp.tokens.counter import TokenCounter
from lightning_mp.tokens.loss_weighting import Measure
from lightning_mp.tokens.ragged_batches import RaggedBatches

__all__ = ["MicroBatchMeter"]


class MicroBatchMeter:
    """Settles with the first batch how all of them are measured.

    Args:
        trainer: the Trainer that fits.
        pl_module: its module.
        settings: what was asked for, with a weighting.
        counter: what was counted so far, over all ranks.
        first_batch: the first batch of the fit.

    Attributes:
        weighting: how micro-batches are measured.

    Raises:
        MisconfigurationException: if tokens are needed and cannot be counted.
    """

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
        self._trainer = trainer
        self._device = pl_module.device
        self._limiter = BudgetLimiter(counter, self.weighting)
        self._ragged = RaggedBatches(
            "accumulation weighs micro-batches, or counts samples, by them.",
            "If the loss is a mean over something else, pass count=, a function from a batch to the number that its"
            " loss is a mean over, or put a tensor with one row per sample first.",
        )
        # Until the first loss has told whether it knows its own number.
        self._awaits_loss = settings.weighting.weight_by == "auto" and settings.weighting.count is None
        self._unlooked: Any = None
        self._is_alone = num_data_ranks(trainer) == 1

    def measure(self, batch: Any, window: Window, budget: TokenBudget | None) -> tuple[Measure, bool]:
        """Measures a micro-batch, and trims it if the budget ends in it.

        Args:
            batch: the micro-batch that begins.
            window: the open window to which it belongs.
            budget: where the run ends.

        Returns:
            What is left of it, and whether the run ends with it.
        """
        measure = self.weighting.measure(batch)
        if self.weighting.takes_rows(batch):
            if self._awaits_loss:
                self._unlooked = batch
            else:
                self._ragged.look(batch)
        if budget is None:
            return measure, False
        # What other ranks hold is not known without asking them.
        certain_tokens = measure.input_tokens if self._is_alone else 0
        if self._limiter.is_far_from_the_end(budget, window.position, certain_tokens):
            return measure, False
        assert window.totals is not None
        here = OpenWindow(window.totals, window.position, measure, data_rank(self._trainer), self._device)
        ends_run, measure = self._limiter.begin_micro_batch(budget, here, batch)
        return measure, ends_run

    def weighs_rows(self) -> None:
        """The first loss has not told what it averages over: the rows of batches matter."""
        self._awaits_loss, batch, self._unlooked = False, self._unlooked, None
        if batch is not None:
            self._ragged.look(batch)

    def restore_labels(self) -> None:
        """Puts the labels back into a trimmed batch: the data set may hold the very same container."""
        self._limiter.restore_labels()
