"""Trainers that our plugins are not for: ``pytorch_lightning``'s, and Fabric."""

import lightning.pytorch as pl
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn


def trainer_of(module: nn.Module) -> "pl.Trainer | None":
    """The module's Trainer; None without one, or with Fabric's substitute."""
    if not isinstance(module, pl.LightningModule):
        return None
    try:
        trainer = module.trainer
    except RuntimeError:
        return None
    return trainer if isinstance(trainer, pl.Trainer) else None


def no_trainer(plugin: object, what: str) -> MisconfigurationException:
    """For a plugin without a Trainer; ``what`` has come instead."""
    return MisconfigurationException(
        f"{type(plugin).__name__} is a plugin for lightning.pytorch.Trainer and {what}, as under Fabric."
        " With Fabric use Fabric(precision=...) and, for fp16, MixedPrecision('16-mixed', device,"
        " scaler=lightning_mp.LossScaler()) from lightning.fabric.plugins."
    )


def refuse_other_trainers(callback: object, trainer: object) -> None:
    """Refuses any Trainer that is not from ``lightning.pytorch``."""
    if not isinstance(trainer, pl.Trainer):
        raise MisconfigurationException(
            f"{type(callback).__name__} is a callback for lightning.pytorch.Trainer, but this Trainer is a"
            f" {type(trainer).__module__.partition('.')[0]}.{type(trainer).__name__}:"
            " use `import lightning.pytorch as pl`, not `import pytorch_lightning as pl`."
        )
