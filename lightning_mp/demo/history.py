"""What happens in a run, recorded step by step, and an overflow made on purpose."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

import lightning_mp as mp
from lightning_mp.demo.settings import Settings
from lightning_mp.diagnostics import StepOutcome
from lightning_mp.ground.core.devices import device_name, peak_memory_bytes
from lightning_mp.training.gradients.gradient_ops import local_shard

#: Where the history is in a checkpoint.
HISTORY_KEY = "lightning_mp_demo"


class RunHistory(Callback):
    """Records one row per optimizer step, skipped ones included, and one per validation; logs the learning rate.

    The loss of a step is the mean over the tokens of its window and all ranks. Losses stay on the device until the next
    validation or checkpoint, and are added up over ranks and read together. Rows and ``facts`` about the run go into
    every checkpoint, and at the end, with figures of the callbacks ``budget``, ``stop`` and ``speed``, into the JSON
    file ``path``.
    """

    def __init__(
        self,
        path: Path,
        facts: Mapping[str, Any],
        budget: mp.ChinchillaBudget,
        stop: mp.StopAtBoundary,
        speed: mp.MFUMonitor,
    ) -> None:
        self._path, self._facts = path, dict(facts)
        self._budget, self._stop, self._speed = budget, stop, speed
        columns = ("tokens", "train_loss", "learning_rate", "loss_scale", "skipped", "grad_norm")
        self._steps: dict[str, list[Any]] = {column: [] for column in columns}
        self._validation: dict[str, list[Any]] = {"tokens": [], "loss": []}
        # sums of losses and numbers of tokens: of each micro-batch of an open window, and of closed windows
        self._window: list[Tensor] = []
        self._unread: list[Tensor] = []

    def on_after_optimizer_step(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", optimizer: Optimizer, outcome: StepOutcome
    ) -> None:
        """Records the outcome of a step; with a fused optimizer this is one step late."""
        for column in ("loss_scale", "skipped", "grad_norm"):
            self._steps[column].append(getattr(outcome, column))

    @override
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
        # the whole run is one epoch, so that `batch_idx` continues after a resume
        self._steps["tokens"].append(min(plan["budget_tokens"], (batch_idx + 1) * plan["micro_batch_tokens"]))
        self._steps["learning_rate"].append(learning_rate)
        pl_module.log("train/learning_rate", learning_rate)

    @override
    def on_validation_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Notes the validation loss, and prints a line where no progress bar shows it."""
        self._read_losses(trainer)
        tokens, loss = self._steps["tokens"][-1], float(trainer.callback_metrics["val/loss"])
        self._validation["tokens"].append(tokens)
        self._validation["loss"].append(loss)
        if trainer.progress_bar_callback is None:
            say(f"{tokens:,} tokens: train loss {self._steps['train_loss'][-1]:.3f}, validation loss {loss:.3f}")

    @override
    def on_fit_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Writes a last row of the log that has everything, since most is logged every few steps only, and the file."""
        self._read_losses(trainer)
        last = {name: float(value) for name, value in trainer.callback_metrics.items()}
        last["train/loss"] = self._steps["train_loss"][-1]
        for logger in trainer.loggers:
            logger.log_metrics(last, step=trainer.global_step - 1)
        if not trainer.is_global_zero:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(self._figures(trainer.strategy.root_device), indent=1) + "\n")

    def _figures(self, device: torch.device) -> dict[str, Any]:
        stopped_by = None
        if self._stop.path is not None:
            # Ctrl-C reaches all ranks; where only another one received the signal, its clock was ahead.
            by_time = self._stop.stopped_by != "SIGINT" and self._stop.max_seconds is not None
            stopped_by = "time" if by_time else "interrupt"
        return {
            **self._facts,
            "steps": self._steps,
            "validation": self._validation,
            "tokens": self._budget.tokens_seen,
            "budget_tokens": self._budget.budget_tokens,
            "stopped_by": stopped_by,
            "device": device_name(device),
            "tokens_per_second": self._speed.total.tokens_per_second,
            "mfu": self._speed.total.mfu,
            "train_seconds": self._speed.throughput.totals.seconds,
            "peak_memory_bytes": peak_memory_bytes(device),
        }

    def _read_losses(self, trainer: "pl.Trainer") -> None:
        if self._unread:
            # Ranks that hold parts of one copy of the model all count its tokens, in the sum and in the number.
            sums, counts = trainer.strategy.reduce(torch.stack(self._unread), reduce_op="sum").unbind(1)
            self._steps["train_loss"] += (sums / counts).tolist()
            self._unread = []

    @override
    def on_save_checkpoint(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", checkpoint: dict[str, Any]
    ) -> None:
        """Saves facts and rows."""
        self._read_losses(trainer)
        checkpoint[HISTORY_KEY] = {"facts": self._facts, "steps": self._steps, "validation": self._validation}

    @override
    def on_load_checkpoint(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", checkpoint: dict[str, Any]
    ) -> None:
        """Continues with the rows of the resumed run."""
        self._steps, self._validation = (checkpoint[HISTORY_KEY][rows] for rows in ("steps", "validation"))


class InjectOverflow(Callback):
    """Makes one number of a gradient in the middle of the model infinite, once, for ``--inject-overflow``."""

    def __init__(self, settings: Settings) -> None:
        self._step_index = settings.inject_overflow
        self._parameter_name = f"model.blocks.{settings.model.layers // 2}.mlp.up.weight"

    @override
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
