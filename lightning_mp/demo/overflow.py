"""A deliberate overflow, to see what becomes of it."""

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.utils.hooks import RemovableHandle

__all__ = ["InjectOverflow"]


class InjectOverflow(Callback):
    """Makes one number of one parameter's gradient infinite, once.

    On rank 0 only: the reduction of the gradients spreads it to the others, and all ranks must skip the step alike.

    Args:
        step_index: The optimizer step, counted from 0, skipped ones included.
        parameter_name: Name within the LightningModule.

    Raises:
        ValueError: At the start, if the module has no such parameter.
    """

    def __init__(self, step_index: int, parameter_name: str) -> None:
        self.step_index = step_index
        self.parameter_name = parameter_name
        self._hook: RemovableHandle | None = None

    def on_fit_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Waits at the parameter."""
        parameters = dict(pl_module.named_parameters())
        if self.parameter_name not in parameters:
            raise ValueError(
                f"InjectOverflow: the module has no parameter {self.parameter_name!r}; it has {', '.join(parameters)}."
            )

        def spoil(gradient: Tensor) -> Tensor:
            if trainer.global_step != self.step_index or not trainer.is_global_zero:
                return gradient
            spoilt = gradient.clone()
            spoilt.view(-1)[0] = torch.inf
            return spoilt

        self._hook = parameters[self.parameter_name].register_hook(spoil)

    def on_fit_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Goes away."""
        if self._hook is not None:
            self._hook.remove()
