"""What a plan says of itself, at the edges."""

from typing import Any

import pytest

from lightning_mp.planning.parallelism.parallel_layout import ParallelLayout
from lightning_mp.planning.parallelism.parallel_plan import ParallelPlan


def plan(**seconds: Any) -> ParallelPlan:
    return ParallelPlan(ParallelLayout(copies=2), 1, (), 0.0, 0.0, **seconds, compute_seconds=1.0, bubble=0.25)


@pytest.mark.parametrize(("awaited", "bound_by"), [(0.0, "compute"), (0.5, "compute"), (0.6, "waiting")])
def test_a_step_waits_when_more_than_half_of_it_is_no_computing(awaited: float, bound_by: str) -> None:
    assert plan(inside_seconds=0.1, between_seconds=0.2, awaited_seconds=awaited).bound_by == bound_by


def test_the_wire_is_compared_with_computing_alone() -> None:
    assert plan(inside_seconds=3.0, between_seconds=2.0, awaited_seconds=0.5).wire_to_compute_ratio == 3.0
