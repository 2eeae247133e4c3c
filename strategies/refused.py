"""What none of our strategies that spread a model over ranks can work with, and what to use instead."""

import lightning.pytorch as pl
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_mp import seams
from lightning_mp.precision.base import EpiloguePrecision

__all__ = ["refuse_copies_of_the_model", "refuse_scaler_of_torch", "refuse_sync_batchnorm"]


def refuse_scaler_of_torch(plugin: Precision, owner: str, why: str) -> None:
    """Refuses Lightning's own fp16 plugin.

    Args:
        plugin: of the Trainer.
        owner: name of the strategy.
        why: what torch's ``GradScaler`` does there.

    Raises:
        MisconfigurationException: with our plugin instead.
    """
    if isinstance(plugin, MixedPrecision) and not isinstance(plugin, EpiloguePrecision) and plugin.scaler:
        raise MisconfigurationException(
            f"{owner} with Lightning's MixedPrecision('16-mixed'): torch's GradScaler {why}. Use"
            " Trainer(plugins=[lightning_mp.AutocastPrecision('16-mixed')]) and leave precision out."
        )


def refuse_copies_of_the_model(trainer: "pl.Trainer", owner: str, before: str) -> None:
    """Refuses callbacks of Lightning that have copied the model by now; the copy stays whole, and on every rank.

    Args:
        trainer: at set-up.
        owner: name of the strategy.
        before: what the strategy is about to do.

    Raises:
        MisconfigurationException: names the callback.
    """
    for callback in seams.callbacks_of(trainer):
        if isinstance(callback, WeightAveraging | StochasticWeightAveraging):
            raise MisconfigurationException(
                f"{owner} cannot be used with {type(callback).__name__}, which copies the model before {before}. Leave"
                " it out, average checkpoints after the run, or use strategy='ddp'."
            )


def refuse_sync_batchnorm(strategy: ParallelStrategy, owner: str, why: str) -> None:
    """Refuses ``Trainer(sync_batchnorm=True)``, of which a strategy would make nothing, or something else.

    Args:
        strategy: at set-up.
        owner: its name.
        why: what would become of batch norms.

    Raises:
        MisconfigurationException: with norms that need no other samples.
    """
    if seams.wants_sync_batchnorm(strategy):
        raise MisconfigurationException(
            f"{owner} cannot be used with Trainer(sync_batchnorm=True): batch norms stay plain, {why}. Use a"
            " normalisation of single samples (GroupNorm, LayerNorm), or strategy='ddp'."
        )
