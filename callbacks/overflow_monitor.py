"""Loss scale and skipped steps, logged."""

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from torch.optim import Optimizer

from lightning_mp.callbacks._common import log_host_number, refuse_other_trainers
from lightning_mp.outcome import StepDispatcher, StepOutcome
from lightning_mp.stock_steps import StockStepObserver

__all__ = ["OverflowMonitor"]


class OverflowMonitor(Callback):
    """Logs what every optimizer step came to, without waiting for the device.

    Logged at every batch once the first outcome is known: ``mp/loss_scale`` and ``mp/skipped_steps`` (also on the
    progress bar), ``mp/overflow_rate`` (skipped over attempted steps) and ``mp/grad_norm`` (true norm before clipping;
    only with our plugins). Totals are saved in the checkpoint.

    With our precision plugins, learning-rate schedulers and averaged weights hold on a skipped step anyway. With
    Lightning's own plugins this callback brings that.

    Example:
        >>> from lightning_mp import OverflowMonitor
        >>> OverflowMonitor().skipped_steps
        0
    """

    def __init__(self) -> None:
        self.attempted_steps = 0
        self.skipped_steps = 0
        self.loss_scale: float | None = None
        self.grad_norm: float | None = None
        self._observer: StockStepObserver | None = None
        self._trainer: pl.Trainer | None = None

    @property
    def overflow_rate(self) -> float:
        """Skipped over attempted steps."""
        return self.skipped_steps / self.attempted_steps if self.attempted_steps else 0.0

    def setup(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", stage: str) -> None:
        """Checks the Trainer."""
        refuse_other_trainers(self, trainer)

    def on_fit_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Watches the steps of a stock precision plugin; ours tell their outcomes themselves."""
        self._trainer = trainer
        if StepDispatcher.of(trainer) is None:
            self._observer = StockStepObserver(trainer, pl_module).attach()

    def on_after_optimizer_step(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", optimizer: Optimizer, outcome: StepOutcome
    ) -> None:
        """Counts an outcome."""
        self.attempted_steps += 1
        self.skipped_steps += outcome.skipped
        self.loss_scale = outcome.loss_scale
        self.grad_norm = outcome.grad_norm

    def on_train_batch_end(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Logs what is known; host numbers only."""
        if not self.attempted_steps:
            return

        if self.loss_scale is not None:
            log_host_number(pl_module, "mp/loss_scale", self.loss_scale, prog_bar=True)
        log_host_number(pl_module, "mp/skipped_steps", self.skipped_steps, prog_bar=True)
        log_host_number(pl_module, "mp/overflow_rate", self.overflow_rate)
        if self.grad_norm is not None:
            log_host_number(pl_module, "mp/grad_norm", self.grad_norm)

    def on_train_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Settles the last outcome, so that the totals are final."""
        self._settle()

    def teardown(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", stage: str) -> None:
        """Takes the observer away."""
        self._detach()

    def on_exception(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", exception: BaseException) -> None:
        """Takes the observer away."""
        self._detach()

    def _detach(self) -> None:
        observer, self._observer, self._trainer = self._observer, None, None
        if observer is not None:
            observer.detach()

    def _settle(self) -> None:
        dispatcher = StepDispatcher.of(self._trainer) if self._trainer is not None else None
        if dispatcher is not None:
            dispatcher.settle()

    def state_dict(self) -> dict[str, Any]:
        """The totals, settled."""
        self._settle()
        return {"attempted_steps": self.attempted_steps, "skipped_steps": self.skipped_steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on from saved totals."""
        self.attempted_steps = state_dict["attempted_steps"]
        self.skipped_steps = state_dict["skipped_steps"]
