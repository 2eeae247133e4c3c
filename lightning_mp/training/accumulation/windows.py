"""Accumulation windows: where a run is, and how each micro-batch changes that. Immutable state and pure functions.

.. code-block:: text

    open_window          a micro-batch comes, and no window is open
    begin_micro_batch    it is counted, and trimmed where the budget ends in it: does the optimizer step after it?
    weigh_micro_batch    its loss is here: what it weighs in the mean of its window; or weigh_nothing, weigh_equally
    add_micro_batch      backward of its loss begins
    normalisation        by what the window's gradient is multiplied
    take_totals          the optimizer steps with the window's gradient
    end_micro_batch      it is over: the window is closed, or stays open

    close_early          the window closes between two micro-batches
    resume_window        a checkpoint was written within a window

The accumulation controller calls them. A checkpoint holds the run's own numbers; those of an open window are saved with
its gradient (:class:`lightning_mp.training.accumulation.partial_state.PartialAccumulation`), because without that the
window is lost. The totals of closed windows are in the token counter.
"""

from collections.abc import Set
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self

import lightning.pytorch as pl
import torch
from torch import Tensor

from lightning_mp.ground.core.saved_state import COUNT, FLAG, POSITIVE, checked_state, or_none
from lightning_mp.ground.core.trainer_ranks import num_data_ranks
from lightning_mp.training.accumulation.schedule import Progress
from lightning_mp.training.tokens.budget import TokenBudget
from lightning_mp.training.tokens.counter import ITEMS, LOSSES, UNKNOWN, AccumulationTotals, TokenCounter
from lightning_mp.training.tokens.loss_weighting import Measure


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


WHOLE = Part(1, None, 1.0, losses_add_up=False)
#: In place of a micro-batch whose training step returned no loss.
NOTHING = Part(0, None, 0.0, losses_add_up=False)


@dataclass(frozen=True)
class MicroBatch:
    """What is known of a micro-batch when it begins."""

    measure: Measure = field(default_factory=Measure)  # its items and tokens on this rank, after it was trimmed
    ends_run: bool = False  # the token budget ends in it
    ends_epoch: bool = False  # it is the last of its epoch, and its window does not continue in the next one
    is_repeated: bool = False  # it is not of the first epoch
    is_known: bool | Tensor = True  # what it weighs; a tensor where the host would have to wait for it
    factor: float | Tensor = 1.0  # of its loss, in addition to Lightning's division
    part: Part = WHOLE  # the part of it that runs, or the last one
    is_counted: bool = False  # it has come to backward, or a part of it has, and is not over: its tokens count
    parts_factor: float | Tensor = 0.0  # that of the whole, from those of the parts so far


@dataclass(frozen=True)
class Window:
    """The micro-batches of one optimizer step."""

    planned: int = 1  # micro-batches that it is to have
    position: int = 0  # those that are over
    is_open: bool = False  # the last one left it open
    closes: bool = False  # the optimizer steps after the current micro-batch
    # of those that came to backward on this rank; None once the optimizer step has taken them
    totals: AccumulationTotals | None = None


#: What a checkpoint holds of the state, beside the layout.
_SAVED = {
    "reference_items": or_none(POSITIVE),
    "micro_batch_samples": COUNT,
    "micro_batch_tokens": COUNT,
    "budget_reached": FLAG,
}


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
    micro_batch: MicroBatch = MicroBatch()  # the current micro-batch, or the last one

    def in_layout(self, layout: DataLayout) -> "AccumulationState":
        """The state for a run that continues in a layout: in another one, sizes are measured again."""
        if self.layout in (None, layout):
            return replace(self, layout=layout)
        return replace(self, layout=layout, micro_batch_samples=0, micro_batch_tokens=0)

    def lacks_sizes(self, units: Set[str]) -> bool:
        """Whether a schedule in these units needs the size of a micro-batch, and it is not known."""
        return bool(units & {"sample", "token"}) and not self.micro_batch_samples and not self.micro_batch_tokens

    def budget(self, planned: TokenBudget | None) -> TokenBudget | None:
        """The budget on which the run ends, if there is one: the planned one, which ``end_tokens`` may have moved."""
        if self.end_tokens is None:
            return planned
        return TokenBudget(self.end_tokens, "ceil") if planned is None else replace(planned, tokens=self.end_tokens)

    def progress(self, epoch: int, step: int, counter: TokenCounter | None) -> Progress:
        """How far the run is, for a schedule; ``counter`` is for one in samples or tokens."""
        counted = (0, 0)
        if counter is not None:
            counted = counter.samples_before_last_window, counter.tokens_before_last_window
        return Progress(epoch, step, *counted, self.micro_batch_samples, self.micro_batch_tokens)

    def state_dict(self) -> dict[str, Any]:
        """How far the run is, for a checkpoint."""
        layout = None if self.layout is None else asdict(self.layout)
        return {name: getattr(self, name) for name in _SAVED} | {"layout": layout}

    @classmethod
    def read(cls, saved: Any) -> Self:
        """From a checkpoint."""
        state = checked_state(saved, _SAVED, "accumulation windows")
        layout = state.get("layout")
        if layout is not None:
            ranks = {"data_ranks": POSITIVE, "batch_size": or_none(POSITIVE)}
            layout = DataLayout(**checked_state(layout, ranks, "the layout of data over ranks"))
        return cls(layout=layout, **{name: state[name] for name in _SAVED})


def open_window(state: AccumulationState, planned: int) -> AccumulationState:
    """The state in which a micro-batch finds a new window of so many micro-batches."""
    return replace(state, window=Window(planned, totals=AccumulationTotals()))


def begin_micro_batch(state: AccumulationState, micro_batch: MicroBatch) -> AccumulationState:
    """The state while a micro-batch runs: it closes its window if that is full, or if nothing comes after it."""
    window = state.window
    closes = micro_batch.ends_run or micro_batch.ends_epoch or window.position + 1 >= window.planned
    return replace(state, window=replace(window, closes=closes), micro_batch=micro_batch)


def begin_part(state: AccumulationState, part: Part) -> AccumulationState:
    """The state while a part of the current micro-batch runs: it weighs its own items, or those of its part."""
    measure = replace(state.micro_batch.measure, items=part.items, divisor=part.divisor)
    if part is NOTHING:
        measure = Measure(items=0)
    return replace(state, micro_batch=replace(state.micro_batch, measure=measure, part=part))


def add_micro_batch(state: AccumulationState) -> AccumulationState:
    """Backward of the current micro-batch's loss begins: it counts."""
    assert state.window.totals is not None
    micro_batch, part = state.micro_batch, state.micro_batch.part
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
    window = replace(state.window, position=state.window.position + 1, is_open=not state.window.closes)
    return replace(state, window=window, micro_batch=replace(state.micro_batch, is_counted=False))


def close_early(state: AccumulationState) -> AccumulationState:
    """The open window closes between two micro-batches; whether a step was made of it is not recorded here."""
    return replace(state, window=replace(state.window, is_open=False, totals=None))


def resume_window(
    state: AccumulationState, planned: int, position: int, totals: AccumulationTotals
) -> AccumulationState:
    """The run continues in a window that was saved open."""
    return replace(state, window=Window(planned, position, is_open=True, totals=totals))


def is_single_micro_batch_step(state: AccumulationState) -> bool:
    """Whether the current micro-batch is the whole step: its loss is the mean already, and nothing is multiplied."""
    if state.window.planned != 1 or state.micro_batch.part is not WHOLE:
        return False
    return (state.layout is None or state.layout.data_ranks == 1) and state.micro_batch.measure.divisor is None


# -- what micro-batches weigh ------------------------------------------------------------------------------------------


def weigh_micro_batch(
    state: AccumulationState, items: float | Tensor, is_known: bool | Tensor, divisor: float | Tensor | None = None
) -> AccumulationState:
    """The current micro-batch weighs so many items; ``divisor`` is what its loss was divided by, if not by these.

    From the first one in its window whose weight is not known, each weighs as much as those before it in the mean.
    """
    assert state.window.totals is not None
    assert state.reference_items is not None
    part, totals, reference = state.micro_batch.part, state.window.totals, state.reference_items
    if part.losses_add_up and divisor is None:
        items = items * part.share  # each loss shows what the whole counts
    if totals.device[UNKNOWN] is not None or totals.host[UNKNOWN]:
        is_known = is_known & (totals.number(UNKNOWN) == 0)
    if is_known is not True:
        items_before, losses_before = totals.number(ITEMS), totals.number(LOSSES)
        mean = items_before / losses_before if totals.host[LOSSES] else 0.0
        if isinstance(mean, Tensor):
            mean = torch.where(mean > 0, mean, reference)
        mean = part.share * (mean if isinstance(mean, Tensor) else mean or reference)
        if isinstance(is_known, Tensor):
            items = torch.where(is_known, items, mean)
            divisor = None if divisor is None else torch.where(is_known, divisor, mean)
        else:
            items, divisor = mean, None
    factor = (items / (part.share if part.losses_add_up else 1.0) if divisor is None else divisor) / reference
    return _weighed(state, items, factor, is_known)


def weigh_nothing(state: AccumulationState) -> AccumulationState:
    """The current micro-batch has no items, and its gradient is 0; so is the weight of a part in what is logged."""
    return _weighed(state, 0.0, 1.0 if state.micro_batch.part is WHOLE else 0.0)


def weigh_equally(state: AccumulationState, *, is_known: bool = True) -> AccumulationState:
    """The current micro-batch weighs as much as every other one, and its loss is left to Lightning."""
    part = state.micro_batch.part
    return _weighed(state, part.share, 1.0 if part.losses_add_up else part.share, is_known)


def _weighed(
    state: AccumulationState, items: float | Tensor, factor: float | Tensor, is_known: bool | Tensor = True
) -> AccumulationState:
    measure = replace(state.micro_batch.measure, items=items)
    return replace(state, micro_batch=replace(state.micro_batch, measure=measure, factor=factor, is_known=is_known))


def normalisation(
    state: AccumulationState, totals: Tensor, num_ranks: int, *, is_equal: bool, is_lightnings: bool
) -> Tensor | None:
    """By what the gradient of the window is multiplied to be the exact mean, a scalar tensor; None if that is 1.

    If weights are equal, that is the mean over the micro-batches that had a loss. Where only what Lightning does not do
    is to be made up for, ranks without a loss are left out, but a short window stays divided by the length of a full
    one.
    """
    local, micro_batches = state.window.totals, float(state.window.planned)
    assert local is not None
    entry, reference = (LOSSES, 1.0) if is_equal else (ITEMS, state.reference_items)
    if reference is None or (not is_equal and is_single_micro_batch_step(state)):
        return None
    if is_lightnings:
        micro_batches = state.window.position + 1 if num_ranks > 1 else local.host[LOSSES]
    expected = num_ranks * reference * micro_batches
    if num_ranks == 1 and local.device[entry] is None and local.host[entry] == expected:
        return None
    return torch.where(totals[entry] > 0, expected / totals[entry], 1.0)


def next_reference(state: AccumulationState, items: float, losses: float) -> AccumulationState:
    """Keeps factors near 1, so that fp16 holds them: they become relative to the mean weight in this window.

    That is done only where it is far from what they were relative to; otherwise nothing is rounded anew.

    >>> state = AccumulationState(reference_items=10.0)
    >>> next_reference(state, 60.0, 3).reference_items, next_reference(state, 1500.0, 3).reference_items
    (10.0, 500.0)
    """
    reference = state.reference_items
    if reference is None or not items > 0 or reference / 4 <= items / losses <= 4 * reference:
        return state
    return replace(state, reference_items=items / losses)
