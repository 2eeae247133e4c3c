"""``on_train_batch_start`` returns -1 inside an accumulation window: the window ends there, with its optimizer step."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_mp.accumulation.accumulate_grad_batches import AccumulateGradBatches
from lightning_mp.accumulation.partial_state import mean_over_ranks, why_gradients_are_elsewhere
from lightning_mp.core import private_loop_api
from lightning_mp.core.patches import Patches

__all__ = ["DeclinedBatches"]


class DeclinedBatches:
    """Makes the step of an open window when the module declines the next micro-batch and the rest of its epoch.

    Lightning leaves the epoch without a step. The gradient so far would go into a window of the next epoch, or be lost
    where there is none. Here it is reduced over ranks, which the last micro-batch would have done, and stepped with.
    Where a strategy does not expose it, an error says so.

    Args:
        trainer: the Trainer that fits.
        pl_module: its module.
        is_open: whether a window was open before the micro-batch at hand.
        carries_over: whether the window is to go on in the next epoch.
        close: called when the window is closed.
    """

    def __init__(
        self,
        trainer: "pl.Trainer",
        pl_module: "pl.LightningModule",
        is_open: Callable[[], bool],
        carries_over: Callable[[], bool],
        close: Callable[[], None],
    ) -> None:
        self._trainer = trainer
        self._pl_module = pl_module
        self._is_open = is_open
        self._carries_over = carries_over
        self._close = close
        name = "on_train_batch_start"
        has_own = getattr(type(pl_module), name) is not getattr(pl.LightningModule, name) or name in vars(pl_module)
        self._method = Patches.of(trainer).replace(pl_module, name, self._ask) if has_own else None

    def _ask(self, *args: Any, **kwargs: Any) -> Any:
        assert self._method is not None
        was_open = self._is_open()
        response = self._method.original(*args, **kwargs)
        if response == -1 and was_open and not self._carries_over():
            reason = why_gradients_are_elsewhere(self._trainer)
            if reason:
                rank_zero_warn(
                    f"on_train_batch_start returned -1 inside an accumulation window, which continues in the next"
                    f" epoch or, after the last one, is lost: {reason} Return -1 where a window opens, or use"
                    " DDPStrategy."
                )
            else:
                self._step()
        return response

    def _step(self) -> None:
        means = mean_over_ranks(self._pl_module)
        if not means:
            self._close()  # no micro-batch of it had a loss
            return
        for name, gradient in means.items():
            self._pl_module.get_parameter(name).grad = gradient
        batch_idx = self._trainer.fit_loop.epoch_loop.batch_idx
        planned = int(self._trainer.accumulate_grad_batches)
        self._trainer.accumulate_grad_batches = AccumulateGradBatches(
            planned, batch_idx=batch_idx, opens=False, closes=True
        )
        private_loop_api.step_without_a_batch(self._trainer, batch_idx, self._nothing_to_do)
        self._close()

    def _nothing_to_do(self) -> Tensor:
        return torch.zeros((), device=self._pl_module.device)
