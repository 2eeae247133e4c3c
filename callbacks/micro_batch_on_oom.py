"""Micro-batches that are halved when memory runs out, with the same gradient."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.rank_zero import rank_prefixed_message, rank_zero_warn
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import nn
from torch.optim import LBFGS

from lightning_mp.accumulation.batch_split import Microbatch, SplitFunction, num_samples, split_batch, split_by
from lightning_mp.accumulation.microbatched_step import (
    MicrobatchLogs,
    advice_when_out_of_memory,
    forget_attempt,
    free_cached_memory,
    is_out_of_memory,
    microbatch_shares,
    run_microbatches,
    smaller_size,
    weighting_of,
)
from lightning_mp.core import private_api
from lightning_mp.core.arguments import function_or_none, whole_number
from lightning_mp.core.foreign_trainers import refuse_other_trainers
from lightning_mp.core.messages import lightning_logger, listed
from lightning_mp.core.patches import Patches
from lightning_mp.core.random_state import RandomState
from lightning_mp.core.saved_state import POSITIVE_COUNT, checked_state, or_none
from lightning_mp.core.settings_repr import SettingsRepr
from lightning_mp.modules.stage_placeholder import is_pipelined
from lightning_mp.modules.state import keep_module
from lightning_mp.tokens import batch_tokens
from lightning_mp.tokens.loss_weighting import Weighting


class MicroBatchOnOOM(SettingsRepr, Callback):
    """Halves the micro-batch when memory runs out in forward or backward, and continues with the same gradient.

    The micro-batch is then split into microbatches, which run one after the other, each weighted by its share of
    the target tokens (of the samples, where there are no token labels), so that their sum is the gradient of the whole,
    up to rounding. A failed attempt has no side effects: gradients that the window has already accumulated, buffers,
    plain attributes and metrics of the module, logged values and random numbers are as they were. The size that fitted
    is kept for all following micro-batches of this rank, and in the checkpoint (that of rank 0). It never grows by
    itself; set :attr:`size` to None to start over.

    Differences from a run without it:

    - Forwards *and* backwards run inside ``training_step``; Lightning's backward only assigns the gradients. Hooks
      (``on_before_backward``, ``on_after_backward``), the loss scale, accumulation, budgets and the optimizer see one
      micro-batch, as usual; a profiler shows backwards as part of the training step. It costs two passes over the
      gradients per micro-batch, and inside an open window memory for one more set of gradients towards the end of a
      backward. A micro-batch that fits is bit-identical to stock Lightning.
    - Under DDP gradients are reduced once per window, as usual, but after the last backward instead of during it. Ranks
      may use different sizes.
    - Values given to ``self.log`` in the training step are logged once, as the mean over microbatches by their shares
      (sums, maxima and minima by ``reduce_fx``). Other outputs of the step are detached; rows are concatenated, numbers
      averaged.
    - Splitting a micro-batch whose labels are on a device waits for the device once, since microbatches without tokens
      are left out.
    - Layers that mix samples (BatchNorm) see microbatches; a warning says so. Dropout masks of microbatches differ from
      those of the whole. ``torch.compile`` recompiles for a new size.

    It does not cover the optimizer step itself, validation, and collectives inside the training step
    (``self.all_gather`` is refused).

    Args:
        split: a function of a batch and a size that returns a list of batches of at most that many samples each, for
            batches that are not made of tensors whose first dimension is the sample. ``len(split(batch, 1))`` must be
            the number of samples.
        min_size: the size is not halved below this. If that does not fit, the original error is raised, with a note of
            the sizes tried and what else to do.

    Raises:
        ValueError: if an argument is not valid.
        MisconfigurationException: at set-up, under FSDP, ModelParallel, DeepSpeed or any other sharded strategy, with
            manual optimization, LBFGS, SyncBatchNorm, DDP with ``static_graph``, a ``dataloader_iter`` step, or
            gradient hooks on parameters; with the first batch, if it cannot be split.

    Example:
        >>> from lightning_mp import MicroBatchOnOOM
        >>> callback = MicroBatchOnOOM(min_size=2)
        >>> callback.size is None  # nothing was split yet
        True
    """

    def __init__(self, split: SplitFunction | None = None, min_size: int = 1) -> None:
        self.split = function_or_none(split, "split", "MicroBatchOnOOM", "from a batch and a size to a list of batches")
        self.min_size = whole_number(min_size, "min_size", "MicroBatchOnOOM", unit="samples")
        self.size: int | None = None
        self._fit: _Fit | None = None

    # -- life cycle ----------------------------------------------------------------------------------------------------

    def setup(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", stage: str) -> None:
        """Refuses set-ups in which one rank cannot repeat a step alone."""
        refuse_other_trainers(self, trainer)
        if stage == "fit":
            _refuse(trainer, pl_module)

    def on_fit_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Wraps the training step."""
        _refuse_module(trainer, pl_module)
        _warn_about_mixing_layers(pl_module)
        original = pl_module.training_step
        self._fit = fit = _Fit(MicrobatchLogs(pl_module))

        @functools.wraps(original)
        def training_step(batch: Any, *args: Any, **kwargs: Any) -> Any:
            # Others call it too: validation steps, and replays of a step.
            if fit.logs.keeps or not trainer.training or not torch.is_grad_enabled():
                return original(batch, *args, **kwargs)
            return self._run(fit, pl_module, lambda part: original(part, *args, **kwargs), batch)

        patches = Patches.of(trainer)
        patches.replace(pl_module, "training_step", training_step)
        patches.at_end(self._end)
        if trainer.world_size > 1:
            _guard_all_gather(patches, pl_module, fit.logs)

    def _end(self) -> None:
        self._fit = None

    def state_dict(self) -> dict[str, Any]:
        """The size that fits."""
        return {"size": self.size}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues with the size that fitted."""
        size = checked_state(state_dict, {"size": or_none(POSITIVE_COUNT)}, "MicroBatchOnOOM")["size"]
        self.size = None if size is None else max(size, self.min_size)

    # -- one micro-batch -----------------------------------------------------------------------------------------------

    def on_train_batch_start(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", batch: Any, batch_idx: int
    ) -> None:
        """With the first batch: determines how microbatches are weighted, and whether batches can be split at all."""
        assert self._fit is not None
        if self._fit.weighting is not None:
            return
        if self.split is None:
            num_samples(batch)
        self._fit.weighting = weighting_of(
            trainer,
            batch,
            lambda: bool(trainer.strategy.broadcast(batch_tokens.shifts_labels_inside(pl_module, batch))),
        )

    def _run(self, fit: "_Fit", pl_module: "pl.LightningModule", step: Callable[[Any], Any], batch: Any) -> Any:
        fit.logs.keeps = True
        try:
            output, shares = self._attempt_until_it_fits(fit, pl_module, step, batch)
        finally:
            fit.logs.keeps = False
        fit.logs.flush(shares)
        return output

    def _attempt_until_it_fits(
        self, fit: "_Fit", pl_module: "pl.LightningModule", step: Callable[[Any], Any], batch: Any
    ) -> tuple[Any, list[float]]:
        restore_module = keep_module(pl_module)
        random_state = RandomState.capture(pl_module.device)
        sizes_tried: list[int] = []
        while True:
            fit.logs.clear()
            microbatches = self._split(batch, self.size)
            assert fit.weighting is not None
            shares = [1.0] if len(microbatches) == 1 else microbatch_shares(microbatches, fit.weighting)
            try:
                return run_microbatches(pl_module, step, microbatches, shares, fit.logs), shares
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                self._make_smaller(pl_module, microbatches, batch, sizes_tried, error)
                forget_attempt(error)
            restore_module()
            free_cached_memory(pl_module.device)
            random_state.restore()

    def _split(self, batch: Any, size: int | None) -> list[Microbatch]:
        if size is None:
            return [Microbatch(batch, 0)]
        return split_batch(batch, size) if self.split is None else split_by(self.split, batch, size)

    def _make_smaller(
        self,
        pl_module: "pl.LightningModule",
        microbatches: list[Microbatch],
        batch: Any,
        sizes_tried: list[int],
        error: Exception,
    ) -> None:
        """Halves the size, or raises the error with advice."""
        samples = max(microbatch.samples for microbatch in microbatches)
        if samples == 0:
            samples = num_samples(batch) if self.split is None else len(self.split(batch, 1))
        sizes_tried.append(samples)
        smaller = smaller_size(samples, self.min_size)
        if smaller is None:
            error.add_note(advice_when_out_of_memory(sizes_tried, self.min_size))
            raise error
        self.size = smaller
        # From the rank itself: another one may need no smaller microbatches.
        text = f"MicroBatchOnOOM: out of memory with {samples} samples; from now on at most {smaller} at a time."
        several = pl_module.trainer.world_size > 1
        lightning_logger().info(rank_prefixed_message(text, pl_module.global_rank if several else None))


@dataclass
class _Fit:
    """What one fit needs."""

    logs: MicrobatchLogs  # keeps values while a training step runs
    weighting: Weighting | None = None  # of microbatches; from the first batch on


def _guard_all_gather(patches: Patches, pl_module: "pl.LightningModule", logs: MicrobatchLogs) -> None:
    def all_gather(*args: Any, **kwargs: Any) -> Any:
        if logs.keeps:
            raise MisconfigurationException(
                "The training step called self.all_gather. MicroBatchOnOOM cannot repeat it on one rank alone: the"
                " others would not take part, and wait forever. Gather outside of the training step, or remove the"
                " callback."
            )
        return method.original(*args, **kwargs)

    method = patches.replace(pl_module, "all_gather", all_gather)


def _refuse(trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
    strategy = trainer.strategy
    known = isinstance(strategy, SingleDeviceStrategy | DDPStrategy) and not is_pipelined(trainer)
    if not known or strategy.handles_gradient_accumulation:
        raise MisconfigurationException(
            f"MicroBatchOnOOM works on a single device and with DDP, not with {type(strategy).__name__}: a rank that"
            " repeats a forward alone would wait for the others forever. Find a batch size that fits on one device and"
            " remove the callback."
        )
    if not pl_module.automatic_optimization:
        raise MisconfigurationException(
            "MicroBatchOnOOM needs automatic optimization; with automatic_optimization=False the module runs its own"
            " backwards. Remove the callback or turn automatic optimization on."
        )
    if is_param_in_hook_signature(pl_module.training_step, "dataloader_iter", explicit=True):
        raise MisconfigurationException(
            "MicroBatchOnOOM cannot repeat a training_step(dataloader_iter), which takes the batch out of the loader"
            " itself. Use training_step(batch, batch_idx)."
        )
    if sum(isinstance(callback, MicroBatchOnOOM) for callback in private_api.callbacks_of(trainer)) > 1:
        raise MisconfigurationException("There are two MicroBatchOnOOM callbacks; remove one of them.")


def _refuse_module(trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
    if any(isinstance(optimizer, LBFGS) for optimizer in trainer.optimizers):
        raise MisconfigurationException(
            "MicroBatchOnOOM cannot be used with LBFGS, which evaluates the loss several times in one step. Use another"
            " optimizer, or remove the callback."
        )
    if isinstance(trainer.strategy, DDPStrategy) and getattr(trainer.strategy.model, "static_graph", False):
        raise MisconfigurationException(
            "MicroBatchOnOOM cannot be used with DDPStrategy(static_graph=True), which expects the same number of"
            " backward passes in every step. Leave static_graph out, or remove the callback."
        )
    hooked = [name for name, p in pl_module.named_parameters() if private_api.has_gradient_hooks(p)]
    if hooked:
        raise MisconfigurationException(
            f"MicroBatchOnOOM cannot be used with gradient hooks on parameters ({listed(hooked)}):"
            " they would run on every microbatch and once more on the sum. Change"
            " gradients in on_after_backward or on_before_optimizer_step instead of Tensor.register_hook or"
            " register_post_accumulate_grad_hook."
        )
    synced = [name for name, module in pl_module.named_modules() if isinstance(module, nn.SyncBatchNorm)]
    if synced and trainer.world_size > 1:
        raise MisconfigurationException(
            f"MicroBatchOnOOM cannot be used with SyncBatchNorm ({listed(synced)}) on several ranks: it reduces"
            " in every forward, and a rank that repeats one alone waits for the other ranks forever. Use a"
            " normalisation of single samples (GroupNorm, LayerNorm), or remove the callback."
        )


def _warn_about_mixing_layers(pl_module: "pl.LightningModule") -> None:
    mixing = [name for name, module in pl_module.named_modules() if "BatchNorm" in type(module).__name__]
    if mixing:
        rank_zero_warn(
            f"MicroBatchOnOOM: {len(mixing)} layers ({listed(mixing)})"
            " normalise over the samples of a batch. If a micro-batch is split, they normalise over each part of it,"
            " and the gradient is not that of the whole. GroupNorm and LayerNorm do not mix samples."
        )
