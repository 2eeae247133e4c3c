"""Where a token budget ends: which micro-batch is the last, and how many of its tokens still count. Pure functions."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_mp.ground.core.devices import accumulation_dtype
from lightning_mp.ground.core.ranks import world_size
from lightning_mp.training.tokens import batch_tokens
from lightning_mp.training.tokens.counter import AccumulationTotals, TokenCounter
from lightning_mp.training.tokens.loss_weighting import Measure, Weighting

#: From a batch and the number of tokens to keep in the loss to a function that undoes it.
TrimFunction = Callable[[Any, int], Callable[[], None]]

LandingMode = Literal["exact", "floor", "ceil", "nearest"]


@dataclass(frozen=True)
class TokenBudget:
    """A number of target tokens over all ranks, and how to end on it."""

    tokens: int
    landing: LandingMode = "exact"
    makes_up_for_skips: bool = False
    trim: TrimFunction | None = None

    def __post_init__(self) -> None:
        if self.landing not in get_args(LandingMode):
            raise ValueError(f"landing={self.landing!r} is unknown; it must be one of {get_args(LandingMode)}.")


@dataclass(frozen=True)
class LastBatch:
    """What happens to one micro-batch."""

    keep_tokens: tuple[int, ...]  # for each rank the tokens that count
    is_last: bool  # whether the run ends with this micro-batch


def split_last_batch(counts: Sequence[int], remaining: int, mode: LandingMode, largest_micro_batch: int) -> LastBatch:
    """Decides about the next micro-batch.

    With "exact" every rank keeps one token or more, since a mean over no token is nan. Therefore the micro-batch before
    the last one is shortened when it would leave fewer tokens than there are ranks. Where micro-batches have less than
    two tokens per rank that cannot always be, and up to one token per rank too much is trained on.
    """
    total, num_ranks = sum(counts), len(counts)
    after = remaining - total
    if mode != "exact":
        return LastBatch(tuple(counts), is_last=is_spent(after, mode, largest_micro_batch))
    if after <= 0:
        return LastBatch(_spread(counts, remaining), is_last=True)
    if after < num_ranks:
        return LastBatch(_spread(counts, remaining - num_ranks), is_last=False)
    return LastBatch(tuple(counts), is_last=False)


def is_spent(remaining: int, mode: LandingMode, largest_micro_batch: int) -> bool:
    """Whether no further micro-batch belongs into a budget of which n tokens remain.

    >>> [is_spent(60, mode, largest_micro_batch=100) for mode in ("exact", "floor", "ceil", "nearest")]
    [False, True, False, False]
    """
    if mode == "floor":
        return remaining < max(largest_micro_batch, 1)
    if mode == "nearest":
        return 2 * remaining <= largest_micro_batch
    return remaining <= 0


def _spread(counts: Sequence[int], total: int) -> tuple[int, ...]:
    """``total`` tokens given to the ranks in order, one at least to each that has one."""
    kept = [min(1, count) for count in counts]
    spare = total - sum(kept)
    for rank, count in enumerate(counts):
        more = max(0, min(count - kept[rank], spare))
        kept[rank] += more
        spare -= more
    return tuple(kept)


def spent_tokens(budget: TokenBudget, counter: TokenCounter) -> int:
    """Tokens of a counter that count for a budget."""
    return counter.tokens - (counter.skipped_tokens if budget.makes_up_for_skips else 0)


def is_spent_already(
    budget: TokenBudget, counter: TokenCounter, window_tokens: int, growth: float | None, *, had_ended: bool
) -> bool:
    """Whether a run that starts, or is resumed, has spent its budget, which may differ from the earlier one."""
    left = budget.tokens - spent_tokens(budget, counter) - window_tokens
    if not had_ended and growth is None:
        return left <= 0
    return is_spent(left, budget.landing, round(counter.largest_micro_batch * (growth or 1.0)))


class BudgetLimiter:
    """Trims the micro-batch in which a budget ends."""

    def __init__(
        self, counter: TokenCounter, weighting: Weighting, data_rank: int, num_data_ranks: int, device: torch.device
    ) -> None:
        self._counter = counter
        self._weighting = weighting
        self._data_rank = data_rank  # this rank among those that see different data
        self._is_alone = num_data_ranks == 1
        self._device = device
        self._undo_trim: Callable[[], None] | None = None

    def limit(
        self, budget: TokenBudget, totals: AccumulationTotals | None, position: int, measure: Measure, batch: Any
    ) -> tuple[Measure, bool]:
        """Trims the micro-batch if the budget ends in it; ``totals`` and ``position`` are of the open window before it.

        Returns what it then measures, and whether the run ends with it. Waits for the device only near the end: tokens
        that are still pending are bounded by twice the largest micro-batch so far, since lengths vary.
        """
        position = 0 if totals is None else position
        largest = self._counter.largest_micro_batch
        most = 2 * largest * (self._counter.unread_micro_batches + position + 2)
        # What other ranks hold is not known without asking them.
        most += measure.most_tokens if self._is_alone else 0
        if largest > 0 and spent_tokens(budget, self._counter) + most < budget.tokens:
            return measure, False
        self._counter.flush_pending()
        window_tokens, counts = self._gather(totals or AccumulationTotals(), measure)
        if self._counter.windows == 0 and position == 0:
            self._check_first(budget, batch, sum(counts))
        remaining = budget.tokens - spent_tokens(budget, self._counter) - window_tokens
        largest = max(self._counter.largest_micro_batch, measure.most_tokens * len(counts))
        landing = split_last_batch(counts, remaining, budget.landing, largest)
        kept = landing.keep_tokens[self._data_rank]
        if kept == counts[self._data_rank]:
            return measure, landing.is_last
        self._undo_trim = self._trim(budget, batch, kept)
        trimmed = self._weighting.measure(batch)
        if trimmed.input_tokens == measure.input_tokens:  # tokens without a label now are no padding
            trimmed = replace(trimmed, nonpad_tokens=measure.nonpad_tokens)
        return trimmed, landing.is_last

    def restore_labels(self) -> None:
        """Puts the labels back into a trimmed batch: the data set may hold the very same container."""
        undo, self._undo_trim = self._undo_trim, None
        if undo is not None:
            undo()

    def _trim(self, budget: TokenBudget, batch: Any, keep_tokens: int) -> Callable[[], None]:
        if budget.trim is not None:
            return budget.trim(batch, keep_tokens)
        labels = batch_tokens.trim_labels_(batch, keep_tokens, shifted=self._weighting.shifted)
        return lambda: batch_tokens.replace_labels_(batch, labels)

    def _check_first(self, budget: TokenBudget, batch: Any, tokens: int) -> None:
        if budget.tokens < tokens:
            raise MisconfigurationException(
                f"The budget of {budget.tokens:,} tokens is smaller than one micro-batch, which has {tokens:,}"
                " tokens over all ranks. Raise the budget or make the batch smaller."
            )
        if budget.landing != "exact" or budget.trim is not None:
            return
        if self._weighting.count is not None:
            raise MisconfigurationException(
                "landing='exact' trims labels, and with count= it is not known how that changes the count."
                " Give trim= too, choose landing='floor' or landing='ceil', or leave count= out."
            )
        if not batch_tokens.replaceable_labels(batch):
            raise MisconfigurationException(
                f"landing='exact' must hide surplus labels, but a batch of type {type(batch).__name__!r} has no labels"
                " that can be replaced. Give batches as a list [inputs, labels] or a dict with 'labels', give trim=,"
                " or choose landing='floor' or landing='ceil'."
            )

    def _gather(self, totals: AccumulationTotals, measure: Measure) -> tuple[int, list[int]]:
        """Tokens of the open window over all ranks, and of this micro-batch on each rank that sees its own data."""
        dtype = accumulation_dtype(self._device)
        rank = torch.full((), self._data_rank, dtype=dtype, device=self._device)
        tokens = torch.as_tensor(measure.tokens, device=self._device)
        local = torch.stack([rank, totals.tokens(self._device), tokens.to(dtype)])
        rows = [local]
        if world_size() > 1:
            rows = [torch.empty_like(local) for _ in range(dist.get_world_size())]
            dist.all_gather(rows, local)
        # Ranks that share their data (tensor parallel) say the same; each data rank counts once.
        by_data_rank = {round(rank): (round(before), round(now)) for rank, before, now in torch.stack(rows).tolist()}
        counts = [by_data_rank[rank] for rank in sorted(by_data_rank)]
        return sum(before for before, _ in counts), [now for _, now in counts]
