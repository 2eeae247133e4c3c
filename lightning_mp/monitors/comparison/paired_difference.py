"""Is one precision worse than another? The paired difference of final losses, its interval, and the verdict."""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import fmean, stdev
from typing import Literal

from typing_extensions import override

Verdict = Literal["not worse", "worse", "cannot tell yet"]

_MOST_SEEDS = 1000
_POWER = 0.8  # chance that this many seeds decide, if the observed mean and spread are the true ones


@dataclass(frozen=True, slots=True)
class PairedDifference:
    """Final loss of a candidate minus that of the baseline, seed by seed.

    The pairs share initial weights and data, so what seeds do to both runs cancels. The verdict is one of
    non-inferiority: the loss may be higher by less than ``margin``.

    Source:
        Student's t interval of paired differences; verdicts as in ICH E9 (1998), section 3.3.2.

    >>> found = PairedDifference((0.001, 0.002, 0.0015, 0.0005), margin=0.004)
    >>> found.verdict, [round(end, 4) for end in found.interval]
    ('not worse', [0.0002, 0.0023])
    """

    differences: tuple[float, ...]
    margin: float = 0.004
    confidence: float = 0.95

    def __post_init__(self) -> None:
        if not self.differences:
            raise ValueError("PairedDifference() was given no differences. Pass one per seed.")
        if not (self.margin > 0 and math.isfinite(self.margin)):
            raise ValueError(f"`margin` must be a positive finite number in the unit of the loss, got {self.margin!r}.")
        if not 0.5 <= self.confidence < 1:
            raise ValueError(f"`confidence` must be from 0.5 to below 1, such as 0.95, got {self.confidence!r}.")

    @property
    def seeds(self) -> int:
        """How many pairs there are."""
        return len(self.differences)

    @property
    def diverged(self) -> int:
        """Number of pairs in which the candidate's loss is not finite."""
        return sum(not math.isfinite(difference) for difference in self.differences)

    @property
    def mean(self) -> float:
        """Mean difference; positive where the candidate is worse."""
        return fmean(self.differences) if not self.diverged else math.inf

    @property
    def deviation(self) -> float:
        """Standard deviation of the differences over seeds; NaN with a single one, or where runs diverged."""
        if self.seeds < 2 or self.diverged:
            return math.nan
        return stdev(self.differences)

    @property
    def interval(self) -> tuple[float, float]:
        """Confidence interval of the mean difference; without bounds for a single seed, or where runs diverged."""
        if self.seeds < 2 or self.diverged:
            return -math.inf, math.inf
        half = student_t_quantile((1 + self.confidence) / 2, self.seeds - 1) * self.deviation / math.sqrt(self.seeds)
        return self.mean - half, self.mean + half

    @property
    def is_nonzero(self) -> bool:
        """Whether 0 lies outside of the interval: there is a difference, though it may be below the margin."""
        low, high = self.interval
        return low > 0 or high < 0

    @property
    def verdict(self) -> Verdict:
        """Where the interval lies: below the margin, above it, or on both sides. A run that diverged is worse."""
        low, high = self.interval
        if self.diverged or low > self.margin:
            return "worse"
        return "not worse" if high < self.margin else "cannot tell yet"

    @property
    def more_seeds(self) -> int | None:
        """Seeds to add for a verdict, with a chance of 80% if mean and spread stay as they are.

        0 where there is a verdict, None where it would take over 1,000. Decide on them once: adding seeds until the
        interval happens to lie on one side makes it narrower than it says.
        """
        if self.verdict != "cannot tell yet":
            return 0
        if self.seeds < 2:
            return 2
        more = 1 + bisect_left(range(self.seeds + 1, _MOST_SEEDS + 1), True, key=self._would_decide)
        return more if self.seeds + more <= _MOST_SEEDS else None

    def _would_decide(self, seeds: int) -> bool:
        quantiles = [student_t_quantile(p, seeds - 1) for p in ((1 + self.confidence) / 2, _POWER)]
        return sum(quantiles) * self.deviation / math.sqrt(seeds) < abs(self.margin - self.mean)

    @override
    def __str__(self) -> str:
        if self.diverged:
            return f"worse: {self.diverged} of {self.seeds} runs diverged"
        if self.verdict == "cannot tell yet":
            more = self.more_seeds
            if more is None:
                return "cannot tell yet: over 1,000 seeds, the difference is as large as the margin"
            return f"cannot tell yet: {more} more {'seed' if more == 1 else 'seeds'}"
        if self.verdict == "not worse" and self.is_nonzero:
            return "not worse (lower)" if self.mean < 0 else "not worse (higher, but by less than the margin)"
        return self.verdict


def differences_of(candidate: Sequence[float], baseline: Sequence[float]) -> tuple[float, ...]:
    """Candidate minus baseline, pair by pair; infinite where the candidate diverged."""
    if not all(map(math.isfinite, baseline)):
        count = sum(not math.isfinite(loss) for loss in baseline)
        raise ValueError(
            f"{count} of {len(baseline)} baseline runs diverged, so there is nothing to compare with. Lower the"
            " learning rate, or put another precision first."
        )
    pairs = zip(candidate, baseline, strict=True)
    return tuple(ours - theirs if math.isfinite(ours) else math.inf for ours, theirs in pairs)


@lru_cache(maxsize=4096)
def student_t_quantile(probability: float, degrees_of_freedom: int) -> float:
    """The value below which Student's t lies with that probability.

    Source:
        Abramowitz and Stegun 1964, 26.7.3 and 26.7.4: exact sums for whole degrees of freedom; solved by bisection.
        Neither torch nor the standard library has this quantile, and scipy is no dependency.

    >>> round(student_t_quantile(0.975, 9), 3), round(student_t_quantile(0.975, 1), 2)
    (2.262, 12.71)
    """
    assert 0.5 <= probability < 1
    assert degrees_of_freedom >= 1
    inside = 2 * probability - 1
    low, high = 0.0, 1.0
    while _share_within(high, degrees_of_freedom) < inside:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        if _share_within(middle, degrees_of_freedom) < inside:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _share_within(t: float, degrees_of_freedom: int) -> float:
    """The probability that T lies between -t and t."""
    angle = math.atan(t / math.sqrt(degrees_of_freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = degrees_of_freedom % 2
    term = total = 0.0
    for index in range(degrees_of_freedom // 2):
        if index == 0:
            term = cosine if odd else 1.0
        else:
            term *= cosine**2 * (2 * index) / (2 * index + 1) if odd else cosine**2 * (2 * index - 1) / (2 * index)
        total += term
    return 2 / math.pi * (angle + sine * total) if odd else sine * total
