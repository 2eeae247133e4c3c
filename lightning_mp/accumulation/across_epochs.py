"""An accumulation window that goes on in the next epoch."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_mp.core import private_loop_api
from lightning_mp.core.patches import Patches

__all__ = ["CarryOverEpochs", "another_epoch_follows"]


def another_epoch_follows(trainer: "pl.Trainer") -> bool:
    """Whether this epoch is not the last of ``max_epochs``."""
    return trainer.max_epochs in (None, -1) or trainer.current_epoch + 1 < trainer.max_epochs


class CarryOverEpochs:
    """Keeps Lightning from making an optimizer step at the end of an epoch while a window is open.

    Lightning steps with the last micro-batch of every epoch. While that micro-batch runs, the epoch is made to look
    endless. When it is over the epoch ends as always:
    schedulers that count epochs step, validation runs, ``on_train_epoch_end`` is called. Two things that Lightning does
    there, in the belief that a step was made, are held back: it zeroes the gradients for validation, and it counts a
    step for the x axis of loggers.

    Args:
        trainer: the Trainer that fits.
        pl_module: its module.
        is_open: whether a window is open after the last micro-batch.

    Raises:
        MisconfigurationException: with a ``ReduceLROnPlateau`` per step, which Lightning steps at the end of an epoch,
            too.
    """

    def __init__(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", is_open: Callable[[], bool]) -> None:
        if any(config.interval == "step" and config.reduce_on_plateau for config in trainer.lr_scheduler_configs):
            raise MisconfigurationException(
                "AccumulationScheduler(carry_over=True) cannot be used with ReduceLROnPlateau at interval='step',"
                " which Lightning steps at the end of every epoch as well. Use interval='epoch', or leave carry_over"
                " out."
            )
        self._trainer = trainer
        self._is_open = is_open
        self._hidden: tuple[float, bool] | None = None
        self._zero_grad = Patches.of(trainer).replace(
            pl_module, "on_validation_model_zero_grad", self._zero_grad_unless_open
        )

    def hide(self) -> None:
        """The micro-batch that begins is the last of its epoch, and its window stays open."""
        self._hidden = private_loop_api.replace_end_of_epoch(self._trainer, (float("inf"), False))

    def show(self) -> None:
        """If an end was hidden: the micro-batch is over, and the epoch ends now."""
        if self._hidden is None:
            return
        self._show()
        self._trainer.fit_loop.epoch_loop.update_lr_schedulers("epoch", update_plateau_schedulers=False)
        private_loop_api.take_back_a_logged_step(self._trainer)

    def detach(self) -> None:
        """Leaves everything as it was."""
        self._show()

    def _show(self) -> None:
        if self._hidden is not None:
            private_loop_api.replace_end_of_epoch(self._trainer, self._hidden)
            self._hidden = None

    def _zero_grad_unless_open(self, *args: Any, **kwargs: Any) -> Any:
        return None if self._is_open() else self._zero_grad.original(*args, **kwargs)
