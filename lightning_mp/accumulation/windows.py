"""Accumulation windows: where a run is, and how each micro-batch changes that. Immutable state and pure functions.

.. code-block:: text

    open_window          a micro-batch comes, and no window is open
    begin_micro_batch    it is counted, and trimmed where the budget ends in it: does the optimizer step after it?
    add_micro_batch      backward of its loss begins
    take_totals          the optimizer steps with the window's gradient
    end_micro_batch      it is over: the window is closed, or stays open

    close_early          the window closes between two micro-batches
    resume_window        a checkpoint was written within a window
    end_at               the run is to end elsewhere

The accumulation controller calls them. A checkpoint holds the run's own numbers; those of an open window are saved with
its gradient (:class:`lightning_mp.accumulation.partial_state.PartialAccumulation`), because without that the window is
lost. The totals of closed windows are in the token counter.
"""

from collections.abc import Set
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

import lightning.pytorch as pl
from torch import Tensor

from lightning_mp.accumulation.schedule import Progress
from lightning_mp.accumulation.settings import AccumulationSettings
from lightning_mp.core.saved_state import COUNT, FLAG, POSITIVE, checked_state, or_none
from lightning_mp.distributed.process_groups import num_data_ranks
from lightning_mp.tokens.budget import TokenBudget
from lightning_mp.tokens.counter import AccumulationTotals, TokenCounter
from lightning_mp.tokens.loss_weighting import Measure


@dataclass(frozen=True)
class DataLayout:
    """How a batch of all ranks is made up."""

    data_ranks: int  # ranks that see different data
    batch_size: int | None  # samples that the data loader gives each of them; None where it has no such attribute

    @classmethod
    def of(cls, trainer: "pl.Trainer") -> Self:
        """That of a Trainer whose data are set up."""
        batch_size = getattr(trainer.train_dataloader, "batch_size", None)
        return cls(num_data_ranks(trainer), batch_size if isinstance(batch_size, int) and batch_size > 0 else None)

    def ratio_to(self, other: "DataLayout") -> float:
        """How many times as large a micro-batch over all ranks is as in another layout.

        >>> DataLayout(2, 4).ratio_to(DataLayout(1, 4)), DataLayout(2, 2).ratio_to(DataLayout(1, 4))
        (2.0, 1.0)
        """
        ranks = self.data_ranks / other.data_ranks
        known = self.batch_size is not None and other.batch_size is not None
        return ranks * self.batch_size / other.batch_size if known else ranks  # type: ignore[operator]  # both known


@dataclass(frozen=True)
class Part:
    """A part of a micro-batch that did not fit into memory."""

    items: float | Tensor  # what it weighs, where losses do not say it; if losses add up, what the whole weighs
    divisor: float | Tensor | None  # what its loss was divided by, if its batch says so
    share: float  # of the samples of the whole
    losses_add_up: bool  # the loss of the whole is the sum of its parts', not their mean


@dataclass(frozen=True)
class MicroBatch:
    """What is known of a micro-batch when it begins."""

    measure: Measure  # its items and tokens on this rank, after it was trimmed
    ends_run: bool = False  # the token budget ends in it
    ends_epoch: bool = False  # it is the last of its epoch
    another_epoch_follows: bool = False  # and that epoch is not the last of the run
    is_repeated: bool = False  # it is not of the first epoch
    is_known: bool | Tensor = True  # what it weighs; a tensor where the host would have to wait for it
    factor: float | Tensor = 1.0  # of its loss, beside Lightning's division
    is_weighed: bool = False  # that factor is relative to `reference_items`
    part: Part | None = None  # the part of it that runs, if it runs in parts
    is_counted: bool = False  # a part of it has come to backward, and its tokens count
    parts_factor: float | Tensor = 0.0  # that of the whole, from those of the parts so far


@dataclass(frozen=True)
class Window:
    """The micro-batches of one optimizer step."""

    planned: int = 1  # micro-batches that it is to have
    position: int = 0  # those that are over
    is_open: bool = False  # the last one left it open
    closes: bool = False  # the optimizer steps after the current micro-batch
    is_split: bool = False  # a micro-batch of it did not fit, and runs in parts
    # of those that came to backward on this rank; None once the optimizer step has taken them
    totals: AccumulationTotals | None = None


@dataclass(frozen=True)
class AccumulationState:
    """How far a run is."""

    # what factors of losses are relative to: the weight of the first micro-batch, or a later mean; None before that
    reference_items: float | None = None
    # the data's layout in which the sizes below were measured; None before the first micro-batch
    layout: DataLayout | None = None
    # samples of the first micro-batch in that layout, over all ranks; 0 if it is not needed
    micro_batch_samples: int = 0
    micro_batch_tokens: int = 0  # the same for tokens, padding included
    budget_reached: bool = False  # whether the run has ended on its budget
    # where this fit ends, if not where its settings say; it is saved by the callback that requested it
    end_tokens: int | None = None
    window: Window = Window()  # the current window, or the last one
    micro_batch: MicroBatch | None = None  # the current micro-batch, or the last one

    def in_layout(self, layout: DataLayout) -> "AccumulationState":
        """The state for a run that continues in a layout: in another one, sizes are measured again."""
        if self.layout in (None, layout):
            return replace(self, layout=layout)
        return replace(self, layout=layout, micro_batch_samples=0, micro_batch_tokens=0)

    def lacks_sizes(self, units: Set[str]) -> bool:
        """Whether a schedule in these units needs the size of a micro-batch, and it is not known."""
        return bool(units & {"sample", "token"}) and not self.micro_batch_samples and not self.micro_batch_tokens

    def counted(self, progress: Progress, counter: TokenCounter) -> Progress:
        """With the samples and tokens of a run, for a schedule that counts them."""
        return replace(
            progress,
            samples=counter.samples_before_last_window,
            tokens=counter.tokens_before_last_window,
            micro_batch_samples=self.micro_batch_samples,
            micro_batch_tokens=self.micro_batch_tokens,
        )

    def state_dict(self) -> dict[str, Any]:
        """How far the run is, for a checkpoint."""
        return {
            "reference_items": self.reference_items,
            "layout": None if self.layout is None else asdict(self.layout),
            "micro_batch_samples": self.micro_batch_samples,
            "micro_batch_tokens": self.micro_batch_tokens,
            "budget_reached": self.budget_reached,
        }

    @classmethod
    def read(cls, saved: Any) -> Self:
        """From a checkpoint."""
        kinds = {
            "reference_items": or_none(POSITIVE),
            "micro_batch_samples": COUNT,
            "micro_batch_tokens": COUNT,
            "budget_reached": FLAG,
        }
        state = checked_state(saved, kinds, "accumulation windows")
        layout = state.get("layout")
        if layout is not None:
            ranks = {"data_ranks": POSITIVE, "batch_size": or_none(POSITIVE)}
            layout = DataLayout(**checked_state(layout, ranks, "the layout of data over ranks"))
        return cls(layout=layout, **{name: state[name] for name in kinds})


WHOLE = Part(1, None, 1.0, losses_add_up=False)
#: In place of a micro-batch whose training step returned no loss.
NOTHING = Part(0, None, 0.0, losses_add_up=False)


def open_window(settings: AccumulationSettings, state: AccumulationState, progress: Progress) -> AccumulationState:
    """The state in which a micro-batch finds an open window: the one that is open, or else a new one.

    >>> state = open_window(AccumulationSettings(constant=4), AccumulationState(), Progress())
    >>> state.window.planned, state.window.position
    (4, 0)
    """
    if state.window.is_open:
        return state
    planned = settings.constant if settings.schedule is None else settings.schedule.micro_batches(progress)
    return replace(state, window=Window(planned, totals=AccumulationTotals()))


def begin_micro_batch(
    settings: AccumulationSettings, state: AccumulationState, micro_batch: MicroBatch
) -> AccumulationState:
    """The state while a micro-batch runs: it closes its window if that is full, or if nothing comes after it."""
    window = state.window
    goes_on = settings.carries_over and micro_batch.another_epoch_follows
    closes = micro_batch.ends_run or (micro_batch.ends_epoch and not goes_on) or window.position + 1 >= window.planned
    return replace(state, window=replace(window, closes=closes), micro_batch=micro_batch)


def begin_part(state: AccumulationState, part: Part) -> AccumulationState:
    """The state while a part of the current micro-batch runs: it weighs its own items, or those of its part."""
    assert state.micro_batch is not None
    measure = replace(state.micro_batch.measure, items=part.items, divisor=part.divisor)
    window = replace(state.window, is_split=True)
    return replace(state, window=window, micro_batch=replace(state.micro_batch, measure=measure, part=part))


def add_micro_batch(state: AccumulationState) -> AccumulationState:
    """Backward of the current micro-batch's loss begins: it counts."""
    assert state.micro_batch is not None
    assert state.window.totals is not None
    micro_batch, part = state.micro_batch, state.micro_batch.part or WHOLE
    m, unknown = micro_batch.measure, 1.0 - micro_batch.is_known * 1.0
    tokens = (m.tokens, m.input_tokens, m.samples, m.nonpad_tokens, m.most_tokens)
    if micro_batch.is_counted:
        tokens = (0, 0, 0, 0, 0)
    totals = state.window.totals.plus(
        m.items, *tokens, losses=part.share, unknown=unknown, micro_batches=0 if micro_batch.is_counted else 1
    )
    factor = micro_batch.factor + (0.0 if part.losses_add_up else micro_batch.parts_factor)
    micro_batch = replace(micro_batch, is_counted=True, parts_factor=factor)
    return replace(state, window=replace(state.window, totals=totals), micro_batch=micro_batch)


def take_totals(state: AccumulationState) -> AccumulationState:
    """The optimizer steps: the window's totals are taken, and count once."""
    return replace(state, window=replace(state.window, totals=None))


def end_micro_batch(state: AccumulationState) -> AccumulationState:
    """The current micro-batch is over."""
    window = state.window
    return replace(state, window=replace(window, position=window.position + 1, is_open=not window.closes))


def close_early(state: AccumulationState) -> AccumulationState:
    """The open window closes between two micro-batches; whether a step was made of it is not recorded here."""
    return replace(state, window=replace(state.window, is_open=False, totals=None))


def resume_window(
    state: AccumulationState, planned: int, position: int, totals: AccumulationTotals
) -> AccumulationState:
    """The run continues in a window that was saved open."""
    return replace(state, window=Window(planned, position, is_open=True, totals=totals))


def current_budget(settings: AccumulationSettings, state: AccumulationState) -> TokenBudget | None:
    """The budget on which the run ends, if there is one: that of its settings, or the one of :func:`end_at`."""
    budget, tokens = settings.budget, state.end_tokens
    if tokens is None:
        return budget
    return TokenBudget(tokens, "ceil") if budget is None else replace(budget, tokens=tokens)


def end_at(state: AccumulationState, tokens: int) -> AccumulationState:
    """The run ends on n tokens, in place of its budget if it has one; whether they are reached is not known."""
    return replace(state, end_tokens=tokens, budget_reached=False)


def is_single_micro_batch_step(state: AccumulationState) -> bool:
    """Whether the current micro-batch is the whole step: its loss is the mean already, and nothing is multiplied."""
    if state.window.planned != 1 or state.window.is_split or state.micro_batch is None or state.micro_batch.is_weighed:
        return False
    return (state.layout is None or state.layout.data_ranks == 1) and state.micro_batch.measure.divisor is None
