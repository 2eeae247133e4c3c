"""A part of a batch and its halves, run forward to compare their losses; nothing of it stays."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_mp.accumulation.batch_split import Microbatch, copied_containers
from lightning_mp.accumulation.controller import AccumulationController
from lightning_mp.accumulation.out_of_memory import is_out_of_memory
from lightning_mp.accumulation.split_state import LossForm, SplitState
from lightning_mp.core.messages import lightning_logger
from lightning_mp.core.private_loop_api import BatchClosure
from lightning_mp.core.random_state import RandomState
from lightning_mp.modules.state import logging_muted
from lightning_mp.tokens.batch_tokens import declared_divisor

_TOLERANCE, _TOLERANCE_16_BIT = 1e-3, 3e-2  # relative; autocast rounds each loss by itself
_MOST_COMPARISONS = 4


class PartLoss(NamedTuple):
    """The loss of a part of a batch."""

    items: float  # what it is a mean over
    loss: float  # of no use if it counts nothing
    is_mean: bool = False  # its graph shows a mean over these


def loss_form(whole: float, halves: Sequence[PartLoss], tolerance: float) -> LossForm | Literal["neither"] | None:
    """How the loss of some samples is made of those of their halves; None if these do not show it.

    Args:
        whole: the loss of all of them.
        halves: what each half counts, and its loss.
        tolerance: by how much the numbers may differ, relative to their size.

    Example:
        >>> loss_form(2.5, [PartLoss(2, 2.0), PartLoss(2, 3.0)], 1e-3)
        'mean'
        >>> loss_form(5.0, [PartLoss(2, 2.0), PartLoss(2, 3.0)], 1e-3)
        'sum'
        >>> loss_form(1.0, [PartLoss(2, 2.0), PartLoss(2, 3.0)], 1e-3)
        'neither'
        >>> loss_form(3.0, [PartLoss(2, 3.0), PartLoss(0, float("nan"))], 1e-3) is None
        True
    """
    counting = [half for half in halves if half.items > 0]
    if not counting:  # then the whole counts nothing either, and is the same number, or none
        is_same = all(abs(half.loss - whole) <= tolerance * abs(whole) for half in halves)
        return None if is_same or not math.isfinite(whole) else "neither"
    mean, total = mean_and_sum(counting)
    mean_size, size = mean_and_sum([PartLoss(half.items, abs(half.loss)) for half in counting])
    is_mean = abs(mean - whole) <= tolerance * max(abs(whole), mean_size)
    is_sum = abs(total - whole) <= tolerance * max(abs(whole), size)
    if is_mean:
        # A half that counts nothing is no test of a mean.
        return None if is_sum or len(counting) < len(halves) else "mean"
    # Nor is one without a loss a test of a sum: any mean looks like one then.
    has_losses = all(abs(half.loss) > tolerance * size for half in counting)
    return "sum" if is_sum and has_losses and len(counting) == len(halves) else "neither"


def not_additive(samples: int, whole: float, halves: Sequence[PartLoss]) -> MisconfigurationException:
    """The refusal of a loss that is neither the mean nor the sum of its parts' losses."""
    losses = " and ".join(f"{half.loss:.4g} (over {half.items:g})" for half in halves)
    return MisconfigurationException(
        f"MicroBatchOnOOM: the loss of {samples} samples is {whole:.4g}, those of their halves are {losses}: it is"
        " neither their mean nor their sum, so the batch cannot be split. Use a smaller batch, or"
        " ActivationCheckpointing."
    )


def likelier_form(whole: float, halves: Sequence[PartLoss]) -> LossForm:
    """The nearer one, where random numbers make both inexact.

    >>> likelier_form(2.4, [PartLoss(2, 2.0), PartLoss(2, 3.0)]), likelier_form(4.6, [PartLoss(2, 2), PartLoss(2, 3)])
    ('mean', 'sum')
    """
    counting = [half for half in halves if half.items > 0]
    if len(counting) < 2:
        return "mean"
    mean, total = mean_and_sum(counting)
    return "sum" if abs(total - whole) < abs(mean - whole) else "mean"


def mean_and_sum(halves: Sequence[PartLoss]) -> tuple[float, float]:
    """The mean of losses by their counts, and their sum."""
    count = sum(half.items for half in halves)
    return sum(half.items * half.loss for half in halves) / count, sum(half.loss for half in halves)


class _NoNumbersError(Exception):
    """Losses cannot be compared; the text says why."""

    def __init__(self, text: str, *, are_means: bool = False) -> None:
        super().__init__(text)
        self.are_means = are_means  # as far as their graphs show it


class LossProbe:
    """Finds out how the loss of a batch is made of its parts' losses. The caller restores module and random numbers."""

    def __init__(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", controller: AccumulationController
    ) -> None:
        self._trainer, self._module, self._controller = trainer, pl_module, controller

    def form_of(self, batch: Any, state: SplitState, closure: BatchClosure) -> LossForm | None:
        """Compares the losses of the first parts and of their halves, one by one; None if none of them shows it.

        In eval mode, as dropout and BatchNorm change the loss of each part; where the step does not run in it, in
        training mode. If the step draws random numbers, a message says what is assumed.

        Raises:
            MisconfigurationException: if the losses do not add up, or there are none to compare.
        """
        reason = _NoNumbersError("")
        for training in (False, True):
            try:
                with self._mode(training=training), logging_muted(self._module):
                    return self._compare(batch, state, closure)
            except _NoNumbersError as error:
                reason = error
        if reason.are_means:
            _say_what_is_assumed(f"the training step, run once more, {reason}", "mean")
            return "mean"
        raise MisconfigurationException(
            "MicroBatchOnOOM cannot compare the loss of some samples with those of their halves, to see whether a batch"
            f" can be split: the training step, run once more, {reason}. Use a smaller batch."
        ) from reason

    def _compare(self, batch: Any, state: SplitState, closure: BatchClosure) -> LossForm | None:
        is_16_bit = "16" in str(self._trainer.precision)
        before = RandomState.capture(self._module.device)
        form: LossForm | None = None
        assert state.size is not None
        # Of parts with one sample two together, which need not fit.
        parts = [part for part in replace(state, size=max(state.size, 2)).parts_of(batch) if part.samples > 1]
        for part in parts[:_MOST_COMPARISONS]:
            halves_of = replace(state, size=-(-part.samples // 2), least=1)
            whole, halves = self._losses(
                part, halves_of.parts_of(copied_containers(part.batch)), state.size > 1, closure
            )
            if not before.is_current():
                form = likelier_form(whole, halves)
                _say_what_is_assumed("the training step draws random numbers", form)
                return form
            tolerance = _TOLERANCE_16_BIT if is_16_bit else _TOLERANCE
            found = loss_form(whole, halves, tolerance)
            all_count = all(half.items > 0 for half in halves)  # as that number is the same for each
            if found == "neither" and all_count and declared_divisor(batch) is not None:
                total = sum(half.loss for half in halves)
                if abs(total - whole) <= tolerance * abs(whole):
                    found = None  # a sum over that number, and a half without targets
            # All of them: a half without labels lets a mean plus a sum look like a sum.
            if found == "neither" or (found is not None and form not in (None, found)):
                raise not_additive(part.samples, whole, halves)
            form = found or form
        return form

    def _losses(
        self, whole: Microbatch, halves: list[Microbatch], fits: bool, closure: BatchClosure
    ) -> tuple[float, list[PartLoss]]:
        found: list[PartLoss] = []
        try:
            found = [self._loss(half, closure) for half in halves]
            loss = self._output(whole, closure) if fits else self._output_without_activations(whole, closure)
            return float(loss.detach()), found
        except _NoNumbersError:
            raise
        except Exception as error:
            if is_out_of_memory(error) and (fits or not found):
                raise
            are_means = bool(found) and all(half.is_mean for half in found)
            raise _NoNumbersError(f"raised {type(error).__name__}: {error}", are_means=are_means) from error

    def _loss(self, part: Microbatch, closure: BatchClosure) -> PartLoss:
        loss = self._output(part, closure)
        counted = self._controller.count_of_part(part.batch, loss) if loss.grad_fn is not None else None
        items, is_mean = (part.samples, False) if counted is None else counted
        return PartLoss(items, float(loss.detach()), is_mean)

    def _output_without_activations(self, part: Microbatch, closure: BatchClosure) -> Tensor:
        """The loss of a part that is too large to be trained on: no activation is kept for a backward."""
        try:
            with torch.no_grad():
                return self._output(part, closure)
        except Exception as error:
            if is_out_of_memory(error):
                raise
        # A step that registers a hook on an activation needs a graph, but not what its nodes save.
        with torch.autograd.graph.saved_tensors_hooks(lambda _: None, _refuse_backward):
            return self._output(part, closure)

    def _output(self, part: Microbatch, closure: BatchClosure) -> Tensor:
        arguments = {**closure.arguments, "batch": part.batch}
        with self._trainer.precision_plugin.train_step_context():
            output = self._module.training_step(*arguments.values())
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise _NoNumbersError("returned no loss")
        return loss

    @contextmanager
    def _mode(self, *, training: bool) -> Iterator[None]:
        modes = {module: module.training for module in self._module.modules()}
        if not training:
            self._module.eval()
        try:
            yield
        finally:
            for module, mode in modes.items():
                module.training = mode


def _refuse_backward(_: None) -> Tensor:
    raise RuntimeError("the training step runs a backward itself")


def _say_what_is_assumed(reason: str, form: LossForm) -> None:
    lightning_logger().warning(
        f"MicroBatchOnOOM cannot tell exactly how losses of parts add up, because {reason}: the loss of a batch is"
        f" taken for their {form}. It must not compare samples with each other."
    )
