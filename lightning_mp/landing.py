"""Where a token budget ends: which micro-batch is the last, and how many of its tokens still count. Pure functions."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

__all__ = ["Landing", "LandingMode", "TokenBudget", "TrimFunction", "land"]

#: From a batch and the number of tokens to keep in the loss to a function that undoes it.
TrimFunction = Callable[[Any, int], Callable[[], None]]

LandingMode = Literal["exact", "floor", "ceil", "nearest"]


@dataclass(frozen=True)
class TokenBudget:
    """A number of loss-bearing tokens over all ranks, and how to end on it.

    Args:
        tokens: the budget.
        landing: "exact" hides surplus tokens of the last micro-batch from the loss; "floor" ends before the first
            micro-batch that would go past the budget; "ceil" ends after the first that reaches it; "nearest" ends
            where the run is at most half a (largest) micro-batch away from it.
        makes_up_for_skips: tokens of skipped optimizer steps do not count.
        trim: hides surplus tokens of a batch where they are not its labels, for "exact".

    Raises:
        ValueError: if ``tokens`` is not positive or ``landing`` is unknown.
    """

    tokens: int
    landing: LandingMode = "exact"
    makes_up_for_skips: bool = False
    trim: TrimFunction | None = None

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
        largest_micro_batch: the most tokens that a micro-batch of this run can hold over all ranks ("floor",
            "nearest").

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
    if mode == "nearest":
        return Landing(tuple(counts), is_last=2 * after <= largest_micro_batch)
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
