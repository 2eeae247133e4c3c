"""From settings, state and micro-batch to the next state. Pure functions; the accumulation controller calls them.

.. code-block:: text

    open_window          a micro-batch comes, and no window is open
    begin_micro_batch    it is counted, and trimmed where the budget ends in it: does the optimizer step after it?
    add_micro_batch      its loss comes to backward
    take_totals          the optimizer steps with the window's gradient
    end_micro_batch      it is over: the window is closed, or stays open

    close_early          the window closes between two micro-batches
    resume_window        a checkpoint was written inside of a window
    end_at               the run is to end elsewhere

What changes in every micro-batch is made without ``dataclasses.replace``, which costs a dozen Python calls each time.
"""

from dataclasses import replace

from torch import Tensor

from lightning_mp.accumulation.schedule import Progress
from lightning_mp.accumulation.settings import AccumulationSettings
from lightning_mp.accumulation.state import AccumulationState, MicroBatch, Window
from lightning_mp.tokens.budget import TokenBudget
from lightning_mp.tokens.counter import AccumulationTotals

__all__ = [
    "add_micro_batch",
    "begin_micro_batch",
    "close_early",
    "current_budget",
    "end_at",
    "end_micro_batch",
    "expected_items",
    "loss_factor",
    "makes_the_step",
    "open_window",
    "resume_window",
    "take_totals",
]


def open_window(settings: AccumulationSettings, state: AccumulationState, progress: Progress) -> AccumulationState:
    """The state in which a micro-batch finds an open window: the one that is open, or else a new one.

    Example:
        >>> state = open_window(AccumulationSettings(constant=4), AccumulationState(), Progress())
        >>> state.window.planned, state.window.position
        (4, 0)
    """
    if state.window.is_open:
        return state
    planned = settings.constant if settings.schedule is None else settings.schedule.micro_batches(progress)
    return state.changed(window=Window(planned, totals=AccumulationTotals()))


def begin_micro_batch(
    settings: AccumulationSettings, state: AccumulationState, micro_batch: MicroBatch
) -> AccumulationState:
    """The state while a micro-batch runs: it closes its window if that is full, or if nothing comes after it."""
    window = state.window
    goes_on = settings.carries_over and micro_batch.another_epoch_follows
    closes = micro_batch.ends_run or (micro_batch.ends_epoch and not goes_on) or window.position + 1 >= window.planned
    return state.changed(
        window=Window(window.planned, window.position, window.is_open, closes, window.totals),
        micro_batch=micro_batch,
    )


def add_micro_batch(state: AccumulationState, reference_items: float) -> AccumulationState:
    """The loss of the micro-batch at hand comes to backward: it counts.

    Args:
        state: the state while it runs.
        reference_items: taken if it is the first of the run.
    """
    assert state.micro_batch is not None
    assert state.window.totals is not None
    m, window = state.micro_batch.measure, state.window
    totals = state.window.totals.plus(m.items, m.tokens, m.input_tokens, m.samples, m.nonpad_tokens)
    reference = reference_items if state.reference_items is None else state.reference_items
    return state.changed(
        reference_items=reference,
        window=Window(window.planned, window.position, window.is_open, window.closes, totals),
    )


def take_totals(state: AccumulationState) -> AccumulationState:
    """The optimizer steps: the window's totals are taken, and count once."""
    w = state.window
    return state.changed(window=Window(w.planned, w.position, w.is_open, w.closes))


def end_micro_batch(state: AccumulationState) -> AccumulationState:
    """The micro-batch at hand is over."""
    w = state.window
    return state.changed(window=Window(w.planned, w.position + 1, not w.closes, w.closes, w.totals))


def close_early(state: AccumulationState) -> AccumulationState:
    """The open window closes between two micro-batches; whether a step was made of it is not recorded here."""
    return state.changed(window=replace(state.window, is_open=False, totals=None))


def resume_window(
    state: AccumulationState, planned: int, position: int, totals: AccumulationTotals
) -> AccumulationState:
    """The run goes on inside of a window that was saved open."""
    return state.changed(window=Window(planned, position, is_open=True, totals=totals))


def current_budget(settings: AccumulationSettings, state: AccumulationState) -> TokenBudget | None:
    """The budget on which the run ends, if there is one: that of its settings, or the one of :func:`end_at`."""
    budget, tokens = settings.budget, state.end_tokens
    if tokens is None:
        return budget
    return TokenBudget(tokens, "ceil") if budget is None else replace(budget, tokens=tokens)


def end_at(state: AccumulationState, tokens: int) -> AccumulationState:
    """The run ends on so many tokens, in place of its budget if it has one; whether they are reached is not known."""
    return state.changed(end_tokens=tokens, budget_reached=False)


def makes_the_step(state: AccumulationState) -> bool:
    """Whether the micro-batch at hand is the whole step: its loss is the mean already, and nothing is multiplied.

    Multiplying and dividing again would move fp16 gradients by what its items are over those of the run's first one.
    """
    if state.window.planned != 1 or state.micro_batch is None:
        return False
    return (state.layout is None or state.layout.data_ranks == 1) and state.micro_batch.measure.divisor is None


def loss_factor(state: AccumulationState) -> float | Tensor:
    """What the loss of the micro-batch at hand is multiplied by: its items over those of the run's first one."""
    assert state.micro_batch is not None
    assert state.reference_items is not None
    measure = state.micro_batch.measure
    divisor = measure.items if measure.divisor is None else measure.divisor
    return divisor / state.reference_items


def expected_items(state: AccumulationState, num_ranks: int) -> float:
    """Items of the window over all ranks, if all its micro-batches were like the run's first and none were missing."""
    assert state.reference_items is not None
    return num_ranks * state.reference_items * state.window.planned
