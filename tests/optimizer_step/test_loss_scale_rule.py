"""The update of the loss scale against the published rules, written down here a second time in plain Python."""

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from lightning_mp.training.optimizer_step.loss_scaler import overflows_at_floor
from lightning_mp.training.optimizer_step.update_rule import ScaleRule, ScaleState, update_scale_

OPEN = {"min_scale": 0.0, "max_scale": math.inf}


def times(scale, factor):
    """The product as torch's kernels make it: in double precision, stored in single."""
    with np.errstate(over="ignore"):
        return float(np.float32(scale * factor))


@dataclass
class TorchGradScaler:
    """torch.amp.GradScaler: the documentation of its four arguments."""

    rule: ScaleRule
    scale: float
    growth: int = 0

    def update(self, overflow):
        if overflow:
            self.scale, self.growth = times(self.scale, self.rule.backoff_factor), 0
            return
        self.growth += 1
        if self.growth == self.rule.growth_interval:
            self.growth = 0
            grown = times(self.scale, self.rule.growth_factor)
            self.scale = grown if math.isfinite(grown) else self.scale


@dataclass
class Apex(TorchGradScaler):
    """NVIDIA Apex, csrc/update_scale_hysteresis.cu: a healthy step fills the tracker up again."""

    hysteresis: int = 0

    def update(self, overflow):
        if overflow:
            self.hysteresis -= 1
            if self.hysteresis > 0:
                self.growth = 0
                return
        else:
            self.hysteresis = self.rule.hysteresis
        super().update(overflow)


@dataclass
class Megatron(TorchGradScaler):
    """Megatron-LM, megatron/core/optimizer/grad_scaler.py, DynamicGradScaler: only growth fills the tracker up."""

    hysteresis: int = 0

    def update(self, overflow):
        if overflow:
            self.growth = 0
            self.hysteresis -= 1
            if self.hysteresis <= 0:
                self.scale = max(times(self.scale, self.rule.backoff_factor), self.rule.min_scale)
            return
        self.growth += 1
        if self.growth == self.rule.growth_interval:
            self.growth = 0
            self.hysteresis = self.rule.hysteresis
            self.scale = times(self.scale, self.rule.growth_factor)


def new_state(rule, scale):
    return ScaleState(
        scale=torch.tensor(scale, dtype=torch.float32),
        growth_tracker=torch.tensor(0, dtype=torch.int32),
        hysteresis_tracker=torch.tensor(rule.hysteresis, dtype=torch.int32),
    )


def advance(state, overflow, rule):
    update_scale_(state, torch.tensor(float(overflow)), rule)


def trajectory(rule, overflows, scale=65536.0):
    state = new_state(rule, scale)
    for overflow in overflows:
        advance(state, overflow, rule)
        yield state.scale.item()


overflow_sequences = st.lists(st.booleans(), min_size=1, max_size=60)
growth_factors = st.floats(1.01, 16.0)
backoff_factors = st.floats(0.01, 0.99)
growth_intervals = st.integers(1, 6)
first_scales = st.floats(2.0**-20, 2.0**100, width=32)


@given(overflow_sequences, growth_factors, backoff_factors, growth_intervals, first_scales, st.integers(1, 5))
@example([False] * 200, 2.0, 0.5, 1, 65536.0, 2)
@example([True] * 200, 2.0, 0.5, 1, 65536.0, 1)
@example([True, False, True], 2.0, 0.5, 6, 65536.0, 2)  # the healthy step refills
@example([False, False, True, False, False, False], 2.0, 0.5, 3, 65536.0, 3)  # and growth restarts
def test_refill_by_step_is_the_rule_of_apex(overflows, growth_factor, backoff_factor, interval, scale, hysteresis):
    rule = ScaleRule(growth_factor, backoff_factor, interval, **OPEN, hysteresis=hysteresis, hysteresis_refill="step")
    state, apex = new_state(rule, scale), Apex(rule, scale, hysteresis=hysteresis)
    for overflow in overflows:
        advance(state, overflow, rule)
        apex.update(overflow)
        assert (state.scale.item(), state.growth_tracker.item()) == (apex.scale, apex.growth)
        assert hysteresis == 1 or state.hysteresis_tracker.item() == apex.hysteresis


@given(overflow_sequences, growth_factors, backoff_factors, growth_intervals, st.integers(1, 5))
@example([True] * 40, 2.0, 0.5, 1, 3)  # down to Megatron's floor
def test_refill_by_growth_is_the_rule_of_megatron(overflows, growth_factor, backoff_factor, interval, hysteresis):
    rule = ScaleRule(
        growth_factor, backoff_factor, interval, 1.0, math.inf, hysteresis=hysteresis, hysteresis_refill="growth"
    )
    state, megatron = new_state(rule, 4096.0), Megatron(rule, 4096.0, hysteresis=hysteresis)
    for overflow in overflows:
        advance(state, overflow, rule)
        megatron.update(overflow)
        if not math.isfinite(megatron.scale):  # Megatron has no guard against that; torch and Apex stay where they are
            break
        assert (state.scale.item(), state.growth_tracker.item()) == (megatron.scale, megatron.growth)
        assert hysteresis == 1 or state.hysteresis_tracker.item() == megatron.hysteresis


@given(
    overflow_sequences,
    growth_factors,
    backoff_factors,
    growth_intervals,
    st.floats(2.0**-40, 1.0, width=32),
    st.floats(1.0, 2.0**40, width=32),
    st.integers(1, 3),
    st.sampled_from(["step", "growth"]),
)
@example([True] * 50, 2.0, 0.5, 1, 0.7, 3.0, 1, "step")
@example([False] * 50, 2.0, 0.5, 1, 0.7, 1e6 / 3, 1, "growth")
def test_the_scale_never_leaves_its_bounds(
    overflows, growth_factor, backoff_factor, interval, min_scale, max_scale, hysteresis, refill
):
    rule = ScaleRule(growth_factor, backoff_factor, interval, min_scale, max_scale, hysteresis, refill)
    for scale in trajectory(rule, overflows, scale=1.0):
        # the bounds as single precision holds them
        assert np.float32(min_scale) <= scale <= np.float32(max_scale)


def test_the_bounds_are_reached_exactly_and_left_again():
    rule = ScaleRule(growth_interval=1, min_scale=3.0, max_scale=20.0)
    assert list(trajectory(rule, [True, True, False, False, False, False, True], scale=8.0)) == [
        *(4.0, 3.0),
        *(6.0, 12.0, 20.0, 20.0),
        10.0,
    ]


@pytest.mark.parametrize("min_scale", [2.0**-24, 0.1, 0.7, 1.0, 1000 / 3])
def test_overflows_are_counted_at_the_floor_only_and_only_in_a_row(min_scale):
    """Also where single precision rounds the floor up or down."""
    rule = ScaleRule(min_scale=min_scale, growth_interval=100)
    state = new_state(rule, 2.5 * min_scale)
    counts = [0]
    for overflow in [True, True, True, True, False, True, True]:
        counts.append(overflows_at_floor(counts[-1], float(overflow), state.scale.item(), rule))
        advance(state, overflow, rule)
    assert counts[1:] == [0, 0, 1, 2, 0, 1, 2]


@given(st.lists(st.booleans(), max_size=100), st.integers(1, 3))
def test_the_floor_count_is_the_length_of_the_last_run_of_overflows_that_began_at_the_floor(overflows, hysteresis):
    rule = ScaleRule(min_scale=16.0, growth_interval=2, hysteresis=hysteresis)
    state, expected, count = new_state(rule, 64.0), 0, 0
    for overflow in overflows:
        expected = expected + 1 if overflow and state.scale.item() == 16.0 else 0
        count = overflows_at_floor(count, float(overflow), state.scale.item(), rule)
        advance(state, overflow, rule)
        assert count == expected
