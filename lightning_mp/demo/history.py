"""What happens in a run, recorded step by step, and an overflow made on purpose."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, Timer
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor
from torch.optim import Optimizer

import lightning_mp as mp
from lightning_mp.core.devices import device_name, peak_memory_bytes
from lightning_mp.core.private_api import callbacks_of
from lightning_mp.demo.settings import Settings
from lightning_mp.diagnostics import StepOutcome
from lightning_mp.gradients.gradient_ops import local_shard, sum_over_ranks_
from lightning_mp.optimizer_step.outcome import StepOutcomeDispatcher

__all__ = ["HISTORY_KEY", "InjectOverflow", "RunHistory", "say"]

#: Where the history is in a checkpoint.
HISTORY_KEY = "lightning_mp_demo"


class RunHistory(Callback):
    """Records one row per optimizer step, skipped ones included, and one per validation; logs the learning rate.

    The loss of a step is the mean over the tokens of its window and all ranks. Losses stay on the device until the next
    validation or checkpoint, and are added up over ranks and read together. Rows and ``facts`` about the run go into
    every checkpoint, and at the end into the JSON file ``path``.
    """

    def __init__(self, path: Path, facts: Mapping[str, Any]) -> None:
        self._path, self._facts = path, dict(facts)
        columns = ("tokens", "train_loss", "learning_rate", "loss_scale", "skipped", "grad_norm")
        self._steps: dict[str, list[Any]] = {column: [] for column in columns}
        self._validation: dict[str, list[Any]] = {"tokens": [], "loss": []}
        # sums of losses and numbers of tokens: of each micro-batch of an open window, and of closed windows
        self._window: list[Tensor] = []
        self._unread: list[Tensor] = []

    def on_train_batch_end(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Adds a micro-batch, and closes the row at the end of a window."""
        loss, count = outputs["mean_loss"], outputs["tokens"]
        self._window.append(torch.stack([loss * count, count]))
        if trainer.global_step == len(self._steps["tokens"]):
            return
        self._unread.append(torch.stack(self._window).sum(0))
        self._window = []
        plan = self._facts["plan"]
        learning_rate = float(trainer.optimizers[0].param_groups[0]["lr"])
        # the whole run is one epoch, so that `batch_idx` goes on after a resume
        self._steps["tokens"].append(min(plan["budget_tokens"], (batch_idx + 1) * plan["micro_batch_tokens"]))
        self._steps["learning_rate"].append(learning_rate)
        pl_module.log("train/learning_rate", learning_rate)

    def on_after_optimizer_step(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", optimizer: Optimizer, outcome: StepOutcome
    ) -> None:
        """Notes what came of a step; with a fused optimizer this is one step late."""
        for column in ("loss_scale", "skipped", "grad_norm"):
            self._steps[column].append(getattr(outcome, column))

    def on_validation_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Notes the validation loss, and prints a line where no progress bar shows it."""
        self._read_losses()
        tokens, loss = self._steps["tokens"][-1], float(trainer.callback_metrics["val/loss"])
        self._validation["tokens"].append(tokens)
        self._validation["loss"].append(loss)
        if trainer.progress_bar_callback is None:
            say(f"{tokens:,} tokens: train loss {self._steps['train_loss'][-1]:.3f}, validation loss {loss:.3f}")

    def on_save_checkpoint(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", checkpoint: dict[str, Any]
    ) -> None:
        """Saves facts and rows."""
        self._settle(trainer)
        checkpoint[HISTORY_KEY] = {"facts": self._facts, "steps": self._steps, "validation": self._validation}

    def on_load_checkpoint(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", checkpoint: dict[str, Any]
    ) -> None:
        """Goes on with the rows of the run that is resumed."""
        self._steps, self._validation = (checkpoint[HISTORY_KEY][rows] for rows in ("steps", "validation"))

    def on_fit_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Writes a last row of the log that has everything, since most is logged every few steps only, and the file."""
        self._settle(trainer)
        last = {name: float(value) for name, value in trainer.callback_metrics.items()}
        last["train/loss"] = self._steps["train_loss"][-1]
        for logger in trainer.loggers:
            logger.log_metrics(last, step=trainer.global_step - 1)
        if not trainer.is_global_zero:
            return
        rates = self._steps["learning_rate"]
        for step in reversed(range(len(rates) - 1)):
            if self._steps["skipped"][step]:
                # The scaler did not call an unfused optimizer, so nothing set the rate of that step: the next one's.
                rates[step] = rates[step + 1]
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(self._figures(trainer), indent=1) + "\n")

    def _figures(self, trainer: "pl.Trainer") -> dict[str, Any]:
        of: dict[type, Any] = {type(callback): callback for callback in callbacks_of(trainer)}
        budget, stop, rates = of[mp.ChinchillaBudget], of[mp.StopAtBoundary], of[mp.MFUMonitor]
        # Ctrl-C reaches all ranks; where only another one was told to stop, its clock was ahead.
        why = "interrupt" if stop.stopped_by == "SIGINT" or stop.max_seconds is None else "time"
        device = trainer.strategy.root_device
        return {
            **self._facts,
            "steps": self._steps,
            "validation": self._validation,
            "tokens": budget.tokens_seen,
            "budget_tokens": budget.budget_tokens,
            "stopped_by": None if stop.path is None else why,
            "device": device_name(device),
            "tokens_per_second": rates.total.tokens_per_second,
            "mfu": rates.total.mfu,
            "train_seconds": rates.throughput.totals.seconds,
            "fit_seconds": of[Timer].time_elapsed("train"),
            "peak_memory_bytes": peak_memory_bytes(device),
        }

    def _settle(self, trainer: "pl.Trainer") -> None:
        dispatcher = StepOutcomeDispatcher.of(trainer)
        if dispatcher is not None:
            dispatcher.settle()
        self._read_losses()

    def _read_losses(self) -> None:
        if self._unread:
            # Ranks that hold parts of one copy of the model all count its tokens, in the sum and in the number.
            sums, counts = sum_over_ranks_(torch.stack(self._unread)).unbind(1)
            self._steps["train_loss"] += (sums / counts).tolist()
            self._unread = []


class InjectOverflow(Callback):
    """Makes one number of a gradient in the middle of the model infinite, once, for ``--inject-overflow``."""

    def __init__(self, settings: Settings) -> None:
        self._step_index = settings.inject_overflow
        self._parameter_name = f"model.blocks.{settings.model.layers // 2}.mlp.up.weight"

    def on_after_backward(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Spoils the gradient, which has been reduced over ranks by now."""
        if trainer.global_step != self._step_index:
            return
        # a stage of a pipeline has only some of the parameters, and a rank perhaps no part of this one
        parameter = dict(pl_module.named_parameters()).get(self._parameter_name)
        if parameter is not None and parameter.grad is not None and local_shard(parameter.grad).numel():
            local_shard(parameter.grad).view(-1)[0] = torch.inf


@rank_zero_only
def say(text: str) -> None:
    """Prints a line at once, also into a pipe."""
    print(text, flush=True)
