"""Which of several ranks in trouble is named: a pure function."""

from dataclasses import replace

import pytest

from lightning_mp.training.distributed.heartbeat import RankReport, find_hung


@pytest.mark.parametrize(
    ("silent", "left", "named"),
    [((), (), [0]), ((2,), (), [2]), ((), (1,), [1]), ((2,), (1,), [2])],
    ids=["behind", "silent", "left", "silent before left"],
)
def test_the_silent_go_before_those_that_left_and_these_before_those_behind(
    silent: tuple[int, ...], left: tuple[int, ...], named: list[int]
) -> None:
    """Who left with an exception reports no more, and is not taken for silent."""
    before = [RankReport(rank, "a", 10 + rank, 1, beats=7 if rank == 0 else 8) for rank in range(4)]
    after = [
        replace(
            report,
            sequence=1 if report.rank in (*silent, *left) else 3,
            error="ValueError" if report.rank in left else "",
        )
        for report in before
    ]
    assert [report.rank for report in find_hung(before, after)] == named
