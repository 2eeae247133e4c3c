"""What backwards of scaled losses leave for the next step of an optimizer: whether they overflowed, and that they were.

Hooks and ``training_step`` run between a backward and the step. A hook that replaces or clears non-finite gradients
hides an overflow: the loss scale would stay where it is, and training with it. And a module that steps by itself may
call ``loss.backward()``, or step twice after one backward: the step would divide gradients by a scale that they were
never multiplied by, or divide them again.
"""

from collections.abc import Iterable
from typing import Any, Self

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor
from torch.optim import Optimizer

from lightning_mp.ground.core.patches import Patches
from lightning_mp.ground.core.private_trainer_api import callbacks_of
from lightning_mp.training.gradients import gradient_ops
from lightning_mp.training.optimizer_step.gradient_observers import overrides
from lightning_mp.training.optimizer_step.manual_scale import GradientsBeforeBackward, gradients_of, has_new_gradients


class ScaledBackwards:
    """Of one fit with a loss scale; empty again for each optimizer once it has stepped."""

    def __init__(self, trainer: "pl.Trainer", scaler: "torch.amp.GradScaler", *, by_hand: bool, reads: bool) -> None:
        self._trainer = trainer
        self._by_hand = by_hand  # the module steps by itself
        self._reads = reads  # gradients, before hooks that may write them
        self._found_inf: dict[Optimizer, Tensor] = {}
        self._with_scaled_gradients: set[Optimizer] = set()
        self._is_scaled_by_hand = False
        self._before: GradientsBeforeBackward = {}  # what earlier batches have left, until the backward ends
        if by_hand:
            self._scale = Patches.of(trainer).replace(scaler, "scale", self._scale_by_hand)

    @classmethod
    def of(cls, trainer: "pl.Trainer", plugin: Precision, scaler: "torch.amp.GradScaler") -> Self | None:
        """Starts noting; None where Lightning scales every loss and no hook may write gradients."""
        module = trainer.lightning_module
        by_hand = not module.automatic_optimization or overrides(module, pl.LightningModule, "optimizer_step")
        reads = may_write_after_backward(callbacks_of(trainer), module)
        if not (by_hand or reads):
            return None
        backwards = cls(trainer, scaler, by_hand=by_hand, reads=reads)
        Patches.of(trainer).around(plugin, "post_backward", before=backwards.note)
        return backwards

    def scale(self, scaler: "torch.amp.GradScaler", loss: Tensor) -> Tensor:
        """The plugin's own scaling of a loss, before its backward."""
        if not self._by_hand:
            return scaler.scale(loss)
        self._before = {optimizer: gradients_of(optimizer) for optimizer in self._trainer.optimizers}
        scaled: Tensor = self._scale.original(loss)
        return scaled

    def _scale_by_hand(self, outputs: Any) -> Any:
        """torch's recipe, ``scaler.scale(loss).backward()``: it is not observed, so all gradients count as scaled."""
        self._is_scaled_by_hand = True
        return self._scale.original(outputs)

    def note(self) -> None:
        """After a backward, before the hooks that may change its gradients."""
        optimizers: Iterable[Optimizer] = self._trainer.optimizers
        if self._by_hand:
            before, self._before = self._before, {}
            optimizers = [o for o in optimizers if has_new_gradients(o, before.get(o, {}))]
            self._with_scaled_gradients.update(optimizers)
        if self._reads:
            for optimizer in optimizers:
                self._note_overflow(optimizer)

    def _note_overflow(self, optimizer: Optimizer) -> None:
        gradients = [p.grad for p in gradient_ops.parameters_with_gradient(optimizer) if p.grad is not None]
        if gradients:
            shards = [gradient_ops.local_shard(g.resolve_conj() if g.is_conj() else g) for g in gradients]
            found_inf = gradient_ops.any_overflow(gradient_ops.shard_norms(shards))
            before = self._found_inf.get(optimizer)
            self._found_inf[optimizer] = found_inf if before is None else torch.maximum(before, found_inf)

    def trust(self, optimizer: Optimizer) -> None:
        """An optimizer that was created after its first backward."""
        self._with_scaled_gradients.add(optimizer)

    def has_scaled(self, optimizer: Optimizer) -> bool | None:
        """Whether gradients of an optimizer on this rank come from a scaled loss; None where Lightning scales it."""
        if not self._by_hand:
            return None
        return self._is_scaled_by_hand or optimizer in self._with_scaled_gradients

    def found_inf(self, optimizer: Optimizer) -> list[Tensor]:
        """Scalar tensors, 1.0 if gradients of an optimizer were not finite before hooks could change them."""
        return [self._found_inf[optimizer]] if optimizer in self._found_inf else []

    def forget(self, optimizer: Optimizer) -> None:
        """The optimizer has stepped, or skipped its step."""
        self._found_inf.pop(optimizer, None)
        self._with_scaled_gradients.discard(optimizer)


def may_write_after_backward(callbacks: Iterable[Callback], module: "pl.LightningModule") -> bool:
    """Whether foreign code in ``on_after_backward`` may change gradients; callbacks of this package only read."""
    if overrides(module, pl.LightningModule, "on_after_backward"):
        return True
    hooks: list[Any] = [c.on_after_backward for c in callbacks if overrides(c, Callback, "on_after_backward")]
    return any(hook is not None and not str(hook.__module__).startswith("lightning_mp.") for hook in hooks)


def unscaled_gradients(optimizer: Optimizer, plugin: object, scale: float) -> RuntimeError:
    """The error of a step for which no rank has scaled a loss since the last one."""
    return RuntimeError(
        f"{plugin}: the gradients of {type(optimizer).__name__} come from a loss that was not scaled by {scale:.10g},"
        " or its last step has used them. Before each step call self.manual_backward(loss) or the closure, not"
        " loss.backward(), or scale the loss by self.trainer.precision_plugin.scaler.scale(loss)."
    )
