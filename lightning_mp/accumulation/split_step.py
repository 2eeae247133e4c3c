"""A batch that does not fit into memory, in parts: micro-batches of its window, inside Lightning's closure.

.. code-block:: text

    Lightning's loop, or the optimizer
       |  calls the closure of a batch
       v
    training step, zero_grad, backward     for one part after the other, as small as `size` says
       |  out of memory                    -> module, logs and random numbers go back to where the batch began,
       |                                      gradients to zero; earlier batches of the window are computed again
       v
    reduction over ranks, logs, on_after_backward: once

Nothing outside the closure sees parts: batch indices, counters, batch hooks, budgets and checkpoints are those of
whole batches. The accumulation controller weights each part by its loss.

Under DDP each rank repeats alone. Its parts run without reduction; then the gradient goes through DDP's own reducer,
for which the other ranks wait in their backwards. Where the shapes of a batch have fitted before, its backward overlaps
with the reduction as always.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.apply_func import apply_to_collection
from lightning.fabric.utilities.rank_zero import rank_prefixed_message
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from lightning_mp.accumulation.batch_split import Microbatch, copied_containers, merge_outputs
from lightning_mp.accumulation.controller import AccumulationController
from lightning_mp.accumulation.loss_probe import LossProbe
from lightning_mp.accumulation.out_of_memory import (
    advice_when_out_of_memory,
    forget_attempt,
    free_cached_memory,
    is_out_of_memory,
    smaller_size,
)
from lightning_mp.accumulation.part_logs import PartLogs, PartLosses
from lightning_mp.accumulation.running_parts import RunningParts
from lightning_mp.accumulation.split_state import SplitState
from lightning_mp.accumulation.windows import AccumulationState, Part
from lightning_mp.core import private_loop_api, private_sharding_api, private_tensor_api, private_trainer_api
from lightning_mp.core.messages import lightning_logger
from lightning_mp.core.nested_tensors import tensors_in
from lightning_mp.core.patches import Patches
from lightning_mp.core.private_loop_api import BatchClosure
from lightning_mp.core.random_state import RandomState
from lightning_mp.core.run_state import RunState
from lightning_mp.gradients.late_reduction import reduce_gradients
from lightning_mp.modules.state import keep_module
from lightning_mp.tokens.loss_items import counts_nothing


@dataclass
class _Batch:
    """A batch of the open window, with all that is needed to compute it again."""

    closure: BatchClosure
    batch: Any  # before a training step has popped anything
    versions: list[int]
    random_state: RandomState
    restore_module: Callable[[], None]
    counted: AccumulationState
    zero_grad: Callable[[], None] | None  # until that is done

    def return_to(self, controller: AccumulationController, *, carries_totals: bool = False) -> None:
        """Restores its start: random numbers, the module's buffers and attributes, counts."""
        self.restore_module()
        self.random_state.restore()
        controller.return_to(self.counted, carries_totals=carries_totals)


class _Ran(NamedTuple):
    """A part that has run."""

    output: ClosureResult  # without its graph, if there are several parts
    samples: int
    weight: float | Tensor  # in the mean of the batch
    has_backward: bool


class SplitStep:
    """Runs the closures of one fit; to be made when it starts."""

    def __init__(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", owner: object, state: SplitState
    ) -> None:
        self._trainer, self._module, self._owner, self._state = trainer, pl_module, owner, state
        model = trainer.strategy.model
        self._ddp = model if isinstance(model, DistributedDataParallel) else None
        controller = AccumulationController.of(trainer)
        assert controller is not None
        self._controller = controller
        self._logs = PartLogs(trainer)
        self._window: list[_Batch] = []  # the open one's, the last one the loader's current batch
        self._under_way: _Batch | None = None  # that or an earlier one, done again
        self._fitted: set[Any] = set()  # shapes whose backward was over when the optimizer had its state
        self._is_overlapping = False  # a backward whose buckets other ranks get
        self.is_running = False  # a batch, or a part of one
        self._shown = RunningParts()
        RunState.of(trainer).keep(self._shown)
        patches = Patches.of(trainer)
        private_loop_api.replace_closures(trainer, self._begin)
        self._after_backward = patches.replace(trainer.precision_plugin, "post_backward", self._post_backward)

    def _begin(self, closure: BatchClosure) -> Callable[[], ClosureResult] | None:
        if self._owner not in private_trainer_api.callbacks_of(self._trainer):
            return None  # tuners train with other callbacks
        # The state is taken before the closure is called: an optimizer may call it again.
        batch = copied_containers(closure.batch)
        return partial(self._run, closure, batch)

    def _post_backward(self, loss: Tensor, module: "pl.LightningModule") -> Any:
        """Calls ``on_after_backward`` after the last part only."""
        return loss.detach() if self.is_running else self._after_backward.original(loss, module)

    # -- one batch of the loader ---------------------------------------------------------------------------------------

    def _run(self, closure: BatchClosure, kept: Any) -> ClosureResult:
        """In place of Lightning's closure: until all parts fit."""
        if closure.zero_grad is not None:
            self._window.clear()
        if self._ddp is not None:
            # What is restored after a failure is what ranks have agreed on.
            private_sharding_api.broadcast_buffers_early(self._ddp)
        random_state, restore = RandomState.capture(self._module.device), keep_module(self._module)
        counted = self._controller.state
        batch = _Batch(closure, kept, _versions(kept), random_state, restore, counted, closure.zero_grad)
        self._window.append(batch)
        self._shown.is_repeated = False
        closes = not private_trainer_api.is_accumulating(self._trainer)
        self.is_running = True
        try:
            ran = self._attempt_until_it_fits(batch, closes)
            self._log(ran)
        finally:
            self.is_running, self._under_way = False, None
            self._logs.drop()
            if self._shown.part is not None:
                self._shown.part = None
                self._controller.end_parts(counted.micro_batch)
        if closes:
            self._window.clear()
        self._call_after_backward(ran)
        return self._merged(ran)

    def _attempt_until_it_fits(self, batch: _Batch, closes: bool) -> list[_Ran]:
        sizes_tried: list[int] = []
        while True:
            try:
                self._check_loss(batch)
                if sizes_tried:
                    self._compute_window_again(batch)
                return self._run_parts(batch, closes)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                self._make_smaller(sizes_tried, error)
                forget_attempt(error)
            self._shown.is_repeated = True
            batch.return_to(self._controller)
            free_cached_memory(self._module.device)

    def _compute_window_again(self, batch: _Batch) -> None:
        """The gradient of the window's earlier batches; nothing else of them happens twice."""
        closure = batch.closure
        self._module.optimizer_zero_grad(self._trainer.current_epoch, closure.batch_idx, closure.optimizer)
        for earlier in self._window[:-1]:
            earlier.return_to(self._controller, carries_totals=earlier is not self._window[0])
            ran = self._run_parts(earlier, closes=False)
            self._call_after_backward(ran)  # it may change the gradient; what it logs is dropped
        batch.return_to(self._controller, carries_totals=len(self._window) > 1)

    def _run_parts(self, batch: _Batch, closes: bool) -> list[_Ran]:
        """What Lightning's closure does, for each part."""
        self._under_way = batch
        parts = self._state.parts_of(batch.batch)
        known = self._known_of(parts)
        overlaps = closes and self._ddp is not None and _shapes(parts[-1].batch) in self._fitted
        self._logs.begin()
        ran: list[_Ran] = []
        for index, part in enumerate(parts):
            self._logs.begin_part(index)
            if known:
                self._show(batch, part, index)
                self._controller.begin_part(known[index])
            reduces = overlaps and part is parts[-1]
            has_gradient = any(one.has_backward for one in ran)
            may_skip = bool(known) and (part is not parts[-1] or has_gradient)
            with nullcontext() if reduces or self._ddp is None else self._ddp.no_sync():
                ran.append(self._run_part(batch, part, reduces=reduces, may_skip=may_skip))
            overlaps = overlaps and (ran[-1].has_backward or not reduces)
            if known:
                # Without its graph, by which it and its other entries would keep every part's activations.
                ran[-1] = ran[-1]._replace(output=_without_graph(ran[-1].output))
            if self._ddp is not None and self._trainer.global_step > 0:
                self._fitted.add(_shapes(part.batch))
        if closes and self._ddp is not None and not overlaps:
            with self._hooked_by_ddp() as hooked:
                reduce_gradients(self._ddp, hooked)
        return ran

    def _hooked_by_ddp(self) -> AbstractContextManager[Iterable[Tensor]]:
        """The tensors whose gradients DDP reduces: the parameters, or 16-bit copies of master weights."""
        of_plugin = getattr(self._trainer.precision_plugin, "hooked_by_ddp", None)
        return of_plugin() if of_plugin is not None else nullcontext(self._module.parameters())

    def _known_of(self, parts: list[Microbatch]) -> list[Part]:
        """What is known of parts before they run; empty for a batch that runs whole."""
        if len(parts) == 1:
            return []
        batches, samples = [part.batch for part in parts], [part.samples for part in parts]
        return self._controller.parts_of(batches, samples, losses_add_up=self._state.form == "sum")

    def _show(self, batch: _Batch, part: Microbatch, index: int) -> None:
        shown = self._shown
        shown.batch_idx, shown.index = batch.closure.batch_idx, index
        shown.part, shown.random_state = copied_containers(part.batch), RandomState.capture(self._module.device)

    def _run_part(self, batch: _Batch, part: Microbatch, *, reduces: bool, may_skip: bool) -> _Ran:
        """Training step, ``zero_grad`` if that is still to come, and backward.

        The mean over no items may have NaN for a gradient; of a part it is left out, which waits for the device.
        """
        output = batch.closure.training_step(part.batch)
        if batch.zero_grad is not None:
            zero_grad, batch.zero_grad = batch.zero_grad, None  # its hooks and counters: once
            zero_grad()
        loss, backward = output.closure_loss, batch.closure.backward
        if loss is None or backward is None:
            return _Ran(output, part.samples, 0.0, has_backward=False)
        if may_skip and not bool(loss.isfinite().all()) and counts_nothing(loss):
            return _Ran(output, part.samples, 0.0, has_backward=False)
        self._is_overlapping = reduces
        backward(loss)
        self._is_overlapping = False
        return _Ran(output, part.samples, self._controller.part_weight, has_backward=True)

    # -- what the whole batch would have returned and logged -----------------------------------------------------------

    def _log(self, ran: list[_Ran]) -> None:
        self._logs.flush([one.weight for one in ran], self._losses_of(ran))

    def _losses_of(self, ran: list[_Ran]) -> PartLosses:
        divisor = int(self._trainer.accumulate_grad_batches)
        return PartLosses([one.output.loss for one in ran], divisor, self._state.form == "sum")

    def _merged(self, ran: list[_Ran]) -> ClosureResult:
        if len(ran) == 1:
            return ran[0].output
        outputs, samples, weights, _ = zip(*ran, strict=True)
        merged = ClosureResult(None, merge_outputs([output.extra for output in outputs], samples, weights))
        merged.loss = self._losses_of(ran).merged(range(len(ran)), weights)
        return merged

    def _call_after_backward(self, ran: list[_Ran]) -> None:
        losses = [one.output.loss for one in ran if one.output.loss is not None]
        if losses:
            self._after_backward.original(losses[-1], self._module)

    # -- out of memory -------------------------------------------------------------------------------------------------

    def _make_smaller(self, sizes_tried: list[int], error: Exception) -> None:
        """Halves the size, or raises the error with what it needs to be understood."""
        state = self._state
        if self._is_overlapping:
            error.add_note(
                "MicroBatchOnOOM: a backward that overlaps with the reduction over ranks cannot be repeated, as others"
                " have a part of its gradients already. Batches of these shapes have fitted before: leave more memory"
                " free, or set the size of the callback before the run."
            )
            raise error
        if any(_versions(batch.batch) != batch.versions for batch in self._window):
            error.add_note(
                "MicroBatchOnOOM: the training step changes its batch in place, so it cannot be repeated. Let it make"
                " new tensors."
            )
            raise error
        assert self._under_way is not None
        samples = state.samples_of(self._under_way.batch)
        sizes_tried.append(samples if state.size is None else min(state.size, samples))
        smaller = smaller_size(sizes_tried[-1], max(state.min_size, state.least))
        if smaller is None:
            error.add_note(advice_when_out_of_memory(sizes_tried, max(state.min_size, state.least)))
            raise error
        state.size = smaller
        # From the rank itself: another one may need no smaller parts.
        text = (
            f"MicroBatchOnOOM: out of memory with {sizes_tried[-1]} samples; from now on at most {smaller} at a time."
        )
        if len(self._window) > 1:
            text += f" {len(self._window) - 1} earlier micro-batches of this step are computed again."
        several = self._trainer.world_size > 1
        lightning_logger().info(rank_prefixed_message(text, self._trainer.global_rank if several else None))

    def _check_loss(self, batch: _Batch) -> None:
        """At the first split: whether the losses of parts add up to that of the whole, before anything has stepped."""
        state = self._state
        if state.form is not None or state.size is None:
            return
        if len(state.parts_of(batch.batch)) == 1:
            return
        self._under_way = batch
        probe = LossProbe(self._trainer, self._module, self._controller)
        try:
            state.form = probe.form_of(batch.batch, state, batch.closure)
        finally:
            self._shown.is_repeated = True  # forwards have run that are no part of the step
            batch.return_to(self._controller)


def _without_graph(output: ClosureResult) -> ClosureResult:
    light = ClosureResult(None, apply_to_collection(output.extra, Tensor, Tensor.detach, allow_frozen=True))
    light.loss = output.loss
    return light


def _shapes(batch: Any) -> tuple[torch.Size, ...]:
    """Batches of the same shapes need as much memory."""
    return tuple(tensor.shape for tensor in tensors_in(batch))


def _versions(batch: Any) -> list[int]:
    """Versions of its tensors, which show whether one was written to."""
    return [0 if tensor.is_inference() else private_tensor_api.version_of(tensor) for tensor in tensors_in(batch)]
