"""Micro-batches that are halved when memory runs out, with the same gradient."""

from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import nn
from torch.optim import LBFGS
from typing_extensions import override

from lightning_mp.ground.core import private_tensor_api
from lightning_mp.ground.core.arguments import function_or_none, whole_number
from lightning_mp.ground.core.foreign_trainers import refuse_other_trainers
from lightning_mp.ground.core.messages import listed
from lightning_mp.ground.core.saved_state import POSITIVE_COUNT, Schema, checked_state, or_none
from lightning_mp.ground.core.settings_repr import SettingsRepr
from lightning_mp.ground.core.trainer_ranks import is_pipelined
from lightning_mp.training.accumulation.batch_split import SplitFunction, SplitState
from lightning_mp.training.accumulation.controller import AccumulationController
from lightning_mp.training.accumulation.split_step import SplitStep

_FORM = Schema('"mean" or "sum"', lambda value: value in ("mean", "sum"))


class MicroBatchOnOOM(SettingsRepr, Callback):
    """Halves the micro-batch when memory runs out in forward or backward, and continues with the same gradient.

    The micro-batch is then split into parts, which run one after the other as micro-batches of the same window. Each
    part is weighted by what its loss is a mean over (:doc:`/accumulation`), or by its samples if that is unknown, so
    that together they have the gradient of the whole, up to rounding. Before the first part runs, the losses of some
    samples and of their halves are compared: a loss that is neither their mean nor their sum (in-batch negatives, dice
    or a variance over the batch) is refused with the numbers, and a message shows a difference that may be rounding. If
    it is their sum, micro-batches have equal weights from then on.

    A failed attempt has no side effects: buffers, plain attributes and metrics of the module, logged values and random
    numbers are restored, gradients are zeroed, and earlier micro-batches of the window are computed again from their
    batches. The size that fits is used for all following micro-batches of this rank; rank 0's is saved in the
    checkpoint. Set :attr:`size` to None to start over, or to a number to split from the start.

    Parts run inside Lightning's closure. Batch indices, ``on_train_batch_*``, ``max_steps``, budgets, checkpoints
    and the optimizer see whole batches:

    - A micro-batch that fits is bit-identical to a run without the callback whose micro-batches weigh the same way.
    - ``on_before_backward`` runs for each part, ``on_after_backward`` once, after the last one, with a gradient that is
      not yet divided by the item count; both run again for micro-batches that are computed again.
    - Values given to ``self.log`` are logged once, as the mean over parts by their weights, or by ``batch_size=`` where
      that was given (sums, maxima and minima by ``reduce_fx``; a metric's value of the step by samples). Other outputs
      of the step are detached; rows are concatenated, numbers averaged.
    - Under DDP each rank repeats alone; ranks may use different sizes. Gradients are reduced once per window; after
      the last backward, and during it for batches whose shapes have fitted before. If such a backward runs out of
      memory, the run ends with a note.
    - Layers that normalise over the batch (BatchNorm) see parts, of two samples or more; a warning says so. Dropout
      masks of parts differ from those of the whole.

    It does not cover the optimizer step itself, validation, collectives inside the training step, and steps that
    change their batch in place.

    Args:
        split: a function of a batch and a size that returns a list of batches of at most that many samples each, for
            batches that are not made of tensors whose first dimension is the sample. ``len(split(batch, 1))`` must be
            the number of samples.
        min_size: the size is not halved below this. If that does not fit, the original error is raised, with a note of
            the sizes tried and what else to do.

    Raises:
        ValueError: if an argument is not valid.
        MisconfigurationException: at set-up, under FSDP, ModelParallel, DeepSpeed or any other sharded strategy, with
            manual optimization, LBFGS, a ``dataloader_iter`` step, hooks on parameters after their gradient was
            accumulated, or DDP with ``static_graph``; on several ranks also with SyncBatchNorm, ``dist_sync_on_step``
            metrics and other gradient hooks on parameters; with the first batch, if it cannot be split; with the first
            one that does not fit, if losses do not add up, the step changes frozen parameters, or the optimizer
            evaluates the loss again.

    Example:
        >>> from lightning_mp import MicroBatchOnOOM
        >>> callback = MicroBatchOnOOM(min_size=2)
        >>> callback.size is None  # nothing was split yet
        True
    """

    def __init__(self, split: SplitFunction | None = None, min_size: int = 1) -> None:
        self.split = function_or_none(split, "split", "MicroBatchOnOOM", "from a batch and a size to a list of batches")
        self.min_size = whole_number(min_size, "min_size", "MicroBatchOnOOM", unit="samples")
        self._state = SplitState(self.split, self.min_size)

    @property
    def size(self) -> int | None:
        """Largest number of samples in a part; None as long as everything has fitted."""
        return self._state.size

    @size.setter
    def size(self, size: int | None) -> None:
        self._state.size = size

    # -- life cycle ----------------------------------------------------------------------------------------------------

    @override
    def setup(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", stage: str) -> None:
        """Has losses weigh."""
        refuse_other_trainers(self, trainer)
        if stage == "fit":
            # Parts are weighted also where other callbacks only count; the controller settles that as a fit starts.
            AccumulationController.attach(trainer).settings.weigh_losses()

    @override
    def on_fit_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Lets batches that do not fit run in parts; refuses what a rank cannot repeat alone."""
        _refuse_what_cannot_be_repeated(trainer, pl_module)
        mixing = [name for name, module in pl_module.named_modules() if "BatchNorm" in type(module).__name__]
        self._state.least = 2 if mixing else 1
        if mixing:
            _warn_about_mixing_layers(mixing)
        # Not in `setup`, where callbacks request their windows.
        is_new = AccumulationController.attach(trainer).settings.weighting is None
        controller = AccumulationController.weigh_by_loss(trainer)
        if is_new:
            controller.on_fit_start(trainer, pl_module)
        assert controller.weighting is not None
        if controller.weighting.weight_by is None and getattr(trainer.precision_plugin, "weight_by", "loss") is None:
            controller.weigh_equally("the precision plugin has weight_by=None")
        SplitStep(trainer, pl_module, controller, self._state, owner=self)

    @override
    def state_dict(self) -> dict[str, Any]:
        """The size that fits, and how losses add up."""
        return {"size": self._state.size, "form": self._state.form}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues with the size that fitted."""
        kinds = {"size": or_none(POSITIVE_COUNT), "form": or_none(_FORM)}
        state = checked_state(state_dict, kinds, "MicroBatchOnOOM")
        self._state.form, size = state["form"], state["size"]
        self._state.size = None if size is None else max(size, self.min_size)


def _refuse_what_cannot_be_repeated(trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
    strategy, name, several = trainer.strategy, type(trainer.strategy).__name__, trainer.world_size > 1
    is_known = isinstance(strategy, SingleDeviceStrategy | DDPStrategy) and not is_pipelined(trainer)
    takes_iterator = is_param_in_hook_signature(pl_module.training_step, "dataloader_iter", explicit=True)
    parameters, modules = list(pl_module.named_parameters()), list(pl_module.named_modules())
    after = [n for n, p in parameters if private_tensor_api.has_hooks_after_accumulation(p)]
    hooked = [n for n, p in parameters if private_tensor_api.has_gradient_hooks(p)]
    waiting = [n for n, m in modules if isinstance(m, nn.SyncBatchNorm) or getattr(m, "dist_sync_on_step", False)]
    reasons: dict[str, object] = {
        f"{name}: it works on a single device and with DDP, not with {name}: a rank that repeats a forward alone would"
        " wait for the others forever. Use a batch size that fits.": not is_known
        or strategy.handles_gradient_accumulation,
        "automatic_optimization=False, as the module runs its own backwards then. Turn it on, or remove the"
        " callback.": not pl_module.automatic_optimization,
        "training_step(dataloader_iter), which takes the batch out of the loader itself, so it cannot be repeated."
        " Use training_step(batch, batch_idx).": takes_iterator,
        "LBFGS, which evaluates the loss several times in one step. Use another optimizer, or remove the"
        " callback.": any(isinstance(optimizer, LBFGS) for optimizer in trainer.optimizers),
        f"register_post_accumulate_grad_hook ({listed(after)}): such a hook would run on the gradient of each part."
        " Change gradients in on_before_optimizer_step instead.": after,
        "DDPStrategy(static_graph=True), which expects the same number of backward passes in every step. Leave"
        " static_graph out, or remove the callback.": getattr(strategy.model, "static_graph", False),
        f"gradient hooks on parameters ({listed(hooked)}) on several ranks: they would run once more when gradients"
        " are reduced. Change gradients in on_before_optimizer_step instead of Tensor.register_hook.": several
        and hooked,
        f"SyncBatchNorm or metrics with dist_sync_on_step=True on several ranks ({listed(waiting)}): a rank that"
        " repeats a forward alone waits for the others forever. Use GroupNorm or LayerNorm, and leave that argument"
        " out.": several and waiting,
    }
    for reason, applies in reasons.items():
        if applies:
            raise MisconfigurationException(f"MicroBatchOnOOM cannot be used with {reason}")


def _warn_about_mixing_layers(names: list[str]) -> None:
    rank_zero_warn(
        f"MicroBatchOnOOM: {len(names)} layers ({listed(names)}) normalise over the samples of a batch; in a split one,"
        " over those of each part, two or more, so the gradient is another. GroupNorm and LayerNorm do not mix samples."
    )
