"""The weight of each micro-batch in the mean of its window, exact or as in Lightning, and the message about it."""

import math
import warnings
from collections.abc import Iterable
from dataclasses import replace
from typing import Literal

import lightning.pytorch as pl
from lightning.fabric.utilities.rank_zero import rank_zero_info, rank_zero_only
from torch import Tensor, nn

from lightning_mp.ground.core import private_tensor_api
from lightning_mp.ground.core.host_copy import HostCopy
from lightning_mp.ground.core.ranks import all_gathered, world_size
from lightning_mp.ground.core.trainer_ranks import is_pipelined
from lightning_mp.training.accumulation import windows
from lightning_mp.training.accumulation.settings import AccumulationSettings
from lightning_mp.training.accumulation.windows import AccumulationState, is_single_micro_batch_step
from lightning_mp.training.tokens.counter import ITEMS, LOSSES, UNKNOWN
from lightning_mp.training.tokens.loss_items import Items, Number, Unknown, read_items
from lightning_mp.training.tokens.loss_weights import LossWeights

#: What weights come from: losses, a count of the batch (explicit, or in a pipeline), or nothing.
Source = Literal["loss", "batch"] | None

_CHECKED_LOSSES = 8


class MicroBatchWeighing:
    """The weights of one fit.

    Ranks exchange their first losses, and the reason, in one message, once a loss turns out to be unknown.
    """

    def __init__(self, trainer: "pl.Trainer", settings: AccumulationSettings, losses: LossWeights) -> None:
        self._trainer, self._losses, requested = trainer, losses, settings.weighting
        assert requested is not None
        by_hand = requested.weight_by not in (None, "auto") or requested.count_weighs
        self.is_only_counted = requested.weight_by is None  # by callbacks
        self.source: Source = None
        if by_hand or (is_pipelined(trainer) and not self.is_only_counted):
            self.source = "batch"
        elif (settings.weighs_by_loss or not self.is_only_counted) and not is_pipelined(trainer):
            self.source = "loss"
        if self.source == "batch" and settings.follows_trainer:
            rank_zero_info(
                "Gradient accumulation: micro-batches are weighted by the tokens or samples of their batches, because"
                " the stages of a pipeline do not see what a loss is a mean over."
            )
        self._is_own_count = requested.count_weighs
        self._left = _CHECKED_LOSSES if by_hand and requested.weight_by in ("auto", "token") else 0
        self._first: tuple[float, float] | None = None  # of the losses that are checked: what it counts, and its weight
        # When a micro-batch was over; None once the second one of a window has been weighed.
        self.gradient_versions: dict[nn.Parameter, int] | None = {} if self.source == "loss" else None
        self._closed: HostCopy | None = None  # totals of the last window, until they have been read
        self._why = ""  # the first loss in this window that is unknown on this rank
        self.may_meet = False  # ranks communicate once in each micro-batch, whatever some of them repeat

    @property
    def is_equal(self) -> bool:
        """Whether micro-batches have equal weights, which Lightning's division gives them."""
        return self.source == "loss" and self._losses.is_equal

    def weigh(self, state: AccumulationState, loss: Tensor) -> AccumulationState:
        """The state with what the current micro-batch weighs; its loss is not weighed yet. Call it on all ranks."""
        state = self.settle_window(state)
        if self.is_equal:
            return windows.weigh_equally(state)
        return self._by_loss(state, loss) if self.source == "loss" else self._by_count(state, loss)

    def _by_count(self, state: AccumulationState, loss: Tensor) -> AccumulationState:
        measure = state.micro_batch.measure
        if self._left:
            self._check(loss, measure.items)
        if state.reference_items is None:
            reference = self._trainer.strategy.broadcast(float(measure.items) or 1.0)
            state = replace(state, reference_items=reference)
        is_known: bool | Tensor = not measure.wrong_count
        if self._is_own_count and isinstance(measure.items, Tensor):
            is_known = (measure.items >= 0) & (measure.items < math.inf)
        if is_known is not True:
            self._why = self._why or measure.wrong_count or "count= returned a number below 0"
        return windows.weigh_micro_batch(state, measure.items, is_known, measure.divisor)

    def _by_loss(self, state: AccumulationState, loss: Tensor) -> AccumulationState:
        declared, divisor = state.micro_batch.measure.divisor, None
        reading: Items | Unknown = Items()
        if state.micro_batch.part is not windows.NOTHING:
            reading = read_items(loss, divided=True, counts_targets=declared is not None)
        if self.gradient_versions:
            if self.gradient_versions != _versions(self.gradient_versions):
                reading = Unknown("training_step writes gradients itself")
            self.gradient_versions = None
        if isinstance(reading, Items) and reading.divisor is not None:
            divisor = reading.divisor
        elif state.micro_batch.part.losses_add_up:
            reading = Unknown("the losses of the parts of a batch add up to that of the whole")
        meets = self._losses.first is None and (self.may_meet or world_size() == 1)
        if meets:
            state = self._meet(state, reading)
            if self.is_equal:
                return windows.weigh_equally(state)
        if self._losses.first is None:
            if meets or reading == Items():
                return windows.weigh_nothing(state)
            self._why = self._why or "no rank counted anything in its first part of a batch"
            return windows.weigh_equally(state, is_known=False)
        items, is_known, why = self._losses.of(reading)
        if is_known is not True:
            self._why = self._why or why
        return windows.weigh_micro_batch(state, items, is_known, divisor)

    def count(self, loss: Tensor) -> float | None:
        """The items of a loss as ``training_step`` returned it; None where they do not decide. Waits for the device."""
        reading = read_items(loss)
        if self._losses.is_equal or isinstance(reading, Unknown):
            return None
        kinds = [mean.kind for mean in self._losses.first.means] if self._losses.first is not None else []
        decides = next((mean for mean in reading.means if mean.kind in kinds), next(iter(reading.means), None))
        return 0.0 if decides is None else float(decides.total)

    def watch_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """A micro-batch is over: what is written before the next backward in its window is not of that loss."""
        self.gradient_versions = _versions(parameters)

    def forget_gradients(self) -> None:
        """Gradients of the window are not written by ``training_step``: its micro-batches are done again, say."""
        self.gradient_versions = None if self.gradient_versions is None else {}

    def weigh_equally(self, why: str) -> None:
        """Gives micro-batches equal weights from now on. Call it on all ranks."""
        if self.source is not None and not self.is_equal:
            self.source = "loss"
            rank_zero_info(self._losses.weigh_equally(why))

    def normalisation(self, state: AccumulationState, totals: Tensor, num_ranks: int) -> Tensor | None:
        """By what the gradient of a window is multiplied, whose totals over all ranks these are; None if that is 1."""
        if self.source is None:
            return None
        is_lightnings = self.is_equal and self.is_only_counted
        return windows.normalisation(state, totals, num_ranks, is_equal=self.is_equal, is_lightnings=is_lightnings)

    def close_window(self, state: AccumulationState, totals: HostCopy) -> AccumulationState:
        """A window is over; ``totals`` are those over all ranks. What they show is said now, if they are here."""
        if self.source is None or is_single_micro_batch_step(state):
            return state
        self._closed = totals
        self.forget_gradients()  # the last micro-batch of the window may have had no loss
        return self.settle_window(state) if totals.is_there else state

    def settle_window(self, state: AccumulationState) -> AccumulationState:
        """Takes from the last window what it has shown; call it on all ranks. Its step is long over, or on the CPU."""
        closed, self._closed = self._closed, None
        if closed is None or self.is_equal:
            return state
        totals = closed.read()
        if totals[UNKNOWN] > 0:
            why = next((why for why in all_gathered(self._why) if why), "as before this fit was resumed")
            self.source = "loss"
            _warn(self._losses.weigh_equally(why))
        self._why = ""
        return windows.next_reference(state, totals[ITEMS], totals[LOSSES])

    def _meet(self, state: AccumulationState, reading: Items | Unknown) -> AccumulationState:
        """Ranks settle the weights of micro-batches with their first losses."""
        self.may_meet = False
        readings = all_gathered(reading.on_host() if isinstance(reading, Items) else reading)
        line = self._losses.settle(readings)
        if line:
            rank_zero_info(line)
        if self._losses.first is None or self.is_equal:
            return state
        totals = [float(one.means[0].total) for one in readings if isinstance(one, Items) and one.means]
        return replace(state, reference_items=max(totals))

    def _check(self, loss: Tensor, items: Number) -> None:
        """Warns once if the first losses are means over another number than the chosen one."""
        self._left -= 1
        reading = read_items(loss, divided=True)
        if isinstance(reading, Unknown) or [mean.kind[:7] for mean in reading.means] != ["targets"]:
            return
        counted, weight = float(reading.means[0].total), float(items)
        first = self._first = self._first or (counted, weight)
        if abs(counted * first[1] - weight * first[0]) > 1e-6 * abs(counted * first[1]):
            self._left, name = 0, "count=" if self._is_own_count else "their target tokens"
            _warn(
                f"Gradient accumulation: micro-batches are weighted by {name}, {first[1]:g} and {weight:g} in two"
                f" of them, but their losses average over {first[0]:g} and {counted:g}. To weight by what the loss"
                " averages over, use weight_by='auto' without count=."
            )


def _versions(parameters: Iterable[nn.Parameter]) -> dict[nn.Parameter, int]:
    return {p: -1 if p.grad is None else private_tensor_api.version_of(p.grad) for p in parameters}


@rank_zero_only
def _warn(text: str) -> None:
    """Python shows one text once per process, which would keep the next fit silent."""
    warnings.warn_explicit(text, UserWarning, __name__, 0, registry={})
