"""Optimizers that train one set of weights and evaluate another: schedule-free ones, and others with train and eval."""

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.rank_zero import rank_zero_info
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from torch import nn
from torch.optim import Optimizer

from lightning_mp.ground.core.messages import listed
from lightning_mp.ground.core.patches import Patches
from lightning_mp.ground.core.private_trainer_api import callbacks_of
from lightning_mp.ground.modules.norms import BATCH_NORMS
from lightning_mp.training.optimizers.parts import parts_of


def has_evaluated_weights(optimizer: Optimizer) -> bool:
    """Whether an optimizer evaluates other weights than it trains: it has the methods ``train`` and ``eval``."""
    parts = parts_of(optimizer)
    if parts != [optimizer]:
        return any(map(has_evaluated_weights, parts))
    return all(callable(getattr(optimizer, name, None)) for name in ("train", "eval"))


class ScheduleFreeMode:
    """Calls ``train()`` and ``eval()`` of a fit's optimizers wherever a hand-written loop must call them.

    A schedule-free optimizer computes gradients at ``y`` and is evaluated at ``x``, the average of its iterates. Only
    one of them is in the weights:

    .. code-block:: text

        start of training                                 train()   y
        validation during the fit                         eval()    x, then train() again
        a checkpoint, from any caller                     eval()    x, then train() again
        end of the fit, also by an exception              eval()    x, or the average of WeightAveraging

    Switching is the optimizer's own arithmetic, which rounds. A run continues from the same bits after it has saved a
    checkpoint as one that resumes from this checkpoint.

    References:
        Defazio et al., "The Road Less Scheduled", 2024, section 2, https://arxiv.org/abs/2405.15682
    """

    def __init__(self, trainer: "pl.Trainer", optimizers: Sequence[Optimizer]) -> None:
        self._trainer = trainer
        self._is_fitting = False
        self._is_training = False
        self._is_attached = False
        for optimizer in optimizers:
            self.join(optimizer)

    def join(self, optimizer: Optimizer) -> None:
        """Takes an optimizer of the fit, before its first step."""
        if not has_evaluated_weights(optimizer):
            return
        if self._is_training:
            _call("train", optimizer)
        if not self._is_attached:
            self._is_attached = True
            _warn_about_batch_norm(self._trainer.lightning_module, optimizer)
            self._attach(self._trainer.lightning_module)

    def _attach(self, module: "pl.LightningModule") -> None:
        patches, trainer = Patches.of(self._trainer), self._trainer
        patches.around(module, "on_train_start", self._begin)
        patches.around(module, "on_validation_model_eval", self._to_evaluated)
        patches.around(trainer.strategy, "on_validation_end", after=self._to_trained)  # when all callbacks have saved
        for callback in callbacks_of(trainer):  # which puts its average into the module there, before the module's hook
            if isinstance(callback, WeightAveraging | StochasticWeightAveraging):
                patches.around(callback, "on_train_end", self._end)
        patches.around(module, "on_train_end", self._end)
        patches.around(trainer.strategy, "teardown", self._end)  # after an exception

        def save(*args: Any, **kwargs: Any) -> Any:
            was_training = self._is_training
            self._to_evaluated()
            try:
                return saving.original(*args, **kwargs)
            finally:
                if was_training:
                    self._to_trained()

        saving = patches.replace(trainer, "save_checkpoint", save)

    def _begin(self) -> None:
        self._is_fitting = True
        self._to_trained()

    def _end(self) -> None:
        self._to_evaluated()
        self._is_fitting = False

    def _to_trained(self) -> None:
        if self._is_fitting and not self._is_training:
            self._switch("train")
            self._is_training = True

    def _to_evaluated(self) -> None:
        if self._is_training:
            self._is_training = False
            self._switch("eval")

    def _switch(self, mode: str) -> None:
        for optimizer in self._trainer.optimizers:
            if has_evaluated_weights(optimizer):
                _call(mode, optimizer)


def _call(mode: str, optimizer: Optimizer) -> None:
    getattr(optimizer, mode)()


def _warn_about_batch_norm(module: nn.Module, optimizer: Optimizer) -> None:
    names = [
        name for name, part in module.named_modules() if isinstance(part, BATCH_NORMS) and part.track_running_stats
    ]
    if names:
        rank_zero_info(
            f"{type(optimizer).__name__} evaluates averaged weights, and the running statistics of {listed(names, 2)}"
            " are those of the weights that it trains. Before the final evaluation, run some 50 training batches"
            " through the fitted module in train() mode."
        )
