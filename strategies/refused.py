"""What no strategy that distributes a model over ranks supports, and what to use instead."""

import lightning.pytorch as pl
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_mp.ground.core import private_sharding_api, private_trainer_api
from lightning_mp.training.optimizer_step.gradient_observers import makes_true_gradients


def refuse_scaler_of_torch(plugin: Precision, owner: str, why: str) -> None:
    """Refuses Lightning's own fp16 plugin."""
    if isinstance(plugin, MixedPrecision) and not makes_true_gradients(plugin) and plugin.scaler:
        raise MisconfigurationException(
            f"{owner} with Lightning's MixedPrecision('16-mixed'): torch's GradScaler {why}. Use"
            " Trainer(plugins=[lightning_mp.AutocastPrecision('16-mixed')]) and leave precision out."
        )


def refuse_copies_of_the_model(trainer: "pl.Trainer", owner: str, before: str) -> None:
    """Refuses Lightning's callbacks that have already copied the model: every rank would keep a whole copy."""
    for callback in private_trainer_api.callbacks_of(trainer):
        if isinstance(callback, WeightAveraging | StochasticWeightAveraging):
            raise MisconfigurationException(
                f"{owner} cannot be used with {type(callback).__name__}, which copies the model before {before}. Leave"
                " it out, average checkpoints after the run, or use strategy='ddp'."
            )


def refuse_own_parallelism(module: nn.Module, owner: str) -> None:
    """Refuses a model that ``configure_model`` has already distributed over ranks."""
    split = [name for name, parameter in module.named_parameters() if isinstance(parameter, DTensor)]
    if split:
        raise MisconfigurationException(
            f"{owner} shards the model and splits its layers itself, by shard=... and tensor_parallel_plan=..., and"
            f" {type(module).__name__}.configure_model has spread {split[0]} over ranks already (parallelize_module or"
            " distribute_tensor). Take that out of configure_model, or use Lightning's ModelParallelStrategy, which"
            " leaves all of it to configure_model."
        )


def refuse_sync_batchnorm(strategy: ParallelStrategy, owner: str, why: str) -> None:
    """Refuses ``Trainer(sync_batchnorm=True)``, which a strategy would ignore or change."""
    if private_sharding_api.uses_sync_batchnorm(strategy):
        raise MisconfigurationException(
            f"{owner} cannot be used with Trainer(sync_batchnorm=True): batch norms stay plain, {why}. Use a"
            " normalisation of single samples (GroupNorm, LayerNorm), or strategy='ddp'."
        )
