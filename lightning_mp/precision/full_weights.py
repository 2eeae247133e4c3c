"""Plugins that train fp32 weights: they refuse others, and go on from the masters of a run that had 16-bit weights."""

from typing import Any

from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.optim import Optimizer

from lightning_mp.precision.base import GradientStepPrecision
from lightning_mp.precision.masters.float32_load import MastersLoad
from lightning_mp.precision.masters.loaded_masters import (
    MASTERS_KEY,
    MastersIntoWeights,
    drop_stale_masters,
    refuse_damaged_masters,
    warn_about_rounded_weights,
)
from lightning_mp.precision.trainable_weights import TrainedWeights


class FullWeightsPrecision(GradientStepPrecision):
    """Base class of the plugins without masters; users take ``AutocastPrecision``.

    A checkpoint of ``MasterWeightsPrecision`` is resumed without loss: its 16-bit weights become the fp32 masters that
    its optimizer states hold.
    """

    _optimizer_hooks: tuple[MastersIntoWeights | TrainedWeights | MastersLoad, ...] = ()

    def connect(
        self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]
    ) -> tuple[nn.Module, list[Optimizer], list[Any]]:
        """Starts telling outcomes and checks what is trained, if this is a fit; masters in checkpoints become weights.

        Raises:
            MisconfigurationException: if trainable weights are fp16.
        """
        result = super().connect(model, optimizers, lr_schedulers)
        self._leave_optimizers()
        assert self._trainer is not None
        if self._trainer.state.fn == TrainerFn.FITTING:
            into_weights = [MastersIntoWeights(optimizer) for optimizer in optimizers]
            self._optimizer_hooks = tuple(into_weights)
            for optimizer in optimizers:
                self._check_trained(optimizer)
            if isinstance(self._trainer.strategy, ModelParallelStrategy):
                load = MastersLoad(self._trainer.strategy, self._trainer.lightning_module, into_weights)
                self._optimizer_hooks += (load,)
        return result

    def _check_trained(self, optimizer: Optimizer) -> None:
        assert self._trainer is not None
        module, plugin = self._trainer.lightning_module, f"{type(self).__name__}({self.precision!r})"
        trained = TrainedWeights(plugin, optimizer, lambda: {p: name for name, p in module.named_parameters()})
        self._optimizer_hooks += (trained,)

    def _connect_late(self, optimizer: Optimizer) -> None:
        self._optimizer_hooks += (MastersIntoWeights(optimizer),)
        self._check_trained(optimizer)

    def teardown(self) -> None:
        """Takes every wrapper away; Lightning calls this at the end and after exceptions."""
        self._leave_optimizers()
        super().teardown()

    def _leave_optimizers(self) -> None:
        hooked, self._optimizer_hooks = self._optimizer_hooks, ()
        for hooks in hooked:
            hooks.remove()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Reads the scaler's state; leaves out masters that are older than the checkpoint's weights."""
        refuse_damaged_masters(checkpoint, type(self).__name__)
        super().on_load_checkpoint(checkpoint)
        drop_stale_masters(checkpoint)
        assert self._trainer is not None
        taken = any(isinstance(hooks, MastersIntoWeights) and hooks.taken for hooks in self._optimizer_hooks)
        saved_in = checkpoint.get(MASTERS_KEY, "32-true")
        if self._trainer.strategy.restore_checkpoint_after_setup and saved_in != "32-true" and not taken:
            warn_about_rounded_weights(saved_in)
