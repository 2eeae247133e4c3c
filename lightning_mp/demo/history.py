"""What happens in a run: recorded step by step, shown, stopped, and broken on purpose."""

import json
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, Checkpoint, TQDMProgressBar
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor
from torch.optim import Optimizer

from lightning_mp import ChinchillaBudget, MFUMonitor, StepOutcome, StopAtBoundary
from lightning_mp.callbacks._metrics import CallbackMetrics
from lightning_mp.gradients.gradient_ops import local_shard, sum_over_ranks_
from lightning_mp.optimizer_step.outcome import StepOutcomeDispatcher

__all__ = [
    "DemoProgressBar",
    "FinalCheckpoint",
    "HISTORY_KEY",
    "InjectOverflow",
    "RunHistory",
    "interrupts_given_back",
    "peak_memory_bytes",
    "reason_of",
    "say",
]


class FinalCheckpoint(Checkpoint):
    """Writes the last checkpoint of a run that came to its own end.

    It is a ``Checkpoint`` so that Lightning calls it after all other callbacks, whose state it saves.

    Args:
        path: The checkpoint.
        stop: Writes its own if it stops the run.
    """

    def __init__(self, path: Path, stop: StopAtBoundary) -> None:
        self._path = path
        self._stop = stop

    def on_train_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Writes it."""
        if self._stop.path is None:
            trainer.save_checkpoint(self._path, weights_only=False)


def reason_of(stop: StopAtBoundary) -> str | None:
    """Why a run ended early: "interrupt" or "time"; None if it did not.

    Ctrl-C reaches all ranks. Where only another rank was told, its clock was ahead.
    """
    if stop.path is None:
        return None
    return "interrupt" if stop.stopped_by == "SIGINT" or stop.max_seconds is None else "time"


@contextmanager
def interrupts_given_back() -> Iterator[None]:
    """Ctrl-C does afterwards what it did before: Lightning ignores it from a KeyboardInterrupt on."""
    previous: Any = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


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


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory in use so far: allocated by torch on a CUDA device, else resident in main memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # getrusage(2): KiB on Linux, bytes on macOS.
    return peak if sys.platform == "darwin" else 1024 * peak


class InjectOverflow(Callback):
    """Makes one number of one parameter's gradient infinite, once, on every rank that holds a part of it.

    Args:
        step_index: The optimizer step, counted from 0, skipped ones included.
        parameter_name: Name within the LightningModule.
    """

    def __init__(self, step_index: int, parameter_name: str) -> None:
        self.step_index = step_index
        self.parameter_name = parameter_name

    def on_after_backward(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Spoils the gradient, which has been reduced over ranks by now."""
        if trainer.global_step != self.step_index:
            return
        # a stage of a pipeline has only some of the parameters
        parameter = dict(pl_module.named_parameters()).get(self.parameter_name)
        gradient = parameter.grad if parameter is not None else None
        if gradient is not None and local_shard(gradient).numel():
            local_shard(gradient).view(-1)[0] = torch.inf


#: Where the history stands in a checkpoint's ``callbacks``.
HISTORY_KEY = "lightning_mp_demo"

_READ_EVERY_STEPS = 50


class RunHistory(Callback):
    """Records one row per optimizer step, skipped ones included, and one per validation.

    The loss of a step is the mean over the tokens of its window over all ranks. Losses stay on the device; they are
    added up over ranks and read in bulk. Besides, the learning rate is logged, and after the last step once more what
    is logged every so many steps.

    Args:
        path: The JSON file.
        facts: Plain values about the run that go into the file and into every checkpoint.
        budget: Tells the tokens that were spent.
        throughput: Tells the speed.
        stop: Tells why the run ended early, if it did.
        micro_batch_tokens: Tokens of one micro-batch over all ranks.
    """

    def __init__(
        self,
        path: Path,
        facts: Mapping[str, Any],
        budget: ChinchillaBudget,
        throughput: MFUMonitor,
        stop: StopAtBoundary,
        micro_batch_tokens: int,
    ) -> None:
        self._path = path
        self._facts = dict(facts)
        self._budget = budget
        self._throughput = throughput
        self._stop = stop
        self._micro_batch_tokens = micro_batch_tokens
        self._micro_batches = 0
        self._tokens: list[int] = []
        self._losses: list[float] = []
        self._unread_losses: list[Tensor] = []
        self._learning_rates: list[float] = []
        self._outcomes: dict[int, tuple[float, bool, float | None]] = {}
        self._validation: list[tuple[int, float]] = []
        self._window: list[tuple[Tensor, Tensor]] = []
        self._trainer: pl.Trainer | None = None

    @property
    def state_key(self) -> str:
        """Where the state stands in a checkpoint."""
        return HISTORY_KEY

    def on_fit_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Meets the Trainer."""
        self._trainer = trainer
        CallbackMetrics.attach(trainer).add(
            lambda: {"train/learning_rate": self._learning_rates[-1]} if self._learning_rates else {}
        )

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
        self._unread_losses.append(torch.stack([(losses * counts).sum(), counts.sum()]))
        budget_tokens = self._budget.budget_tokens
        assert budget_tokens is not None
        self._tokens.append(min(budget_tokens, self._micro_batches * self._micro_batch_tokens))
        self._learning_rates.append(float(trainer.optimizers[0].param_groups[0]["lr"]))
        if len(self._unread_losses) >= _READ_EVERY_STEPS:
            self._read_losses()

    def on_after_optimizer_step(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", optimizer: Optimizer, outcome: StepOutcome
    ) -> None:
        """Notes what a step came to; with a fused optimizer this is one step late."""
        self._outcomes[outcome.step_index] = outcome.loss_scale, outcome.skipped, outcome.grad_norm

    def on_validation_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Notes the validation loss, and prints a line where no progress bar shows it."""
        if trainer.sanity_checking or not self._tokens:
            return
        self._read_losses()
        self._validation.append((self._tokens[-1], float(trainer.callback_metrics["val/loss"])))
        if trainer.progress_bar_callback is None:
            tokens, loss = self._validation[-1]
            say(f"{tokens:,} tokens: train loss {self._losses[-1]:.3f}, validation loss {loss:.3f}")

    def on_train_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Reads the last losses, and logs what the module has logged in the last step."""
        self._read_losses()
        ours = ("mp/", "val/")
        logged = {name: float(value) for name, value in trainer.callback_metrics.items() if not name.startswith(ours)}
        for logger in trainer.loggers:
            logger.log_metrics(logged, step=trainer.global_step - 1)

    def on_fit_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Writes the file."""
        if not trainer.is_global_zero:
            return
        device, rates = trainer.strategy.root_device, self._throughput.total
        written = {
            **self._facts,
            **self.table(),
            "tokens": self._budget.tokens_seen,
            "budget_tokens": self._budget.budget_tokens,
            "stopped_by": reason_of(self._stop),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
            "tokens_per_second": rates.tokens_per_second,
            "mfu": rates.mfu,
            "train_seconds": self._throughput.throughput.totals.seconds,
            "peak_memory_bytes": peak_memory_bytes(device),
        }
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(written, indent=1) + "\n")

    def table(self) -> dict[str, Any]:
        """The rows so far, as columns of equal length, once losses are read."""
        outcomes = [self._outcomes.get(step, (None, None, None)) for step in range(len(self._tokens))]
        skipped = [was_skipped for _, was_skipped, _ in outcomes]
        rates = list(self._learning_rates)
        for step in reversed(range(len(rates) - 1)):
            if skipped[step]:  # an unfused optimizer is not called, and nobody has set its rate; it would have been
                rates[step] = rates[step + 1]
        return {
            "steps": {
                "tokens": self._tokens,
                "train_loss": self._losses,
                "learning_rate": rates,
                "loss_scale": [scale for scale, _, _ in outcomes],
                "skipped": skipped,
                "grad_norm": [norm for _, _, norm in outcomes],
            },
            "validation": {
                "tokens": [tokens for tokens, _ in self._validation],
                "loss": [loss for _, loss in self._validation],
            },
        }

    def state_dict(self) -> dict[str, Any]:
        """Facts and rows; the last outcome is waited for."""
        dispatcher = StepOutcomeDispatcher.of(self._trainer) if self._trainer is not None else None
        if dispatcher is not None:
            dispatcher.settle()
        self._read_losses()
        return {
            "facts": self._facts,
            "micro_batches": self._micro_batches,
            "tokens": list(self._tokens),
            "losses": list(self._losses),
            "learning_rates": list(self._learning_rates),
            "outcomes": dict(self._outcomes),
            "validation": list(self._validation),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on with the rows of the run that is resumed."""
        self._micro_batches = state_dict["micro_batches"]
        self._tokens = list(state_dict["tokens"])
        self._losses = list(state_dict["losses"])
        self._learning_rates = list(state_dict["learning_rates"])
        self._outcomes = dict(state_dict["outcomes"])
        self._validation = list(state_dict["validation"])

    def _read_losses(self) -> None:
        if self._unread_losses:
            # ranks that hold parts of one copy of the model all count its tokens, above and below
            sums, counts = sum_over_ranks_(torch.stack(self._unread_losses)).unbind(1)
            self._losses += (sums / counts).tolist()
            self._unread_losses = []


@rank_zero_only
def say(text: str) -> None:
    """Prints a line at once, also into a pipe."""
    print(text, flush=True)
