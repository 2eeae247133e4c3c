"""What happened in a run, step by step: kept in its checkpoints, written to ``history.json`` at the end."""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_mp import ChinchillaBudget, StepOutcome, StopAtBoundary
from lightning_mp.demo.memory import peak_memory_bytes
from lightning_mp.demo.stop import reason_of
from lightning_mp.outcome import StepDispatcher

__all__ = ["HISTORY_KEY", "RunHistory"]

#: Where the history stands in a checkpoint's ``callbacks``.
HISTORY_KEY = "lightning_mp_demo"

_READ_EVERY_STEPS = 50


class RunHistory(Callback):
    """Records one row per optimizer step, skipped ones included, and one per validation.

    The loss of a step is the mean over the tokens of its window on this rank. Losses stay on the device and are read
    in bulk. The learning rate is read where it is used, in a hook before the optimizer's step; a skipped step that
    never reaches the optimizer has the rate of the next one, since the schedule holds.

    Args:
        path: The JSON file.
        facts: Plain values about the run that go into the file and into every checkpoint.
        budget: Tells the tokens that were spent.
        stop: Tells why the run ended early, if it did.
        micro_batch_tokens: Tokens of one micro-batch over all ranks.
    """

    def __init__(
        self,
        path: Path,
        facts: Mapping[str, Any],
        budget: ChinchillaBudget,
        stop: StopAtBoundary,
        micro_batch_tokens: int,
    ) -> None:
        self._path = path
        self._facts = dict(facts)
        self._budget = budget
        self._stop = stop
        self._micro_batch_tokens = micro_batch_tokens
        self._micro_batches = 0
        self._tokens: list[int] = []
        self._losses: list[float] = []
        self._unread_losses: list[Tensor] = []
        self._learning_rates: dict[int, float] = {}
        self._outcomes: dict[int, tuple[float, bool, float | None]] = {}
        self._validation: list[tuple[int, float]] = []
        self._train_seconds = 0.0
        self._window: list[tuple[Tensor, Tensor]] = []
        self._clock: float | None = None
        self._trainer: pl.Trainer | None = None
        self._hook: RemovableHandle | None = None

    @property
    def state_key(self) -> str:
        """Where the state stands in a checkpoint."""
        return HISTORY_KEY

    def on_fit_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Starts to watch the learning rate."""
        self._trainer = trainer

        def note_learning_rate(optimizer: Optimizer, *_: Any) -> None:
            self._learning_rates[trainer.global_step] = float(optimizer.param_groups[0]["lr"])

        self._hook = trainer.optimizers[0].register_step_pre_hook(note_learning_rate)

    def on_train_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Starts the clock."""
        self._clock = time.monotonic()

    def on_train_batch_end(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Adds a micro-batch, and closes the row at the end of a window."""
        self._window.append((outputs["mean_loss"], outputs["tokens"]))
        self._micro_batches += 1
        if trainer.global_step == len(self._tokens):
            return
        losses, counts = (torch.stack(column) for column in zip(*self._window, strict=True))
        self._window = []
        self._unread_losses.append((losses * counts).sum() / counts.sum())
        budget_tokens = self._budget.budget_tokens
        assert budget_tokens is not None
        self._tokens.append(min(budget_tokens, self._micro_batches * self._micro_batch_tokens))
        if len(self._unread_losses) >= _READ_EVERY_STEPS:
            self._read_losses()

    def on_after_optimizer_step(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", optimizer: Optimizer, outcome: StepOutcome
    ) -> None:
        """Notes what a step came to; with a fused optimizer this is one step late."""
        self._outcomes[outcome.step_index] = outcome.loss_scale, outcome.skipped, outcome.grad_norm

    def on_validation_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Stops the clock."""
        self._stop_clock()

    def on_validation_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Notes the validation loss."""
        if trainer.sanity_checking or not self._tokens:
            return
        self._validation.append((self._tokens[-1], float(trainer.callback_metrics["val/loss"])))
        self._clock = time.monotonic()

    def on_train_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Stops the clock."""
        self._stop_clock()

    def on_fit_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Writes the file."""
        if self._hook is not None:
            self._hook.remove()
        if trainer.is_global_zero:
            device = trainer.strategy.root_device
            written = {
                **self._facts,
                **self.table(),
                "tokens": self._budget.tokens_seen,
                "budget_tokens": self._budget.budget_tokens,
                "stopped_by": reason_of(self._stop),
                "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
                "peak_memory_bytes": peak_memory_bytes(device),
            }
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text(json.dumps(written, indent=1) + "\n")

    def table(self) -> dict[str, Any]:
        """The rows so far, as columns of equal length."""
        self._read_losses()
        steps = range(len(self._tokens))
        outcomes = [self._outcomes.get(step, (None, None, None)) for step in steps]
        return {
            "steps": {
                "tokens": self._tokens,
                "train_loss": self._losses,
                "learning_rate": self._filled_learning_rates(),
                "loss_scale": [scale for scale, _, _ in outcomes],
                "skipped": [skipped for _, skipped, _ in outcomes],
                "grad_norm": [norm for _, _, norm in outcomes],
            },
            "validation": {
                "tokens": [tokens for tokens, _ in self._validation],
                "loss": [loss for _, loss in self._validation],
            },
            "train_seconds": self._train_seconds,
        }

    def state_dict(self) -> dict[str, Any]:
        """Facts and rows; the last outcome is waited for."""
        dispatcher = StepDispatcher.of(self._trainer) if self._trainer is not None else None
        if dispatcher is not None:
            dispatcher.settle()
        self._stop_clock(restart=True)
        self._read_losses()
        return {
            "facts": self._facts,
            "micro_batches": self._micro_batches,
            "tokens": list(self._tokens),
            "losses": list(self._losses),
            "learning_rates": dict(self._learning_rates),
            "outcomes": dict(self._outcomes),
            "validation": list(self._validation),
            "train_seconds": self._train_seconds,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on with the rows of the run that is resumed."""
        self._micro_batches = state_dict["micro_batches"]
        self._tokens = list(state_dict["tokens"])
        self._losses = list(state_dict["losses"])
        self._learning_rates = dict(state_dict["learning_rates"])
        self._outcomes = dict(state_dict["outcomes"])
        self._validation = list(state_dict["validation"])
        self._train_seconds = state_dict["train_seconds"]

    def _filled_learning_rates(self) -> list[float | None]:
        rates: list[float | None] = [self._learning_rates.get(step) for step in range(len(self._tokens))]
        for step in reversed(range(len(rates) - 1)):
            if rates[step] is None:
                rates[step] = rates[step + 1]
        return rates

    def _read_losses(self) -> None:
        if self._unread_losses:
            self._losses += torch.stack(self._unread_losses).tolist()
            self._unread_losses = []

    def _stop_clock(self, *, restart: bool = False) -> None:
        now = time.monotonic()
        if self._clock is not None:
            self._train_seconds += now - self._clock
            self._clock = now if restart else None
