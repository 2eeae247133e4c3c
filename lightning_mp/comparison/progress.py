"""The progress bar of a comparison: optimizer steps of all its runs."""

from typing import Any, Self

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback


class Progress:
    """A bar over all runs, with the name of the one that is under way."""

    def __init__(self, enabled: bool | None) -> None:
        from tqdm import tqdm  # comes with Lightning

        disable = None if enabled is None else not enabled
        self._bar: Any = tqdm(total=0, unit="step", dynamic_ncols=True, leave=False, disable=disable)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def expect(self, steps: int) -> None:
        """So many optimizer steps more will be made."""
        self._bar.total += steps
        self._bar.refresh()

    def callback(self, text: str) -> Callback:
        """Shows one run."""
        self._bar.set_description(text)
        return _Shown(self._bar)


class _Shown(Callback):
    def __init__(self, bar: Any) -> None:
        self._bar = bar
        self._steps = 0

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        self._bar.update(trainer.global_step - self._steps)
        self._steps = trainer.global_step
