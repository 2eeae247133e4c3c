"""A part of a batch and its halves, run forward to compare their losses; nothing of it stays."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_mp.accumulation.batch_split import Microbatch
from lightning_mp.accumulation.controller import AccumulationController
from lightning_mp.accumulation.loss_form import LossForm, PartLoss, likelier_form, loss_form
from lightning_mp.accumulation.out_of_memory import is_out_of_memory
from lightning_mp.accumulation.split_state import Comparison, SplitState
from lightning_mp.core.messages import lightning_logger
from lightning_mp.core.private_loop_api import BatchClosure
from lightning_mp.core.random_state import RandomState
from lightning_mp.modules.state import logging_muted

_TOLERANCE, _TOLERANCE_16_BIT = 1e-3, 3e-2  # relative; autocast rounds each loss by itself


class _NoNumbersError(Exception):
    """Losses cannot be compared; the text says why."""


class LossProbe:
    """Finds out how the loss of a batch is made of its parts' losses. The caller restores module and random numbers."""

    def __init__(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", controller: AccumulationController
    ) -> None:
        self._trainer, self._module, self._controller = trainer, pl_module, controller

    def form_of(self, batch: Any, state: SplitState, closure: BatchClosure) -> LossForm | None:
        """Compares the losses of parts and of their halves; None if no part of this batch shows it.

        In eval mode, as dropout and BatchNorm change the loss of each part; where the step does not run in it, in
        training mode. If the step draws random numbers, a message says what is assumed.

        Raises:
            MisconfigurationException: if the losses do not add up, or there are none to compare.
        """
        reason: Exception = _NoNumbersError("")
        for training in (False, True):
            try:
                with self._mode(training=training), logging_muted(self._module):
                    return self._compare(batch, state, closure)
            except _NoNumbersError as error:
                reason = error
        raise MisconfigurationException(
            "MicroBatchOnOOM could not compare the loss of some samples with those of their halves, so it is not known"
            f" whether a batch can be split: the training step, run once more, {reason}."
        ) from reason

    def _compare(self, batch: Any, state: SplitState, closure: BatchClosure) -> LossForm | None:
        is_16_bit = "16" in str(self._trainer.precision)
        before = RandomState.capture(self._module.device)
        for comparison in state.comparisons(batch):
            whole, halves = self._losses(comparison, closure)
            if not before.is_current():
                form = likelier_form(whole, halves)
                _say_what_is_assumed(form)
                return form
            tolerance = _TOLERANCE_16_BIT if is_16_bit else _TOLERANCE
            found = loss_form(comparison.whole.samples, whole, halves, tolerance)
            if found is not None:
                return found
        return None

    def _losses(self, comparison: Comparison, closure: BatchClosure) -> tuple[float, list[PartLoss]]:
        whole, halves, fits = comparison
        try:
            found = [self._loss(half, closure) for half in halves]
            with torch.set_grad_enabled(fits):
                return self._loss(whole, closure).loss, found
        except _NoNumbersError:
            raise
        except Exception as error:
            if is_out_of_memory(error) and fits:
                raise
            raise _NoNumbersError(f"raised {type(error).__name__}: {error}") from error

    def _loss(self, part: Microbatch, closure: BatchClosure) -> PartLoss:
        arguments = {**closure.arguments, "batch": part.batch}
        with self._trainer.precision_plugin.train_step_context():
            output = self._module.training_step(*arguments.values())
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise _NoNumbersError("returned no loss")
        count = self._controller.count_of_part(part.batch, loss) if loss.grad_fn is not None else None
        return PartLoss(part.samples if count is None else count, float(loss.detach()))

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


def _say_what_is_assumed(form: LossForm) -> None:
    lightning_logger().warning(
        "MicroBatchOnOOM could not compare the loss of a batch with those of its parts exactly, because the training"
        f" step draws random numbers: it is taken for their {form}. Losses that compare the samples of a batch with each other must not"
        " be split."
    )
