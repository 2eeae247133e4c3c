"""Promise 4 as pure functions: which micro-batches make one step, what each weighs, and where the run ends.

The reference walks through the micro-batches with a list. No Trainer, but where a fit freezes its settings.
"""

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_models import Regression, fit, regression_batches, sgd

from lightning_mp import AccumulationScheduler
from lightning_mp.training.accumulation import windows as transitions
from lightning_mp.training.accumulation.controller import AccumulationController
from lightning_mp.training.accumulation.schedule import Progress, Thresholds
from lightning_mp.training.accumulation.settings import AccumulationSettings
from lightning_mp.training.accumulation.windows import AccumulationState, DataLayout, MicroBatch, Window
from lightning_mp.training.tokens.budget import TokenBudget, split_last_batch
from lightning_mp.training.tokens.counter import AccumulationTotals
from lightning_mp.training.tokens.loss_weighting import Measure

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Plan:
    """A run on one rank.

    Attributes:
        epochs: tokens of every micro-batch by epoch; 0 for one without a loss, which never comes to backward.
        schedule: optimizer step -> micro-batches per step.
        carry_over: windows go on in the next epoch.
        budget: tokens after which the run ends exactly, if any.
        moved: after so many micro-batches, so many tokens are left, whatever the budget was; they are reached from
            above where there was none.
        stop_after: after so many micro-batches somebody sets ``trainer.should_stop``.
    """

    epochs: Sequence[Sequence[int]]
    schedule: dict[int, int]
    carry_over: bool
    budget: int | None
    moved: tuple[int, int] | None
    stop_after: int | None

    def micro_batches(self) -> Iterator[tuple[int, int, int, bool]]:
        """Place in the run, epoch, tokens, and whether it is the last of its epoch."""
        flat = [
            (epoch, tokens, place == len(sizes))
            for epoch, sizes in enumerate(self.epochs)
            for place, tokens in enumerate(sizes, start=1)
        ]
        yield from ((place, *micro_batch) for place, micro_batch in enumerate(flat))


counts = st.integers(0, 9)
plans = st.builds(
    Plan,
    st.lists(st.lists(counts, min_size=1, max_size=7), min_size=1, max_size=4),
    st.dictionaries(st.integers(0, 9), st.integers(1, 5), min_size=1, max_size=3),
    st.booleans(),
    st.none() | st.integers(1, 80),
    st.none() | st.tuples(st.integers(1, 20), st.integers(1, 20)),
    st.none() | st.integers(1, 20),
)


def reference(plan: Plan) -> list[list[int]]:
    """Tokens of the micro-batches of every step."""
    steps: list[list[int]] = []
    window: list[int] = []
    end, is_exact, spent, planned = plan.budget, True, 0, 0
    for place, epoch, size, is_last in plan.micro_batches():
        if plan.moved is not None and place == plan.moved[0]:
            is_exact = end is not None
            end = spent + plan.moved[1]
        if not window:
            planned = plan.schedule[max(reached)] if (reached := [n for n in plan.schedule if n <= len(steps)]) else 1
        tokens = size if end is None or not is_exact else min(size, end - spent)
        spent += tokens
        window.append(tokens)
        ends_run = end is not None and spent >= end
        waits = plan.carry_over and epoch + 1 < len(plan.epochs)
        if ends_run or len(window) == planned or (is_last and not waits):
            steps.append(window)
            window = []
            if ends_run or (plan.stop_after is not None and place + 1 >= plan.stop_after):
                break
    return steps


class Run:
    """The same through settings, state and transitions; ``saved_at`` writes a checkpoint there and goes on from it."""

    def __init__(self, plan: Plan, saved_at: int | None = None) -> None:
        self.plan = plan
        self.budget = None if plan.budget is None else TokenBudget(plan.budget)
        self.state = AccumulationState()
        self.steps: list[list[int]] = []
        self.weights: list[list[float]] = []
        self._window: list[int] = []
        self._factors: list[float] = []
        for place, epoch, size, is_last in plan.micro_batches():
            if place == saved_at:
                self._resume()
            if plan.moved is not None and place == plan.moved[0]:
                self.state = replace(self.state, end_tokens=self.spent + plan.moved[1])
            self._micro_batch(epoch, size, is_last=is_last)
            is_told = plan.stop_after is not None and place + 1 >= plan.stop_after
            if not self.state.window.is_open and (self.state.micro_batch.ends_run or is_told):
                break

    @property
    def spent(self) -> int:
        return sum(map(sum, self.steps)) + sum(self._window)

    def _micro_batch(self, epoch: int, size: int, *, is_last: bool) -> None:
        if not self.state.window.is_open:
            planned = Thresholds(self.plan.schedule, "step").micro_batches(Progress(epoch=epoch, step=len(self.steps)))
            self.state = transitions.open_window(self.state, planned)
        tokens, ends_run = size, False
        budget = self.state.budget(self.budget)
        if budget is not None:
            split = split_last_batch([size], budget.tokens - self.spent, budget.landing, largest_micro_batch=9)
            (tokens,), ends_run = split.keep_tokens, split.is_last
        measure = Measure(items=tokens, tokens=tokens, input_tokens=tokens, most_tokens=tokens)
        ends_epoch = is_last and not (self.plan.carry_over and epoch + 1 < len(self.plan.epochs))
        self.state = transitions.begin_micro_batch(self.state, MicroBatch(measure, ends_run, ends_epoch))
        self._window.append(tokens)
        if tokens:
            if self.state.reference_items is None:
                self.state = replace(self.state, reference_items=float(tokens))
            self.state = transitions.add_micro_batch(transitions.weigh_micro_batch(self.state, tokens, True))
            factor = self.state.micro_batch.factor
            assert isinstance(factor, float)
            self._factors.append(factor)
        if self.state.window.closes:
            self._step()
        self.state = transitions.end_micro_batch(self.state)

    def _step(self) -> None:
        totals = self.state.window.totals
        assert totals is not None
        assert totals.micro_batches == len(self._factors)
        assert (totals.device[0], totals.host[0]) == (None, sum(self._window))
        self.state = transitions.take_totals(self.state)
        if self._factors:
            # Lightning divides each loss by the planned length.
            mean = (self.state.reference_items or 0.0) / totals.host[0]
            self.weights.append([factor * mean for factor in self._factors])
        self.steps.append(self._window)
        self._window, self._factors = [], []

    def _resume(self) -> None:
        """A checkpoint, read into a new state; ``end_tokens`` is asked for again by whoever has asked before."""
        before = self.state
        self.state = replace(AccumulationState.read(before.state_dict()), end_tokens=before.end_tokens)
        if before.window.is_open:
            window = before.window
            assert window.totals is not None
            totals = AccumulationTotals(window.position, tuple(window.totals.tensor(CPU).tolist()))
            totals = replace(totals, micro_batches=window.totals.micro_batches)
            self.state = transitions.resume_window(self.state, window.planned, window.position, totals)


@given(plans)
def test_windows_are_those_of_the_reference(plan: Plan) -> None:
    """Window lengths, trims, budget ends, carry over epochs, stops inside a window."""
    assert Run(plan).steps == reference(plan)


@given(plans)
def test_every_token_of_a_window_weighs_the_same(plan: Plan) -> None:
    """The factors of all micro-batches are ``n_i / sum n``, also in a short, trimmed or resumed window."""
    run = Run(plan)
    expected = [[n / sum(step) for n in step if n] for step in run.steps if sum(step)]
    assert len(run.weights) == len(expected)
    for weights, shares in zip(run.weights, expected, strict=True):
        assert weights == pytest.approx(shares, rel=1e-12)


@given(plans, st.integers(0, 27))
def test_a_run_goes_on_from_a_saved_state_as_if_it_had_not_stopped(plan: Plan, saved_at: int) -> None:
    resumed, uninterrupted = Run(plan, saved_at), Run(plan)
    assert (resumed.steps, resumed.weights) == (uninterrupted.steps, uninterrupted.weights)
    assert resumed.state.state_dict() == uninterrupted.state.state_dict()


def test_a_window_that_closes_early_is_followed_by_a_new_one() -> None:
    """``on_train_batch_start`` returned -1 after two of four micro-batches."""
    state = AccumulationState(window=Window(4, position=2, is_open=True, totals=AccumulationTotals(2)))
    state = transitions.open_window(transitions.close_early(state), 4)
    assert (state.window.planned, state.window.position, state.window.is_open) == (4, 0, False)
    assert state.window.totals is not None
    assert state.window.totals.micro_batches == 0


def test_the_end_of_a_run_can_be_moved_with_and_without_a_budget() -> None:
    budget = TokenBudget(100, "floor", makes_up_for_skips=True)
    planned, moved = AccumulationState(), AccumulationState(end_tokens=60)
    assert planned.budget(budget) == budget
    assert moved.budget(budget) == TokenBudget(60, "floor", makes_up_for_skips=True)
    assert moved.budget(None) == TokenBudget(60, "ceil")
    assert planned.budget(None) is None


# -- nobody changes what is decided ------------------------------------------------------------------------------------


def test_settings_of_a_fit_end_with_it() -> None:
    trainer = fit(Regression(sgd), regression_batches(2), AccumulationScheduler({0: 2}), max_steps=1)
    controller = AccumulationController.of(trainer)
    assert controller is not None
    assert controller.settings == AccumulationSettings(1)


def test_nobody_writes_into_the_controller() -> None:
    """Outside of its own file no attribute of it is set: neither its own nor one of what it holds."""
    files = [
        file
        for folder in ("callbacks", "strategies", "lightning_mp")
        for file in (ROOT / folder).rglob("*.py")
        if file.name not in ("controller.py", "settings.py")
    ]
    assert len(files) > 200
    written = {
        f"{file.name}: {ast.unparse(target)}"
        for file in files
        if "controller" in (text := file.read_text()).lower()
        for node in ast.walk(ast.parse(text))
        for target in _targets(node)
        if isinstance(target, ast.Attribute) and "controller" in ast.unparse(target.value).lower()
    }
    assert written == set()


def _targets(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.Assign):
        return [
            part for target in node.targets for part in (target.elts if isinstance(target, ast.Tuple) else [target])
        ]
    return [node.target] if isinstance(node, ast.AugAssign | ast.AnnAssign) else []


def test_ranks_that_share_their_data_count_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """4 ranks, 2 of them see different data: each token came in twice."""
    controller = AccumulationController()
    totals = AccumulationTotals().plus(10, 10, 16, 2)
    controller.state = replace(controller.state, layout=DataLayout(2, None), window=Window(totals=totals))
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda group=None: 4)
    controller.close_window(4 * totals.tensor(torch.device("cpu")))
    controller.counter.flush_pending()
    assert (controller.counter.tokens, controller.counter.input_tokens, controller.counter.samples) == (20, 32, 4)
