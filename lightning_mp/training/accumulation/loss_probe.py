"""A part of a batch and its halves, run forward to compare their losses; nothing of it stays."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from typing_extensions import override

from lightning_mp.ground.core import private_tensor_api
from lightning_mp.ground.core.messages import lightning_logger, listed
from lightning_mp.ground.core.private_loop_api import BatchClosure
from lightning_mp.ground.core.random_state import RandomState
from lightning_mp.ground.modules.state import logging_muted
from lightning_mp.training.accumulation.batch_split import LossForm, Microbatch, SplitState, copied_containers
from lightning_mp.training.accumulation.controller import AccumulationController
from lightning_mp.training.accumulation.out_of_memory import is_out_of_memory
from lightning_mp.training.tokens.batch_tokens import declared_divisor

_TOLERANCE, _TOLERANCE_16_BIT = 1e-3, 3e-2  # relative; autocast rounds each loss by itself
_SILENT = 1e-2  # of the tolerance: a message shows larger differences that are taken for rounding
_MOST_COMPARISONS = 4


class PartLoss(NamedTuple):
    """The loss of a part of a batch."""

    items: float  # what it is a mean over
    loss: float  # of no use if it counts nothing


class Comparison(NamedTuple):
    """The loss of some samples beside those of their halves."""

    samples: int
    whole: float
    halves: Sequence[PartLoss]

    def off(self, form: LossForm) -> float:
        """By how much it differs from their mean by what they count, or their sum, relative to the numbers."""
        # Where neither counts anything, each is the same number as the whole.
        counted = [half for half in self.halves if half.items > 0] or [PartLoss(1, half.loss) for half in self.halves]
        terms = [half.loss * half.items / sum(one.items for one in counted) for half in counted]
        if form == "sum":
            terms = [half.loss for half in counted]
        return abs(sum(terms) - self.whole) / (max(abs(self.whole), sum(map(abs, terms))) or 1.0)

    def form(self, tolerance: float, *, is_divided: bool = False) -> LossForm | Literal["neither"] | None:
        """How the loss is made of those of the halves; None if these do not show it.

        Args:
            tolerance: by how much the numbers may differ, relative to their size.
            is_divided: by a number of items that the batch declares, so that losses of 0 add up too.

        Example:
            >>> Comparison(4, 2.5, [PartLoss(2, 2.0), PartLoss(2, 3.0)]).form(1e-3)
            'mean'
            >>> Comparison(4, 5.0, [PartLoss(2, 2.0), PartLoss(2, 3.0)]).form(1e-3)
            'sum'
            >>> Comparison(4, 1.0, [PartLoss(2, 2.0), PartLoss(2, 3.0)]).form(1e-3)
            'neither'
            >>> Comparison(4, 3.0, [PartLoss(2, 3.0), PartLoss(0, float("nan"))]).form(1e-3) is None
            True
        """
        if not math.isfinite(self.whole):
            return None
        all_count = all(half.items > 0 for half in self.halves)
        is_sum = self.off("sum") <= tolerance
        if self.off("mean") <= tolerance:
            return "mean" if all_count and not is_sum else None  # a half that counts nothing is no test
        if not is_sum or not all_count:
            return "neither"
        size = sum(abs(half.loss) for half in self.halves)
        if all(abs(half.loss) > tolerance * size for half in self.halves):
            return "sum"
        return None if is_divided else "neither"  # any mean looks like a sum beside a half without a loss

    @override
    def __str__(self) -> str:
        losses = " and ".join(f"{half.loss:.4g} (over {half.items:g})" for half in self.halves)
        return f"the loss of {self.samples} samples is {self.whole:.4g}, those of their halves are {losses}"


@dataclass
class LossProbe:
    """Finds out how the loss of a batch is made of its parts' losses. The caller restores module and random numbers."""

    trainer: "pl.Trainer"
    module: "pl.LightningModule"
    controller: AccumulationController
    state: SplitState
    closure: BatchClosure

    def form_of(self, batch: Any) -> LossForm | None:
        """Compares the losses of the first parts and of their halves, one by one; None if none of them shows it.

        In eval mode, as dropout and BatchNorm change the loss of each part; where the step does not run in it, in
        training mode. If the step draws random numbers, a message says what is assumed.

        Raises:
            MisconfigurationException: if the losses do not add up, or there are none to compare.
        """
        modes = {module: module.training for module in self.module.modules()}
        with _frozen_parameters_watched(self.module), logging_muted(self.module):
            for is_eval in (True, False):
                try:
                    for module, mode in modes.items():
                        module.training = mode and not is_eval
                    return self._compare(batch, must_see_losses=is_eval)
                except MisconfigurationException:
                    raise
                except Exception as error:
                    if is_out_of_memory(error):
                        raise
                    reason = error
                finally:
                    for module, mode in modes.items():
                        module.training = mode
        raise MisconfigurationException(
            "MicroBatchOnOOM cannot compare the loss of some samples with those of their halves, to see whether a batch"
            f" can be split: the training step, run once more, raised {type(reason).__name__}: {reason}. Use a smaller"
            " batch."
        ) from reason

    def _compare(self, batch: Any, *, must_see_losses: bool) -> LossForm | None:
        before = RandomState.capture(self.module.device)
        form: LossForm | None = None
        tolerance = _TOLERANCE_16_BIT if "16" in str(self.trainer.precision) else _TOLERANCE
        # Of parts with one sample two together.
        parts = replace(self.state, size=max(self.state.size or 0, 2)).parts_of(batch)
        for part in [part for part in parts if part.samples > 1][:_MOST_COMPARISONS]:
            losses = self._losses(part)
            known = [loss for loss in losses if loss is not None]
            if len(known) < len(losses):  # a step without a loss is left out of the mean
                continue
            must_see_losses = False
            again, *halves, whole = known
            compared = Comparison(part.samples, whole.loss, halves)
            # Of the process, or of a generator of its own.
            if not before.is_current() or abs(again.loss - halves[0].loss) > _SILENT * tolerance * abs(again.loss):
                form = "sum" if compared.off("sum") < compared.off("mean") else "mean"
                lightning_logger().warning(
                    "MicroBatchOnOOM cannot tell exactly how losses of parts add up, because the training step draws"
                    f" random numbers: the loss of a batch is taken for their {form}. It must not compare samples with"
                    " each other."
                )
                return form
            found = compared.form(tolerance, is_divided=declared_divisor(batch) is not None)
            # All of them: a half without labels lets a mean plus a sum look like a sum.
            if found == "neither" or (found is not None and form not in (None, found)):
                raise MisconfigurationException(
                    f"MicroBatchOnOOM: {compared}: it is neither their mean nor their sum, so the batch cannot be"
                    " split. Use a smaller batch, or ActivationCheckpointing."
                )
            if found is not None and form is None and compared.off(found) > _SILENT * tolerance:
                lightning_logger().warning(
                    f"MicroBatchOnOOM: {compared}, {compared.off(found):.2g} off their {found}. Up to {tolerance:g} is"
                    " taken for rounding; a term that compares samples with each other would not be exact."
                )
            form = found or form
        if must_see_losses:
            raise TypeError("it returned no loss")
        return form

    def _losses(self, whole: Microbatch) -> list[PartLoss | None]:
        """The losses of the halves of some samples, of the first one twice, and of all; None where there is none."""
        halves = replace(self.state, size=-(-whole.samples // 2), least=1).parts_of(whole.batch)
        found = [self._loss(half) for half in (halves[0], *halves)]
        # More than fits with what a backward needs.
        with nullcontext() if self.state.size != 1 else torch.no_grad():
            return [*found, self._loss(whole)]

    def _loss(self, part: Microbatch) -> PartLoss | None:
        arguments = {**self.closure.arguments, "batch": copied_containers(part.batch)}
        with self.trainer.precision_plugin.train_step_context():
            output = self.module.training_step(*arguments.values())
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if output is None:
            return None
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise TypeError("it returned no loss")
        counted = self.controller.count_of_part(part.batch, loss) if loss.grad_fn is not None else None
        return PartLoss(part.samples if counted is None else counted, float(loss.detach()))


@contextmanager
def _frozen_parameters_watched(module: nn.Module) -> Iterator[None]:
    """Refuses a step that changes them."""
    version = private_tensor_api.version_of
    # An alias holds the memory, so that nothing else can take it.
    frozen = [(name, p, p.detach(), version(p)) for name, p in module.named_parameters() if not p.requires_grad]
    try:
        yield
    finally:
        changed = [n for n, p, was, before in frozen if (p.data_ptr(), version(p)) != (was.data_ptr(), before)]
        if changed:
            raise MisconfigurationException(
                f"MicroBatchOnOOM: the training step changes frozen parameters ({listed(changed)}); it would do so once"
                " for each part. Update target networks in on_train_batch_end."
            )
