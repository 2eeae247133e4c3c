"""Promise: intervals cover the planted gap as often as they say, and a verdict is not given before it is due."""

import math
import random

import pytest

from lightning_mp.monitors.comparison.paired_difference import PairedDifference, differences_of, student_t_quantile
from lightning_mp.monitors.comparison.paired_runs import steps_to_equal_loss

TRIALS, SEEDS = 200, 10
SEED_SPREAD, PAIR_SPREAD = 0.02, 0.004  # nats: what a seed does to both runs, and what precision and chance do to one
GAPS = (0.0, 0.002, 0.005, 0.02)


def planted(gap: float, trial: int) -> PairedDifference:
    """Final losses of ten seeds, the candidate's higher by ``gap``."""
    draw = random.Random(1000 * trial)
    baseline = [2.4 + draw.gauss(0, SEED_SPREAD) for _ in range(SEEDS)]
    candidate = [loss + gap + draw.gauss(0, PAIR_SPREAD) for loss in baseline]
    return PairedDifference(differences_of(candidate, baseline))


@pytest.mark.parametrize("gap", GAPS)
def test_intervals_cover_planted_gaps(gap):
    intervals = [planted(gap, trial).interval for trial in range(TRIALS)]
    covering = sum(low <= gap <= high for low, high in intervals)
    assert covering >= 0.93 * TRIALS


def test_intervals_are_no_wider_than_they_say():
    """Of 2,000 intervals 95% cover, 1.5% more or less: three standard errors. Covering always would be no merit."""
    covering = sum(low <= 0.002 <= high for low, high in (planted(0.002, trial).interval for trial in range(2000)))
    assert covering == pytest.approx(0.95 * 2000, abs=0.015 * 2000)


def test_verdicts_over_planted_gaps():
    """The margin is 0.004. A wrong verdict comes in 2.5% of the trials at most; three standard errors are allowed."""
    verdicts = {gap: [planted(gap, trial).verdict for trial in range(TRIALS)] for gap in GAPS}
    wrong = round(TRIALS * (0.025 + 3 * math.sqrt(0.025 * 0.975 / TRIALS)))
    assert verdicts[0.0].count("worse") == 0
    assert verdicts[0.0].count("not worse") > 0.75 * TRIALS
    assert verdicts[0.002].count("worse") <= wrong
    assert verdicts[0.005].count("not worse") <= wrong
    assert verdicts[0.005].count("cannot tell yet") > 0.75 * TRIALS
    assert verdicts[0.02].count("worse") == TRIALS


def test_the_seeds_asked_for_decide_most_trials():
    """With as many seeds as the first look asks for, and mean and spread as observed, four of five trials decide."""
    first = PairedDifference(tuple(0.002 + each for each in (-0.004, 0.004, -0.004, 0.004, 0.0)))
    assert first.verdict == "cannot tell yet"
    seeds = first.seeds + first.more_seeds
    decided = 0
    for trial in range(400):
        draw = random.Random(trial)
        second = PairedDifference(tuple(draw.gauss(first.mean, first.deviation) for _ in range(seeds)))
        decided += second.verdict == "not worse"
    assert decided == pytest.approx(320, abs=32)


@pytest.mark.parametrize(
    ("probability", "degrees", "expected"),
    # Abramowitz and Stegun 1964, table 26.10
    [(0.975, 1, 12.706), (0.975, 2, 4.303), (0.975, 9, 2.262), (0.995, 30, 2.750), (0.95, 120, 1.658), (0.5, 4, 0.0)],
)
def test_quantiles_of_student_t(probability, degrees, expected):
    assert student_t_quantile(probability, degrees) == pytest.approx(expected, abs=5e-4)


@pytest.mark.parametrize(
    ("differences", "text"),
    [
        ((0.0, 0.0, 0.0), "not worse"),
        ((0.001, 0.0011, 0.0012), "not worse (higher, but by less than the margin)"),
        ((-0.001, -0.0011, -0.0012), "not worse (lower)"),
        ((-0.001, 0.0011, 0.0), "not worse"),
        ((0.01, 0.011, 0.012), "worse"),
        ((0.001,), "cannot tell yet: 2 more seeds"),
        # by hand: (2.093 + 0.861) x 0.001756 / sqrt(20) is below 0.004 - 0.002833, with 19 seeds it is not
        ((0.003, 0.001, 0.0045), "cannot tell yet: 17 more seeds"),
        ((0.003, 0.005, 0.004), "cannot tell yet: over 1,000 seeds, the difference is as large as the margin"),
        ((0.0, math.inf, 0.0), "worse: 1 of 3 runs diverged"),
    ],
)
def test_verdicts_in_words(differences, text):
    assert str(PairedDifference(differences)) == text


def test_a_margin_that_is_met_exactly_is_no_verdict():
    assert PairedDifference((0.004, 0.004)).verdict == "cannot tell yet"


def test_steps_to_an_equal_loss_follow_a_planted_law():
    """A loss that falls as ``3 - 0.5 ln(step)``: the candidate, 0.1 higher, needs ``exp(0.2)`` times the steps."""
    draw = random.Random(0)
    curves = [[3 - 0.5 * math.log(step) + draw.gauss(0, 0.01) for step in range(1, 401)] for _ in range(4)]
    assert steps_to_equal_loss(0.1, curves) == pytest.approx(math.exp(0.2), rel=0.02)
    assert steps_to_equal_loss(-0.1, curves) == pytest.approx(math.exp(-0.2), rel=0.02)
    assert steps_to_equal_loss(0.0, curves) == 1.0
    assert steps_to_equal_loss(math.inf, curves) is None
    flat = [[3 + draw.gauss(0, 0.01) for _ in range(400)]]
    assert steps_to_equal_loss(0.1, flat) is None
