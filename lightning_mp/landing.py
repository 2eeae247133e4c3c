"""Where a token budget ends: which micro-batch is the last, and how many of its tokens still count. Pure functions."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

__all__ = ["Landing", "LandingMode", "TokenBudget", "land"]

LandingMode = Literal["exact", "floor", "ceil"]


@dataclass(frozen=True)
class TokenBudget:
    """A number of loss-bearing tokens over all ranks, and how to end on it.

    Args:
        tokens: the budget.
        landing: "exact" hides surplus tokens of the last micro-batch from the loss; "floor" ends before the first
            micro-batch that would go past the budget; "ceil" ends after the first that reaches it.

    Raises:
        ValueError: if ``tokens`` is not positive or ``landing`` is unknown.
    """

    tokens: int
    landing: LandingMode = "exact"

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise ValueError(f"The token budget is {self.tokens}; it must be 1 token or more.")
        if self.landing not in get_args(LandingMode):
            raise ValueError(f"landing={self.landing!r} is unknown; it must be one of {get_args(LandingMode)}.")


@dataclass(frozen=True)
class Landing:
    """What happens to one micro-batch.

    Attributes:
        keep_tokens: for each rank the tokens that count.
        is_last: whether the run ends with this micro-batch.
    """

    keep_tokens: tuple[int, ...]
    is_last: bool


def land(counts: Sequence[int], remaining: int, mode: LandingMode, largest_micro_batch: int) -> Landing:
    """Decides about the next micro-batch.

    With "exact" every rank keeps one token or more, since a mean over no token is nan. Therefore the micro-batch before
    the last one is shortened when it would leave fewer tokens than there are ranks. Where micro-batches have less than
    two tokens per rank that cannot always be, and up to one token per rank too much is trained on.

    Args:
        counts: loss-bearing tokens of this micro-batch on each rank.
        remaining: tokens that are left in the budget before it.
        mode: see :class:`TokenBudget`.
        largest_micro_batch: the most tokens that a micro-batch of this run can hold over all ranks ("floor").

    Example:
        >>> land([512, 512], remaining=1500, mode="exact", largest_micro_batch=1024)
        Landing(keep_tokens=(512, 512), is_last=False)
        >>> land([512, 512], remaining=476, mode="exact", largest_micro_batch=1024)
        Landing(keep_tokens=(475, 1), is_last=True)
        >>> land([512, 512], remaining=1500, mode="floor", largest_micro_batch=1024)
        Landing(keep_tokens=(512, 512), is_last=True)
    """
    total, num_ranks = sum(counts), len(counts)
    after = remaining - total
    if mode == "ceil":
        return Landing(tuple(counts), is_last=after <= 0)
    if mode == "floor":
        return Landing(tuple(counts), is_last=after < max(largest_micro_batch, 1))
    if after <= 0:
        return Landing(_spread(counts, remaining), is_last=True)
    if after < num_ranks:
        return Landing(_spread(counts, remaining - num_ranks), is_last=False)
    return Landing(tuple(counts), is_last=False)


def _spread(counts: Sequence[int], total: int) -> tuple[int, ...]:
    """``total`` tokens given to the ranks in order, one at least to each that has one."""
    kept = [min(1, count) for count in counts]
    spare = total - sum(kept)
    for rank, count in enumerate(counts):
        more = max(0, min(count - kept[rank], spare))
        kept[rank] += more
        spare -= more
    return tuple(kept)
