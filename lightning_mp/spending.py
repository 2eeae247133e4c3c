"""Ends a run on its token budget: decides about each micro-batch and trims the last one."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_mp import batch_counts
from lightning_mp.gradients import accumulation_dtype
from lightning_mp.landing import TokenBudget, land
from lightning_mp.ledger import TokenLedger, WindowTotals
from lightning_mp.weighting import Measure, Weighting

__all__ = ["OpenWindow", "Spending"]


@dataclass(frozen=True)
class OpenWindow:
    """Where a run stands when a micro-batch begins.

    Attributes:
        totals: of the window's earlier micro-batches on this rank.
        position: how many of them there are.
        measure: the micro-batch that begins.
        data_rank: this rank among those that see different data.
        device: where counts are gathered.
    """

    totals: WindowTotals
    position: int
    measure: Measure
    data_rank: int
    device: torch.device


class Spending:
    """Spends a budget.

    Args:
        budget: how much, and how to end.
        ledger: what was spent so far, over all ranks.
        weighting: counts micro-batches.
    """

    def __init__(self, budget: TokenBudget, ledger: TokenLedger, weighting: Weighting) -> None:
        self._budget = budget
        self._ledger = ledger
        self._weighting = weighting
        self._undo_trim: Callable[[], None] | None = None

    def is_far_from_the_end(self, position: int, certain_tokens: int) -> bool:
        """Whether the budget cannot end in the next micro-batch. All ranks answer alike, and nothing is waited for.

        Tokens that are still on their way are bounded by twice the largest micro-batch so far, since lengths vary.

        Args:
            position: micro-batches of the window before this one.
            certain_tokens: the most that this micro-batch can hold, if there is one rank; else 0, since the others'
                are not known.
        """
        largest = self._ledger.largest_micro_batch
        in_flight = self._ledger.unread_micro_batches + position + 2
        return largest > 0 and self._spent_tokens + 2 * largest * in_flight + certain_tokens < self._budget.tokens

    @property
    def _spent_tokens(self) -> int:
        skipped = self._ledger.skipped_tokens if self._budget.makes_up_for_skips else 0
        return self._ledger.tokens - skipped

    def begin_micro_batch(self, window: OpenWindow, batch: Any) -> tuple[bool, Measure]:
        """Trims the micro-batch if it must. Waits for the device; ask :meth:`is_far_from_the_end` first.

        Returns:
            Whether the run ends with this micro-batch, and what it now measures.

        Raises:
            MisconfigurationException: at the first micro-batch of a run, if the budget cannot end as asked for.
        """
        self._ledger.settle()
        window_tokens, counts = _gather(window)
        if self._ledger.windows == 0 and window.position == 0:
            self._check_first(batch, sum(counts))
        remaining = self._budget.tokens - self._spent_tokens - window_tokens
        largest = max(self._ledger.largest_micro_batch, window.measure.presented_tokens * len(counts))
        landing = land(counts, remaining, self._budget.landing, largest)
        kept = landing.keep_tokens[window.data_rank]
        if kept == counts[window.data_rank]:
            return landing.is_last, window.measure
        self._undo_trim = self._trim(batch, kept)
        return landing.is_last, self._weighting.measure(batch)

    def restore_labels(self) -> None:
        """Puts the labels back into a trimmed batch: the data set may hold the very same container."""
        undo, self._undo_trim = self._undo_trim, None
        if undo is not None:
            undo()

    def _trim(self, batch: Any, keep_tokens: int) -> Callable[[], None]:
        if self._budget.trim is not None:
            return self._budget.trim(batch, keep_tokens)
        labels = batch_counts.trim_labels_(batch, keep_tokens, shifted=self._weighting.shifted)
        return lambda: batch_counts.replace_labels_(batch, labels)

    def _check_first(self, batch: Any, tokens: int) -> None:
        if self._budget.tokens < tokens:
            raise MisconfigurationException(
                f"The budget of {self._budget.tokens:,} tokens is smaller than one micro-batch, which has {tokens:,}"
                " tokens over all ranks. Raise the budget or make the batch smaller."
            )
        if self._budget.landing != "exact" or self._budget.trim is not None:
            return
        if self._weighting.count is not None:
            raise MisconfigurationException(
                "landing='exact' trims labels, and with count= nobody knows what that does to the count."
                " Give trim= too, choose landing='floor' or landing='ceil', or leave count= out."
            )
        if not batch_counts.replaceable_labels(batch):
            raise MisconfigurationException(
                f"landing='exact' must hide surplus labels in the last batch, but a batch of type"
                f" {type(batch).__name__!r} has no labels that can be exchanged. Give batches as a list"
                " [inputs, labels] or a dict with 'labels', give trim=, or choose landing='floor' or landing='ceil'."
            )


def _gather(window: OpenWindow) -> tuple[int, list[int]]:
    """Tokens of the open window over all ranks, and of this micro-batch on each rank that sees data of its own."""
    dtype = accumulation_dtype(window.device)
    rank = torch.full((), window.data_rank, dtype=dtype, device=window.device)
    tokens = torch.as_tensor(window.measure.tokens, device=window.device)
    local = torch.stack([rank, window.totals.tokens(window.device), tokens.to(dtype)])
    rows = [local]
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        rows = [torch.empty_like(local) for _ in range(dist.get_world_size())]
        dist.all_gather(rows, local)
    # Ranks that share their data (tensor parallel) say the same; each data rank counts once.
    by_data_rank = {round(rank): (round(before), round(now)) for rank, before, now in torch.stack(rows).tolist()}
    counts = [by_data_rank[rank] for rank in sorted(by_data_rank)]
    return sum(before for before, _ in counts), [now for _, now in counts]
