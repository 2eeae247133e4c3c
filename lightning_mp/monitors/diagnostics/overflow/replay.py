"""Runs the micro-batches of an accumulation window once more, as the training step ran them."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import FSDPStrategy
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor

from lightning_mp.ground.core import private_dispatch_api, private_optimizer_api
from lightning_mp.ground.core.nested_tensors import tensors_in
from lightning_mp.ground.core.random_state import RandomState, random_state_kept
from lightning_mp.ground.modules.names import named_modules
from lightning_mp.ground.modules.state import gradients_set_aside, logging_muted, module_kept
from lightning_mp.monitors.diagnostics.overflow.first_overflow import FirstOverflow, find_first_overflow
from lightning_mp.monitors.diagnostics.overflow.observations import Place, Role
from lightning_mp.monitors.diagnostics.overflow.tensor_watch import TensorWatch
from lightning_mp.training.gradients import gradient_ops


@dataclass
class MicroBatch:
    """What is kept of a micro-batch to run it again."""

    batch: Any  # the batch as the training step got it; a reference
    batch_idx: int  # its index
    random_state: RandomState  # the generators before its forward
    divisor: int  # what its loss is divided by, `trainer.accumulate_grad_batches`
    scaled_loss: Tensor | None = None  # the loss that backward started from, on its device; None if there was none


@dataclass(frozen=True)
class Trial:
    """What one run came to on this rank."""

    finite: bool  # whether all gradients, and their norms, were
    # the first tensor that was not; None if there is none or it was not watched
    first_overflow: FirstOverflow | None = None
    error: str = ""  # why the run could not be made; "" if it was


class Replay:
    """Runs micro-batches again, with nothing left behind: a context to enter, then :meth:`run`.

    The precision plugin's own training context is entered, random numbers are the same, compiled modules run eagerly.
    The underlying module runs, so DDP reduces nothing and the gradients are this rank's own. FSDP gathers and reduces
    as always, so all ranks have to run the same.
    """

    def __init__(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", loss_scale: float) -> None:
        self._trainer = trainer
        self._pl_module = pl_module
        self._loss_scale = loss_scale

    @contextmanager
    def state_restored(self) -> Iterator[None]:
        """Afterwards gradients, buffers, counters, random numbers and logged values are as they were before."""
        module = self._pl_module
        with ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            stack.enter_context(random_state_kept(module.device))
            stack.enter_context(gradients_set_aside(module.parameters()))
            stack.enter_context(module_kept(module))
            stack.enter_context(logging_muted(module))
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(torch.enable_grad())
            yield

    def run(self, micro_batch: MicroBatch, scale: float, *, watched: bool = False, accumulated: bool = False) -> Trial:
        """One forward and backward."""
        watch = TensorWatch(self._pl_module) if watched else None
        return self._attempt(lambda: self._run_in_policy(micro_batch, scale, watch), watch, accumulated)

    def run_in_float32(self, micro_batch: MicroBatch) -> Trial | None:
        """One forward and backward in full precision at scale 1; None where that cannot be had.

        A run that is not finite says nothing about fp32 where the module's own code computes in 16 bit.
        """
        if isinstance(self._trainer.strategy, FSDPStrategy) or any(
            p.is_floating_point() and p.element_size() < 4 for p in self._pl_module.parameters()
        ):
            return None
        low_precision: list[Any] = []

        def find_low_precision(operation: Any, args: Any, kwargs: Any, result: Any) -> None:
            if not low_precision and any(t.is_floating_point() and t.element_size() < 4 for t in tensors_in(result)):
                low_precision.append(operation)

        with private_dispatch_api.observe_dispatch(find_low_precision):
            trial = self._attempt(lambda: self._run_plainly(micro_batch), None, False)
        # Code that names 16-bit dtypes need not run in another.
        return None if trial.error or (low_precision and not trial.finite) else trial

    def _attempt(self, run: Callable[[], None], watch: TensorWatch | None, accumulated: bool) -> Trial:
        if not accumulated:
            for parameter in self._pl_module.parameters():
                parameter.grad = None
        try:
            with watch if watch is not None else nullcontext():
                run()
            first_overflow = find_first_overflow(watch.observations()) if watch is not None else None
            finite = self._gradients_finite()
        except Exception as error:
            return Trial(finite=False, error=f"{type(error).__name__}: {error}")
        return Trial(finite and first_overflow is None, first_overflow)

    def _run_in_policy(self, micro_batch: MicroBatch, scale: float, watch: TensorWatch | None) -> None:
        strategy, plugin = self._trainer.strategy, self._trainer.precision_plugin
        micro_batch.random_state.restore()
        if watch is not None:
            self._note_what_goes_in(watch, micro_batch)
        # A training step that runs its backwards itself (MicroBatchOnOOM) scales its losses, too.
        with private_optimizer_api.loss_scale_set(getattr(plugin, "scaler", None), scale):
            if isinstance(strategy, FSDPStrategy):
                output = strategy.training_step(*self._arguments(micro_batch))
            else:
                with plugin.train_step_context():
                    output = self._pl_module.training_step(*self._arguments(micro_batch))
        # An outer autocast would keep the casts of this forward, and the next one's backward would end in this one's.
        torch.clear_autocast_cache()
        loss = _loss_of(output)
        if loss is None:
            return
        if watch is not None:
            watch.note(Place("loss", "", "", "the loss"), loss)
        seed = loss.float() * self._factor(micro_batch, loss, scale)
        recomputing: AbstractContextManager[None] = watch.backward() if watch is not None else nullcontext()
        with recomputing:
            plugin.backward(seed, self._pl_module, None)

    def _run_plainly(self, micro_batch: MicroBatch) -> None:
        micro_batch.random_state.restore()
        loss = _loss_of(self._pl_module.training_step(*self._arguments(micro_batch)))
        if loss is not None:
            self._pl_module.backward(loss / micro_batch.divisor)

    def _arguments(self, micro_batch: MicroBatch) -> list[Any]:
        """As Lightning calls it: with or without the index."""
        takes_index = is_param_in_hook_signature(self._pl_module.training_step, "batch_idx", min_args=2)
        return [micro_batch.batch, micro_batch.batch_idx] if takes_index else [micro_batch.batch]

    def _factor(self, micro_batch: MicroBatch, loss: Tensor, scale: float) -> float:
        """From the loss to what backward starts from: scale over divisor, and the weight of the micro-batch."""
        plain = 1.0 / micro_batch.divisor
        if micro_batch.scaled_loss is None:
            return scale * plain
        before, now = float(micro_batch.scaled_loss), float(loss.detach()) * plain * self._loss_scale
        weight = before / now if now else 1.0
        # A ratio that is 1 up to rounding, or nonsense because the loss is not finite, is no weight.
        is_weight = 1e-6 < weight < 1e6 and abs(weight - 1.0) > 1e-4
        return scale * plain * (weight if is_weight else 1.0)

    def _note_what_goes_in(self, watch: TensorWatch, micro_batch: MicroBatch) -> None:
        watch.note(Place("batch", "", "", "batch"), micro_batch.batch)
        roles: tuple[Role, Role] = ("parameter", "buffer")
        for name, owner in named_modules(self._pl_module):
            tensors = owner.named_parameters(recurse=False), owner.named_buffers(recurse=False)
            for role, named in zip(roles, tensors, strict=True):
                for own_name, value in named:
                    watch.note(Place(role, name, type(owner).__name__, own_name), value)

    def _gradients_finite(self) -> bool:
        """Whether the gradients can be stepped with: also their squares have to fit into float32."""
        shards = [gradient_ops.local_shard(p.grad) for p in self._pl_module.parameters() if p.grad is not None]
        shards = [shard for shard in shards if shard.numel()]
        return not shards or bool(gradient_ops.shard_norms(shards).isfinite().all())


def _loss_of(output: Any) -> Tensor | None:
    loss = output.get("loss") if isinstance(output, dict) else output
    return loss if isinstance(loss, Tensor) else None
