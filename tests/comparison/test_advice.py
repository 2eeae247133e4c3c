"""Promise: where a precision does not pay on this machine, the comparison says so."""

import pytest

from lightning_mp.monitors.comparison.paired_difference import PairedDifference
from lightning_mp.monitors.comparison.paired_runs import PairedQuality
from lightning_mp.monitors.comparison.result import PrecisionComparison
from lightning_mp.monitors.comparison.step_cost import StepCost


def cost(ratio=1.0, spread=0.0, peak_bytes=1000):
    """Half of the spread below the ratio, half above."""
    ends = (ratio - spread / 2, ratio + spread / 2)
    return StepCost(ratio / 100, ratio, ends, 100 / ratio, "tokens", peak_bytes, 1e-3)


def advice(candidate, *, differences=None, steps_ratio=None):
    """On one candidate; a pair per difference."""
    quality = {}
    if differences is not None:
        quality = {
            "32-true": PairedQuality((2.0,) * len(differences), None, 1.0),
            "bf16": PairedQuality((2.0,) * len(differences), PairedDifference(differences), steps_ratio),
        }
    (text,) = PrecisionComparison(
        costs={"32-true": cost(), "bf16": candidate},
        quality=quality,
        runs=(),
        steps=10 if quality else None,
        monitor=None,
        margin=0.004,
        confidence=0.95,
        device="cpu",
        versions={},
        gradient_reference="64-true",
    ).advice
    return text


@pytest.mark.parametrize(
    ("candidate", "text"),
    [
        (cost(0.5, 0.1), "bf16 takes 0.50 times the time per batch and saves no memory: it pays here."),
        (
            cost(0.5, 0.1, 600),
            "bf16 takes 0.50 times the time per batch and saves 40% of the peak memory: it pays here.",
        ),
        (cost(1.5, 0.1), "bf16 takes 1.50 times the time per batch and saves no memory: it does not pay here."),
        (cost(1.5, 0.1, 990), "bf16 takes 1.50 times the time per batch and saves no memory: it does not pay here."),
    ],
)
def test_costs_alone(candidate, text):
    assert advice(candidate) == text


def test_a_slower_batch_may_pay_in_memory():
    text = advice(cost(1.5, 0.1, 600))
    assert text.endswith("and saves 40% of the peak memory: it pays here only where memory is short.")


def test_rounds_that_disagree_are_no_gain():
    text = advice(cost(0.95, 0.2))
    assert text.startswith("bf16 takes 0.85 to 1.05 times the time per batch, no clear gain, and saves no memory")
    assert text.endswith(": it does not pay here.")


def test_a_single_round_is_no_verdict():
    text = advice(cost(0.5))
    assert text.startswith("bf16 takes 0.50 times the time per batch in a single round, which may be chance, and")
    assert text.endswith(": time several rounds.")


def test_a_run_that_diverged_never_pays():
    text = advice(cost(0.1, 0.01, 100), differences=(0.0, float("inf")))
    assert text == "bf16 does not pay here: 1 of 2 runs diverged."


@pytest.mark.parametrize(
    ("differences", "steps_ratio", "ending"),
    [
        ((0.001, 0.0012), 1.2, "; 0.96 times the time to an equal loss: it pays here."),
        # faster per batch, but so many more batches for the same loss
        ((0.003, 0.0032), 1.5, "; 1.20 times the time to an equal loss: it does not pay here."),
        ((0.001, 0.0012), None, ": it pays here."),
    ],
)
def test_a_faster_batch_is_worth_what_its_loss_is(differences, steps_ratio, ending):
    text = advice(cost(0.8, 0.1), differences=differences, steps_ratio=steps_ratio)
    assert text == f"bf16 takes 0.80 times the time per batch and saves no memory{ending}"


def test_a_worse_loss_never_pays():
    text = advice(cost(0.1, 0.01, 100), differences=(0.02, 0.021, 0.022), steps_ratio=1.1)
    assert text == "bf16 does not pay here: its loss is higher by 0.0210 (0.0185 to 0.0235), more than 0.004."
