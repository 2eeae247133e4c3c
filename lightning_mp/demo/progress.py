"""Lightning's progress bar with short names, so that all of it fits on a line of 80 characters."""

import lightning.pytorch as pl
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm

__all__ = ["DemoProgressBar"]

_SHORT_NAMES = {
    "train/loss": ("loss", "{:.2f}"),
    "val/loss": ("val", "{:.2f}"),
    "mp/loss_scale": ("scale", "{:g}"),
    "mp/skipped_steps": ("skips", "{:.0f}"),
    "mp/budget_fraction": ("budget", "{:.0%}"),
}


class DemoProgressBar(TQDMProgressBar):
    """Shows loss, loss scale, skipped steps and the share of the budget that is spent."""

    BAR_FORMAT = "{percentage:3.0f}%|{bar}| {elapsed}<{remaining}{postfix}"

    def init_validation_tqdm(self) -> Tqdm:
        """No second bar: a validation takes less than a second."""
        return Tqdm(disable=True)

    def get_metrics(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule"
    ) -> dict[str, int | str | float | dict[str, float]]:
        """The metrics of interest, formatted."""
        metrics = super().get_metrics(trainer, pl_module)
        return {
            short: text.format(value)
            for name, (short, text) in _SHORT_NAMES.items()
            if isinstance(value := metrics.get(name), int | float)
        }
