"""The final table of a run."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from lightning_mp.demo.folder import RunFolder
from lightning_mp.listed import listed

__all__ = ["SkippedStep", "Summary", "format_table"]

#: The final training loss is a mean over this share of the steps, since single batches scatter.
_TAIL_SHARE = 0.05

_SKIPS_IN_TABLE = 5
_NAMES_IN_TABLE = 2


@dataclass(frozen=True)
class SkippedStep:
    """One optimizer step that was skipped.

    Attributes:
        step_index: Counted from 0, skipped ones included.
        loss_scale: The scale at that step.
        next_loss_scale: The scale after it, None if the run ended there.
        learning_rate: The rate at that step.
        next_learning_rate: The rate of the step after it, which is the same: the schedule holds.
        parameters: Names of the parameters with a non-finite gradient.
    """

    step_index: int
    loss_scale: float
    next_loss_scale: float | None
    learning_rate: float | None
    next_learning_rate: float | None
    parameters: tuple[str, ...]


@dataclass(frozen=True)
class Summary:
    """Figures of a run. Losses are in nats per token; a token is a byte.

    Attributes:
        tokens: Tokens trained on.
        budget_tokens: Tokens of the budget.
        optimizer_steps: Attempts, skipped ones included.
        skipped_steps: Attempts that did not change the weights.
        train_loss: Mean over the last 5% of the steps.
        validation_loss: The last one.
        tokens_per_second: Over the time in training, validation left out.
        train_seconds: That time.
        peak_memory_bytes: Of one process; allocated on a CUDA device, else resident.
        device: What it ran on.
        skips: The skipped steps.
    """

    tokens: int
    budget_tokens: int
    optimizer_steps: int
    skipped_steps: int
    train_loss: float | None
    validation_loss: float | None
    tokens_per_second: float
    train_seconds: float
    peak_memory_bytes: int
    device: str
    skips: tuple[SkippedStep, ...]

    @classmethod
    def of(cls, history: Mapping[str, Any], folder: Path) -> Self:
        """Works out the summary.

        Args:
            history: The content of ``history.json``.
            folder: Where the overflow reports stand.
        """
        steps = history["steps"]
        losses = steps["train_loss"]
        tail = losses[-max(1, round(_TAIL_SHARE * len(losses))) :]
        validation_losses = history["validation"]["loss"]
        return cls(
            tokens=history["tokens"],
            budget_tokens=history["budget_tokens"],
            optimizer_steps=len(losses),
            skipped_steps=sum(map(bool, steps["skipped"])),
            train_loss=sum(tail) / len(tail) if tail else None,
            validation_loss=validation_losses[-1] if validation_losses else None,
            tokens_per_second=history["tokens"] / history["train_seconds"] if history["train_seconds"] else 0.0,
            train_seconds=history["train_seconds"],
            peak_memory_bytes=history["peak_memory_bytes"],
            device=history["device"],
            skips=tuple(_skips(steps, folder)),
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain values by name, with the losses in bits per byte besides."""
        bits = {
            f"{name}_bits_per_byte": None if loss is None else loss / math.log(2)
            for name, loss in (("train", self.train_loss), ("validation", self.validation_loss))
        }
        return asdict(self) | bits


def format_table(summary: Summary, folder: RunFolder) -> str:
    """The table for the terminal."""
    share = summary.tokens / summary.budget_tokens
    memory = "allocated on the GPU" if summary.device not in ("cpu", "mps") else "resident"
    rows = [
        ("tokens", f"{summary.tokens:,}"),
        ("budget", f"{summary.budget_tokens:,} ({'spent exactly' if share == 1 else f'{share:.1%} spent'})"),
        ("optimizer steps", f"{summary.optimizer_steps:,}"),
        ("skipped", f"{summary.skipped_steps:,}"),
        ("train loss", _loss(summary.train_loss)),
        ("validation loss", _loss(summary.validation_loss)),
        ("tokens per second", f"{summary.tokens_per_second:,.0f} on {summary.device}"),
        ("time in training", f"{summary.train_seconds:.1f} s"),
        ("peak memory", f"{summary.peak_memory_bytes / 2**20:,.0f} MiB {memory}"),
    ]
    rows += [("skipped step", text) for text in map(_describe_skip, summary.skips[:_SKIPS_IN_TABLE])]
    if len(summary.skips) > _SKIPS_IN_TABLE:
        rows.append(("", f"and {len(summary.skips) - _SKIPS_IN_TABLE} more, see {folder.summary.name}"))
    files = (folder.report, folder.summary, folder.sample, folder.path / "csv", folder.path / "tensorboard")
    rows.append(("results in", str(folder.path)))
    rows.append(("", ", ".join(file.name for file in (*files, folder.checkpoint) if file.exists())))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def _loss(loss: float | None) -> str:
    return "none" if loss is None else f"{loss:.3f} nats, {loss / math.log(2):.3f} bits per byte"


def _describe_skip(skip: SkippedStep) -> str:
    scale = f"loss scale {skip.loss_scale:g}"
    if skip.next_loss_scale is not None:
        scale += f" -> {skip.next_loss_scale:g}"
    text = f"{skip.step_index}: {scale}"
    if skip.learning_rate is not None and skip.next_learning_rate is not None:
        verb = "held at" if skip.learning_rate == skip.next_learning_rate else f"{skip.learning_rate:.3e} ->"
        text += f", learning rate {verb} {skip.next_learning_rate:.3e}"
    return f"{text}, not finite: {listed(skip.parameters, _NAMES_IN_TABLE) or 'unknown'}"


def _skips(steps: Mapping[str, Any], folder: Path) -> list[SkippedStep]:
    skips = []
    for index, skipped in enumerate(steps["skipped"]):
        if not skipped:
            continue
        report = folder / f"overflow_step={index}.json"
        names = json.loads(report.read_text())["parameters"] if report.is_file() else []
        is_last = index + 1 == len(steps["skipped"])
        skips.append(
            SkippedStep(
                step_index=index,
                loss_scale=steps["loss_scale"][index],
                next_loss_scale=None if is_last else steps["loss_scale"][index + 1],
                learning_rate=steps["learning_rate"][index],
                next_learning_rate=None if is_last else steps["learning_rate"][index + 1],
                parameters=tuple(names),
            )
        )
    return skips
