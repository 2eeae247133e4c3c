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

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.apply_func import apply_to_collection
from lightning.fabric.utilities.rank_zero import rank_prefixed_message
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.memory import garbage_collection_cuda
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from lightning_mp.ground.core import private_loop_api, private_sharding_api, private_tensor_api, private_trainer_api
from lightning_mp.ground.core.messages import lightning_logger
from lightning_mp.ground.core.nested_tensors import tensors_in
from lightning_mp.ground.core.patches import Patches
from lightning_mp.ground.core.private_loop_api import BatchClosure
from lightning_mp.ground.core.random_state import RandomState
from lightning_mp.ground.core.run_state import RunState
from lightning_mp.ground.modules.state import keep_module
from lightning_mp.training.accumulation.batch_split import Microbatch, SplitState, copied_containers, num_samples
from lightning_mp.training.accumulation.controller import AccumulationController
from lightning_mp.training.accumulation.loss_probe import LossProbe
from lightning_mp.training.accumulation.out_of_memory import forget_attempt, is_out_of_memory
from lightning_mp.training.accumulation.part_results import PartLogs, RanPart, merged_output
from lightning_mp.training.accumulation.windows import AccumulationState
from lightning_mp.training.gradients.late_reduction import reduce_gradients
from lightning_mp.training.tokens.loss_items import counts_nothing


@dataclass
class _Batch:
    """A batch of the open window, with all that is needed to compute it again."""

    closure: BatchClosure
    kept: Any  # before a training step has written to its containers
    versions: list[int]
    random_state: RandomState
    restore_module: Callable[[], None]
    counted: AccumulationState
    zero_grad: Callable[[], None] | None  # until that is done
    is_new: bool = True  # no training step has had it

    def parts(self, state: SplitState) -> list[Microbatch]:
        """Itself, or what it is split into."""
        parts = state.parts_of(self.kept)
        if len(parts) == 1 and self.is_new:
            # The loader's own: hooks may read what the training step writes into it.
            parts = [replace(parts[0], batch=self.closure.batch)]
        self.is_new = False
        return parts


class SplitStep:
    """Runs the closures of one fit; to be made when it starts."""

    def __init__(
        self,
        trainer: "pl.Trainer",
        pl_module: "pl.LightningModule",
        controller: AccumulationController,
        state: SplitState,
        owner: object,
    ) -> None:
        self._trainer, self._module, self._controller = trainer, pl_module, controller
        self._state, self._owner = state, owner
        model = trainer.strategy.model
        self._ddp = model if isinstance(model, DistributedDataParallel) else None
        self._logs = PartLogs(trainer)
        self._window: list[_Batch] = []  # the open one's, the last one the loader's current batch
        self._under_way: _Batch | None = None  # that or an earlier one, done again
        self._fitted: set[Any] = set()  # shapes whose backward was over when the optimizer had its state
        self._is_overlapping = False  # a backward whose buckets other ranks get
        self._run_state = RunState.of(trainer)
        private_loop_api.replace_closures(trainer, self._begin)
        patches = Patches.of(trainer)
        self._after_backward = patches.replace(trainer.precision_plugin, "post_backward", self._post_backward)
        self._gather = patches.replace(pl_module, "all_gather", self._all_gather)

    def _begin(self, closure: BatchClosure) -> Callable[[], ClosureResult] | None:
        if self._owner not in private_trainer_api.callbacks_of(self._trainer):
            return None  # tuners train with other callbacks
        if closure.batch_idx == 0 and self._state.split is None:
            num_samples(closure.batch)
        # The state is taken before the closure is called: an optimizer may call it again.
        return partial(self._run, closure, copied_containers(closure.batch))

    def _post_backward(self, loss: Tensor, module: "pl.LightningModule") -> Any:
        """Calls ``on_after_backward`` after the last part only."""
        return loss.detach() if self._under_way else self._after_backward.original(loss, module)

    def _all_gather(self, *args: Any, **kwargs: Any) -> Any:
        if self._under_way and self._trainer.world_size > 1:
            raise MisconfigurationException(
                "The training step called self.all_gather. MicroBatchOnOOM cannot repeat it on one rank alone: the"
                " others would not take part, and wait forever. Gather outside of the training step, or remove the"
                " callback."
            )
        return self._gather.original(*args, **kwargs)

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
        closes = not private_trainer_api.is_accumulating(self._trainer)
        try:
            ran = self._attempt_until_it_fits(batch, closes)
            self._logs.flush(ran, int(self._trainer.accumulate_grad_batches), add_up=self._state.form == "sum")
            if len(ran) > 1:
                self._controller.end_parts(counted.micro_batch)
            self._under_way = None
            self._call_after_backward(ran)
        finally:
            self._under_way = None
            self._logs.drop()
            self._run_state.is_repeating = False
        if closes:
            self._window.clear()
        return merged_output(ran, add_up=self._state.form == "sum")

    def _attempt_until_it_fits(self, batch: _Batch, closes: bool) -> list[RanPart]:
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
            self._return_to(batch)
            torch.clear_autocast_cache()
            garbage_collection_cuda()  # cycles in a user's code may still hold tensors

    def _compute_window_again(self, batch: _Batch) -> None:
        """The gradient of the window's earlier batches; nothing else of them happens twice."""
        closure = batch.closure
        self._module.optimizer_zero_grad(self._trainer.current_epoch, closure.batch_idx, closure.optimizer)
        for earlier in self._window[:-1]:
            self._return_to(earlier, carries_totals=earlier is not self._window[0])
            ran = self._run_parts(earlier, closes=False)
            self._call_after_backward(ran)  # it may change the gradient; what it logs is dropped
        self._return_to(batch, carries_totals=len(self._window) > 1)

    def _return_to(self, batch: _Batch, *, carries_totals: bool = False) -> None:
        """Restores the start of a batch: random numbers, the module's buffers and attributes, counts."""
        self._run_state.is_repeating = True
        batch.restore_module()
        batch.random_state.restore()
        self._controller.return_to(batch.counted, carries_totals=carries_totals)

    def _run_parts(self, batch: _Batch, closes: bool) -> list[RanPart]:
        """What Lightning's closure does, for each part."""
        self._under_way = batch
        parts = batch.parts(self._state)
        is_split = len(parts) > 1
        if is_split:
            if self._controller.state.window.totals is None:
                raise MisconfigurationException(
                    "MicroBatchOnOOM cannot split a batch whose loss is evaluated again inside of a step, as"
                    f" {type(batch.closure.optimizer).__name__} does. Use a smaller batch, or another optimizer."
                )
            batches, samples = [part.batch for part in parts], [part.samples for part in parts]
            known = self._controller.parts_of(batches, samples, losses_add_up=self._state.form == "sum")
        has_fitted = closes and _shapes(parts[-1].batch) in self._fitted
        ran: list[RanPart] = []
        for index, part in enumerate(parts):
            is_last = part is parts[-1]
            self._logs.begin_part(index)
            if is_split:
                self._controller.begin_part(known[index])
            may_skip = is_split and (not is_last or any(one.has_backward for one in ran))
            overlaps = has_fitted and is_last
            with nullcontext() if self._ddp is None or overlaps else self._ddp.no_sync():
                ran.append(self._run_part(batch, part, overlaps=overlaps, may_skip=may_skip))
            if is_split:
                # By their graphs it and its other entries would keep every part's activations.
                output = ran[-1].output
                output.closure_loss = None
                output.extra = apply_to_collection(output.extra, Tensor, Tensor.detach, allow_frozen=True)
            if self._ddp is not None and self._trainer.global_step > 0:
                self._fitted.add(_shapes(part.batch))
        if closes and self._ddp is not None and not (has_fitted and ran[-1].has_backward):
            # Masters hook 16-bit copies in place of parameters.
            hooked_by_ddp = getattr(self._trainer.precision_plugin, "hooked_by_ddp", None)
            with hooked_by_ddp() if hooked_by_ddp is not None else nullcontext(self._module.parameters()) as hooked:
                reduce_gradients(self._ddp, hooked)
        return ran

    def _run_part(self, batch: _Batch, part: Microbatch, *, overlaps: bool, may_skip: bool) -> RanPart:
        """Training step, ``zero_grad`` if that is still to come, and backward.

        The mean over no items may have NaN for a gradient; of a part it is left out, which waits for the device.
        """
        output = batch.closure.training_step(part.batch)
        if batch.zero_grad is not None:
            zero_grad, batch.zero_grad = batch.zero_grad, None  # its hooks and counters: once
            zero_grad()
        loss, backward = output.closure_loss, batch.closure.backward
        is_left_out = loss is None or (may_skip and not bool(loss.isfinite().all()) and counts_nothing(loss))
        if loss is None or backward is None or is_left_out:
            return RanPart(output, part.samples, 0.0, has_backward=False)
        self._is_overlapping = overlaps and self._ddp is not None
        backward(loss)
        self._is_overlapping = False
        return RanPart(output, part.samples, self._controller.part_weight, has_backward=True)

    def _call_after_backward(self, ran: list[RanPart]) -> None:
        losses = [one.output.loss for one in ran if one.output.loss is not None]
        if losses:
            self._after_backward.original(losses[-1], self._module)

    # -- out of memory -------------------------------------------------------------------------------------------------

    def _make_smaller(self, sizes_tried: list[int], error: Exception) -> None:
        """Halves the size, or raises the error with what it needs to be understood."""
        state = self._state
        assert self._under_way is not None
        samples = state.samples_of(self._under_way.kept)
        sizes_tried.append(min(state.size or samples, samples))
        least = max(state.min_size, state.least)
        smaller, why_not = max(-(-sizes_tried[-1] // 2), least), ""
        if self._is_overlapping:
            why_not = (
                "a backward that overlaps with the reduction over ranks cannot be repeated, as others have a part of"
                " its gradients already. Batches of these shapes have fitted before: leave more memory free, or set"
                " the size of the callback before the run."
            )
        elif any(_versions(batch.kept) != batch.versions for batch in self._window):
            why_not = "the training step changes its batch in place, so it cannot be repeated. Let it make new tensors."
        elif smaller >= sizes_tried[-1]:
            why_not = (
                f"out of memory with at most {', '.join(map(str, sizes_tried))} samples at a time, and min_size={least}"
                " allows no fewer. Use ActivationCheckpointing(...), shorter samples, a lower precision, an optimizer"
                " with less state, or strategy='fsdp' without this callback."
            )
        if why_not:
            error.add_note(f"MicroBatchOnOOM: {why_not}")
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
        if state.form is None and state.size is not None and len(state.parts_of(batch.kept)) > 1:
            self._under_way = batch
            state.form = LossProbe(self._trainer, self._module, self._controller, state, batch.closure).form_of(
                batch.kept
            )
            self._return_to(batch)


def _shapes(batch: Any) -> tuple[torch.Size, ...]:
    """Batches of the same shapes need as much memory."""
    return tuple(tensor.shape for tensor in tensors_in(batch))


def _versions(batch: Any) -> list[int]:
    """Versions of its tensors, which show whether one was written to."""
    return [0 if tensor.is_inference() else private_tensor_api.version_of(tensor) for tensor in tensors_in(batch)]
