"""OverflowRate against a count by hand, on one process and two."""

import pytest
import torch
from gloo import process_group, run_ranks

from lightning_mp.metrics import OverflowRate, overflow_rate


@pytest.mark.parametrize("as_input", [bool, torch.tensor, lambda flag: torch.tensor([float(flag)])])
def test_rate_is_skipped_over_attempted(as_input):
    flags = [True, False, False, True, False]
    metric = OverflowRate()
    for flag in flags:
        metric.update(as_input(flag))
    assert metric.compute().item() == pytest.approx(2 / 5)
    assert metric.compute() == overflow_rate(torch.tensor(flags)) == overflow_rate(torch.tensor(flags).float())
    assert (metric.skipped_steps.dtype, metric.attempted_steps.dtype) == (torch.int64, torch.int64)


def test_without_a_step_the_rate_is_zero():
    assert overflow_rate(torch.empty(0, dtype=torch.bool)) == 0.0


def test_counts_stay_exact_past_2_to_the_24():
    metric = OverflowRate()
    metric.update(torch.tensor([True]))
    metric.attempted_steps += 2**24
    metric.update(False)
    assert metric.attempted_steps == 2**24 + 2
    assert metric.bfloat16().attempted_steps.dtype == torch.int64


def test_ranks_are_added():
    def count(rank):
        metric = OverflowRate()
        with process_group():
            for flag in ([True, False], [True, True, True, False, False])[rank]:
                metric.update(flag)
            return metric.compute().item(), metric.attempted_steps.item()

    assert run_ranks(count, 2) == [(pytest.approx(4 / 7), 2), (pytest.approx(4 / 7), 5)]
