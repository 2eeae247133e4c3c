"""What every callback of the pack does alike: refusing foreign Trainers, and logging numbers the host already has."""

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException

__all__ = ["log_host_number", "refuse_other_trainers"]


def refuse_other_trainers(callback: object, trainer: object) -> None:
    """Refuses everything but a ``lightning.pytorch`` Trainer.

    Raises:
        MisconfigurationException: says which import to use.
    """
    if not isinstance(trainer, pl.Trainer):
        raise MisconfigurationException(
            f"{type(callback).__name__} is a callback for lightning.pytorch.Trainer, but this Trainer is a"
            f" {type(trainer).__module__.partition('.')[0]}.{type(trainer).__name__}:"
            " use `import lightning.pytorch as pl`, not `import pytorch_lightning as pl`."
        )


def log_host_number(pl_module: "pl.LightningModule", name: str, value: float, *, prog_bar: bool = False) -> None:
    """Logs a number at this step, without touching the device.

    A Python number would be put on the device by ``log`` and waited for by the progress bar; a host tensor is not.
    """
    pl_module.log(
        name,
        torch.tensor(value, dtype=torch.float64),
        prog_bar=prog_bar and pl_module.trainer.progress_bar_callback is not None,
        on_step=True,
        on_epoch=False,
        rank_zero_only=True,
    )
