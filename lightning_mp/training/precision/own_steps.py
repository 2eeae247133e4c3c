"""True gradients for a module's own ``optimizer_step`` that calls its closure itself, before the optimizer's step."""

from collections.abc import Callable
from typing import Any, Self

import lightning.pytorch as pl
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch.optim import Optimizer

from lightning_mp.ground.core import private_optimizer_api
from lightning_mp.ground.core.patches import Patches
from lightning_mp.training.optimizer_step.gradient_observers import overrides
from lightning_mp.training.precision.gradient_step import GradientStep, show_true_gradients


class OwnClosure:
    """The closure that such a module gets. A step that is handed it as it is calls :meth:`run`, which shows nothing."""

    def __init__(self, closure: Callable[[], Any], before: Callable[[], None], after: Callable[[], None]) -> None:
        self._closure, self._before, self._after = closure, before, after

    def run(self) -> Any:
        """Lightning's closure: forward and backward of the batch."""
        self._before()
        return self._closure()

    def __call__(self) -> Any:
        """The same for the module, whose code may read or clip gradients next."""
        result = self.run()
        self._after()
        return result


class OwnSteps:
    """Of one fit: the steps whose gradients the module has been shown and not stepped with yet."""

    def __init__(self, trainer: "pl.Trainer", begin: Callable[[Optimizer], GradientStep]) -> None:
        self._begin = begin
        self._shown: dict[Optimizer, GradientStep] = {}
        self._method = Patches.of(trainer).replace(trainer.lightning_module, "optimizer_step", self._step)

    @classmethod
    def of(
        cls,
        trainer: "pl.Trainer",
        begin: Callable[[Optimizer], GradientStep],
        scaler: "torch.amp.GradScaler | None",
    ) -> Self | None:
        """None where the module leaves its step to Lightning. ``begin`` creates the step of an optimizer."""
        module = trainer.lightning_module
        if not module.automatic_optimization or not overrides(module, pl.LightningModule, "optimizer_step"):
            return None
        steps = cls(trainer, begin)
        if scaler is not None:
            steps._take_unscale(trainer, scaler)
        return steps

    def _step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any = None) -> None:
        inner = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        own = OwnClosure(closure, lambda: self._hide(inner), lambda: self._show(inner))
        self._method.original(epoch, batch_idx, optimizer, own)

    def _show(self, optimizer: Optimizer) -> None:
        self._shown[optimizer] = step = self._begin(optimizer)
        show_true_gradients(step)

    def _hide(self, optimizer: Optimizer) -> None:
        """The module has not stepped: another backward may add to its gradients."""
        step = self._shown.pop(optimizer, None)
        if step is not None:
            step.epilogue.make_raw()

    def shown(self, optimizer: Optimizer) -> GradientStep | None:
        """A step whose true gradients the module has been shown."""
        return self._shown.get(optimizer)

    def take(self, optimizer: Optimizer) -> GradientStep | None:
        """The same, for its end."""
        return self._shown.pop(optimizer, None)

    def _take_unscale(self, trainer: "pl.Trainer", scaler: "torch.amp.GradScaler") -> None:
        """``scaler.unscale_``, as in torch's recipe, finds gradients that are unscaled already."""

        def unscale_(optimizer: Any) -> None:
            inner = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
            step = self._shown.get(inner)
            if step is None or private_optimizer_api.unscaled_found_inf(scaler, [optimizer, inner]) is not None:
                method.original(optimizer)
            else:
                private_optimizer_api.set_unscaled(scaler, optimizer, step.epilogue.found_inf)

        method = Patches.of(trainer).replace(scaler, "unscale_", unscale_)
