"""What the micro-batches of a window weigh, and by what its gradient is multiplied: pure functions of its state."""

from dataclasses import replace

import torch
from torch import Tensor

from lightning_mp.accumulation.settings import AccumulationSettings
from lightning_mp.accumulation.windows import WHOLE, AccumulationState, is_single_micro_batch_step
from lightning_mp.tokens.counter import ITEMS, LOSSES, UNKNOWN


def weigh_micro_batch(
    state: AccumulationState, items: float | Tensor, is_known: bool | Tensor, divisor: float | Tensor | None = None
) -> AccumulationState:
    """The current micro-batch weighs so many items; ``divisor`` is what its loss was divided by, if not by these.

    From the first one in its window whose weight is not known, each weighs as much as those before it in the mean.
    """
    assert state.micro_batch is not None
    assert state.window.totals is not None
    assert state.reference_items is not None
    micro_batch, totals, reference = state.micro_batch, state.window.totals, state.reference_items
    part = micro_batch.part or WHOLE
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
    measure = replace(micro_batch.measure, items=items, divisor=divisor)
    factor = (items / (part.share if part.losses_add_up else 1.0) if divisor is None else divisor) / reference
    weighed = replace(micro_batch, measure=measure, is_known=is_known, factor=factor, is_weighed=True)
    return replace(state, micro_batch=weighed)


def weigh_nothing(state: AccumulationState) -> AccumulationState:
    """The current micro-batch has no items, and its gradient is 0."""
    assert state.micro_batch is not None
    measure = replace(state.micro_batch.measure, items=0.0, divisor=None)
    return replace(state, micro_batch=replace(state.micro_batch, measure=measure, factor=1.0))


def weigh_equally(state: AccumulationState) -> AccumulationState:
    """The current micro-batch weighs as much as every other one, and its loss is left to Lightning."""
    assert state.micro_batch is not None
    part = state.micro_batch.part or WHOLE
    measure = replace(state.micro_batch.measure, items=part.share, divisor=None)
    factor = 1.0 if part.losses_add_up else part.share
    return replace(state, micro_batch=replace(state.micro_batch, measure=measure, factor=factor))


def expected_items(state: AccumulationState, num_ranks: int) -> float:
    """Items of the window over all ranks, if all its micro-batches weighed as factors are relative to."""
    assert state.reference_items is not None
    return num_ranks * state.reference_items * state.window.planned


def normalisation(state: AccumulationState, totals: Tensor, num_ranks: int) -> Tensor | None:
    """By what the gradient of the window is multiplied to be the exact mean, a scalar tensor; None if that is 1."""
    local = state.window.totals
    assert local is not None
    if is_single_micro_batch_step(state) or state.reference_items is None:
        return None
    expected = expected_items(state, num_ranks)
    if num_ranks == 1 and local.device[ITEMS] is None and local.host[ITEMS] == expected:
        return None
    return torch.where(totals[ITEMS] > 0, expected / torch.where(totals[ITEMS] > 0, totals[ITEMS], 1.0), 1.0)


def mean_of_losses(
    settings: AccumulationSettings, state: AccumulationState, totals: Tensor, num_ranks: int
) -> Tensor | None:
    """The same with equal weights: the gradient is the mean over the micro-batches that had a loss.

    In Lightning's own windows only what Lightning does not do is made up for: ranks without a loss are left out, but a
    short window stays divided by the length of a full one.
    """
    local, micro_batches = state.window.totals, float(state.window.planned)
    assert local is not None
    if settings.weighting is None or settings.weighting.weight_by is None:
        micro_batches = state.window.position + 1 if num_ranks > 1 else local.host[LOSSES]
    if num_ranks == 1 and local.host[LOSSES] == micro_batches:
        return None
    losses = totals[LOSSES]
    return torch.where(losses > 0, num_ranks * micro_batches / torch.where(losses > 0, losses, 1.0), 1.0)


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
