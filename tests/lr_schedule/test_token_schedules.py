"""Learning-rate schedules over tokens: published numbers, closed forms, torch's own schedulers."""

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import lr_scheduler

from lightning_mp.training.lr_schedule.progress import ScheduleRun, missed_end
from lightning_mp.training.lr_schedule.schedules import Course, WarmupCosine, WarmupStableDecay

SHAPES = ["linear", "1-sqrt", "cosine"]


def torch_rates(schedulers: list[Any], milestones: list[int], steps: int) -> list[float]:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    made = [make(optimizer) for make in schedulers]
    scheduler = lr_scheduler.SequentialLR(optimizer, made, milestones)
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


def test_warmup_and_cosine_equal_torchs_linear_and_cosine() -> None:
    """LinearLR over 25 of 200 steps from 0.04, then CosineAnnealingLR over the rest down to 0.1."""
    expected = torch_rates(
        [
            lambda o: lr_scheduler.LinearLR(o, start_factor=0.04, total_iters=25),
            lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=175, eta_min=0.1),
        ],
        [25],
        200,
    )
    schedule = WarmupCosine(warmup=25 / 200, final=0.1, start=0.04)
    np.testing.assert_allclose([schedule(step / 200) for step in range(200)], expected, rtol=1e-12)


def test_warmup_stable_and_linear_decay_equal_torchs() -> None:
    expected = torch_rates(
        [
            lambda o: lr_scheduler.LinearLR(o, start_factor=0.25, total_iters=16),
            lambda o: lr_scheduler.ConstantLR(o, factor=1.0),
            lambda o: lr_scheduler.LinearLR(o, start_factor=1.0, end_factor=0.2, total_iters=32),
        ],
        [16, 96],
        128,
    )
    schedule = WarmupStableDecay(warmup=16 / 128, decay=32 / 128, shape="linear", final=0.2, start=0.25)
    np.testing.assert_allclose([schedule(step / 128) for step in range(128)], expected, rtol=1e-12)


def test_llama_2() -> None:
    """Touvron et al. 2023 (arXiv 2307.09288), section 2.2: 2,000 steps of 4M tokens up to 3e-4, a cosine over 2T tokens
    down to a tenth."""
    schedule = WarmupCosine(warmup=2000 * 4e6 / 2e12, final=0.1)
    steps = {0: 0.0, 1000: 1.5e-4, 2000: 3e-4, 251_000: 1.65e-4, 500_000: 3e-5}
    for step, rate in steps.items():
        assert math.isclose(3e-4 * schedule(step * 4e6 / 2e12), rate, rel_tol=1e-9, abs_tol=1e-18)


@pytest.mark.parametrize(("shape", "middle"), [("linear", 0.75), ("1-sqrt", 0.5), ("cosine", (1 + math.sqrt(0.5)) / 2)])
def test_shapes_of_the_cooldown_a_quarter_into_it(shape: Any, middle: float) -> None:
    """Haegele et al. 2024 (arXiv 2405.18392), section 3."""
    schedule = WarmupStableDecay(warmup=0.0, decay=0.2, shape=shape, final=0.1)
    assert schedule(0.0) == schedule(0.8) == 1.0
    assert math.isclose(schedule(0.85), 0.1 + 0.9 * middle)
    assert schedule(1.0) == schedule(1.5) == 0.1


@given(
    st.sampled_from(SHAPES),
    st.floats(0, 0.4),
    st.floats(0.01, 0.6),
    st.floats(0, 1),
    st.floats(0, 1),
    st.lists(st.floats(0, 1.5), min_size=2, max_size=9),
)
def test_factors_rise_then_fall_and_stay_between_their_ends(
    shape: Any, warmup: float, decay: float, final: float, start: float, fractions: list[float]
) -> None:
    for schedule in (
        WarmupStableDecay(warmup=warmup, decay=decay, shape=shape, final=final, start=start),
        WarmupCosine(warmup=warmup, final=final, start=start),
    ):
        factors = [(f, schedule(f)) for f in sorted(fractions)]
        assert all(min(start, final) <= factor <= 1 for _, factor in factors)
        for (_, before), (fraction, after) in pairwise(factors):
            if fraction <= warmup:
                assert after >= before - 1e-12
        falling = [factor for fraction, factor in factors if fraction >= warmup]
        assert all(b <= a + 1e-12 for a, b in pairwise(falling))
        assert schedule(1.0) == final
        assert schedule(0.0) == (start if warmup else 1.0)


@given(st.lists(st.tuples(st.integers(1, 50), st.booleans()), min_size=1, max_size=30))
def test_a_skip_holds_the_factor_and_the_schedule_still_ends_with_the_run(windows: list[tuple[int, bool]]) -> None:
    """Skipped tokens are spent: whatever is skipped, the last token of the run is the end of the schedule."""
    run, budget = ScheduleRun(WarmupCosine(warmup=0.1, final=0.1)), sum(tokens for tokens, _ in windows)
    run.begin(budget)
    trained = skipped = 0
    for tokens, is_skipped in windows:
        before = run.advance(trained, skipped, skips_shorten=True)
        if is_skipped:
            skipped += tokens
            assert (
                math.isclose(run.advance(trained, skipped, skips_shorten=True), before) or trained + skipped == budget
            )
        else:
            trained += tokens
    assert run.advance(trained, skipped, skips_shorten=True) == 0.1


def test_without_skips_the_fraction_is_the_quotient_to_the_last_bit() -> None:
    assert [Course(0, 997).fraction(tokens) for tokens in range(998)] == [tokens / 997 for tokens in range(998)]


def test_a_new_horizon_ends_with_the_run_too_where_tokens_were_skipped_before() -> None:
    run = ScheduleRun(WarmupCosine(warmup=0.1, final=0.1))
    run.begin(500)
    run.begin(1000, 100, skips_shorten=True)
    assert run.advance(450, 100, skips_shorten=True) == WarmupCosine(warmup=0.1, final=0.1)(0.5)
    assert run.advance(900, 100, skips_shorten=True) == 0.1


def test_a_cooldown_that_has_begun_knows_no_new_horizon() -> None:
    run = ScheduleRun(WarmupStableDecay())
    run.begin(1000)
    run.advance(500)
    run.cool_down(500, 100)
    run.begin(2000)
    assert run.advance(525) == 0.5
    assert run.advance(600) == 0.0


@pytest.mark.parametrize("shape", SHAPES)
def test_cooling_down_early_equals_a_schedule_planned_so(shape: Any) -> None:
    """WSD for 1,000 tokens, cooled down after 640 over 20% of the whole, ends as WSD for 800."""
    early = ScheduleRun(WarmupStableDecay(warmup=0.1, decay=0.2, shape=shape, final=0.05))
    early.begin(1000)
    planned = WarmupStableDecay(warmup=0.125, decay=0.2, shape=shape, final=0.05)
    before = [early.advance(tokens) for tokens in range(0, 641, 20)]
    early.cool_down(640, 160)
    after = [early.advance(tokens) for tokens in range(660, 821, 20)]
    expected = [planned(tokens / 800) for tokens in range(0, 821, 20)]
    np.testing.assert_allclose([*before, *after], expected, rtol=1e-12, atol=1e-15)


def test_a_cooldown_falls_from_the_present_factor_and_never_rises() -> None:
    run = ScheduleRun(WarmupCosine(warmup=0.0, final=0.1))
    run.begin(1000)
    run.advance(500)
    run.cool_down(500, 100)
    assert [round(run.advance(tokens), 6) for tokens in (500, 550, 600, 900)] == [0.55, 0.325, 0.1, 0.1]

    early = ScheduleRun(WarmupCosine(warmup=0.5, final=0.1))
    early.begin(1000)
    early.advance(10)
    early.cool_down(10, 100)
    assert early.advance(50) == early.advance(110) == 0.02


def test_the_state_is_all_there_is() -> None:
    """Hand-written states forget fields: each is set to something unusual and must come back."""
    schedule = WarmupStableDecay(shape="cosine", final=0.01)
    run = ScheduleRun(schedule)
    run.begin(1000)
    run.advance(700, 30, skips_shorten=True)
    for cooling in (False, True):
        if cooling:
            run.cool_down(700, 77)
            run.advance(710, 35, skips_shorten=True)
        again = ScheduleRun(schedule)
        again.load_state_dict(run.state_dict())
        again.begin(1000)
        later = [(tokens, 35 + tokens // 100) for tokens in range(715, 1000, 7)]
        copies = [ScheduleRun(schedule), ScheduleRun(schedule)]
        for copy, of in zip(copies, (run, again), strict=True):
            copy.load_state_dict(of.state_dict())
        assert [copies[0].advance(*at, skips_shorten=True) for at in later] == [
            copies[1].advance(*at, skips_shorten=True) for at in later
        ]
        assert again.state_dict() == run.state_dict()


@pytest.mark.parametrize(
    ("schedule", "horizon", "run", "fault"),
    [
        (WarmupCosine(), 126, 100, "26% longer than the run"),
        (WarmupCosine(), 125, 100, None),
        (WarmupCosine(), 100, 125, None),
        (WarmupCosine(), 100, 200, "the last 50% of the run are trained at 0.1 of the peak rate"),
        (WarmupStableDecay(), 101, 100, "ends before its cooldown does"),
        (WarmupStableDecay(), 100, 100, None),
        (lambda fraction: 1.0, 130, 100, "30% longer than the run, which ends at 1 of the peak rate instead of 1"),
    ],
)
def test_a_horizon_that_misses_the_run(schedule: Any, horizon: int, run: int, fault: str | None) -> None:
    """Hoffmann et al. 2022, appendix B, figure A1: more than 25% costs loss."""
    message = missed_end(schedule, horizon, run)
    assert message is None if fault is None else fault in str(message)
