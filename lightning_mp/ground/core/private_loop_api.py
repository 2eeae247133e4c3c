"""What is not public of the loop over batches: a batch's closure, the end of an epoch, what a step logs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loops import fit_loop
from lightning.pytorch.loops.optimization import automatic
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from torch import Tensor
from torch.optim import Optimizer
from torchmetrics import Metric

from lightning_mp.ground.core.patches import Patch, Patches

#: (owner, private name, why it is needed)
PRIVATE_NAMES: tuple[tuple[object, str, str], ...] = (
    (automatic, "_AutomaticOptimization", "the loop of the next name"),
    (automatic._AutomaticOptimization, "_optimizer_step", "a step at an epoch's early end, counted as Lightning's own"),
    (automatic._AutomaticOptimization, "_make_closure", "what the optimizer or the loop calls for one batch"),
    (automatic._AutomaticOptimization, "_training_step", "the training step of one part of it"),
    (fit_loop._FitLoop, "_results", "what a training epoch has logged so far"),
)


def replace_end_of_epoch(trainer: "pl.Trainer", end: tuple[float, bool]) -> tuple[float, bool]:
    """Puts (batches of this epoch, whether this batch is its last) in place of what the loop knows; returns that."""
    loop, progress = trainer.fit_loop, trainer.fit_loop.epoch_loop.batch_progress
    known = loop.max_batches, progress.is_last_batch
    loop.max_batches, progress.is_last_batch = end
    return known


def undo_logged_step(trainer: "pl.Trainer") -> None:
    """The x axis of loggers counts steps; Lightning is about to count one at an epoch's end that was not made."""
    trainer.fit_loop.epoch_loop._batches_that_stepped -= 1


def step_without_a_batch(trainer: "pl.Trainer", batch_idx: int, closure: Callable[[], Tensor]) -> None:
    """An optimizer step as automatic optimization makes it, with the gradients that are there."""
    epoch_loop = trainer.fit_loop.epoch_loop
    epoch_loop.automatic_optimization._optimizer_step(batch_idx, closure)
    epoch_loop._batches_that_stepped += 1


@dataclass
class BatchClosure:
    """The closure of one batch in automatic optimization, taken apart; what steps the optimizer calls it."""

    arguments: Mapping[str, Any]  # of the training step: the batch first, then its index if that takes one
    batch_idx: int
    optimizer: Optimizer
    training_step: Callable[[Any], ClosureResult]  # of a batch; the loss is divided by `accumulate_grad_batches`
    zero_grad: Callable[[], None] | None  # where the batch opens a window
    backward: Callable[[Tensor], None] | None

    @property
    def batch(self) -> Any:
        """What the loader returned, on its device."""
        return self.arguments["batch"]


def replace_closures(
    trainer: "pl.Trainer", begin: Callable[[BatchClosure], Callable[[], ClosureResult] | None]
) -> None:
    """Has ``begin`` make what runs training step, ``zero_grad`` and backward of each batch; None keeps Lightning's."""
    loop = trainer.fit_loop.epoch_loop.automatic_optimization

    def make_closure(arguments: Any, optimizer: Optimizer, batch_idx: int) -> Any:
        closure = closure_patch.original(arguments, optimizer, batch_idx)
        warnings = closure.warning_cache  # not the closure itself, which will refer to this: it would keep its batch

        def training_step(batch: Any) -> ClosureResult:
            output = loop._training_step(type(arguments)(arguments, batch=batch))
            if output.closure_loss is None:
                warnings.warn("`training_step` returned `None`. If this was on purpose, ignore this warning...")
            return output

        parts = closure._zero_grad_fn, closure._backward_fn
        run = begin(BatchClosure(arguments, batch_idx, optimizer, training_step, *parts))
        if run is not None:
            closure.closure = torch.enable_grad()(run)
        return closure

    closure_patch = Patches.of(trainer).replace(loop, "_make_closure", make_closure)


def replace_logging(trainer: "pl.Trainer", log: Callable[..., None]) -> Patch:
    """Has ``log`` take what ``self.log`` is called with in training, with the hook's name before the others."""
    return Patches.of(trainer).replace(trainer.fit_loop.epoch_loop._results, "log", log)


def batch_value(metric: Metric) -> Any:
    """What its last ``forward`` returned, which is logged for a step; None after a mere ``update``."""
    return metric._forward_cache


def set_batch_value(metric: Metric, value: Tensor) -> None:
    """Has a step log this value of the metric."""
    setattr(metric, "_forward_cache", value)  # noqa: B010  # torchmetrics declares None
