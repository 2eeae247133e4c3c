"""Lightning's regular checkpoint, kept to the ends of accumulation windows."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint

__all__ = ["WindowEndCheckpoint"]


class WindowEndCheckpoint(ModelCheckpoint):
    """Writes one file over and over, every ``every_n_train_steps`` optimizer steps.

    Lightning's own does not remember, over a resume, that it has saved at this step already, and would write once more
    after the next micro-batch: inside a window, whose partial gradient is in no checkpoint.

    Args:
        path: The file.
        every_n_train_steps: In optimizer steps, skipped ones included.
    """

    def __init__(self, path: Path, every_n_train_steps: int) -> None:
        super().__init__(
            dirpath=path.parent,
            filename=path.stem,
            every_n_train_steps=every_n_train_steps,
            save_top_k=1,
            enable_version_counter=False,
        )
        self._step = 0

    def on_train_batch_start(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", batch: Any, batch_idx: int
    ) -> None:
        """Notes the optimizer step, to see whether this micro-batch ends it."""
        self._step = trainer.global_step

    def on_train_batch_end(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Saves at the end of a window, if it is time."""
        if trainer.global_step != self._step:
            super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
