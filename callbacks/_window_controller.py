"""Joining the accumulation controller, for callbacks that set windows, weights, budgets or rates."""

import lightning.pytorch as pl

from lightning_mp.callbacks._common import counts_of, refuse_conflicting_callbacks
from lightning_mp.training.accumulation.controller import AccumulationController
from lightning_mp.training.resume.resumable_progress import ResumableProgress
from lightning_mp.training.tokens.loss_weighting import CountFunction, WeightBy


def join_window_controller(
    callback: object,
    trainer: "pl.Trainer",
    pl_module: "pl.LightningModule",
    count: CountFunction | None,
    weight_by: WeightBy | None = "auto",
) -> AccumulationController:
    """Returns the Trainer's accumulation controller, configured with the weights of micro-batches."""
    refuse_conflicting_callbacks(callback, trainer, pl_module)
    ResumableProgress.attach(trainer)
    controller = AccumulationController.attach(trainer)
    controller.settings.weigh(weight_by, **counts_of(callback, count))
    return controller
