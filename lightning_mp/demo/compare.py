"""The same run with Lightning's own plugin for the same precision, and what differs."""

import math
from collections.abc import Mapping
from typing import Any, cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Timer
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision

from lightning_mp.demo.data import TextData
from lightning_mp.demo.history import InjectOverflow
from lightning_mp.demo.prepare import Job
from lightning_mp.demo.settings import CLIP_NORM
from lightning_mp.demo.text_runs import TextRuns

__all__ = ["format_comparison", "train_with_stock"]


def train_with_stock(job: Job) -> dict[str, Any]:
    """Trains once more as one would without this pack, and returns its figures.

    The seed, the batches, the length of the accumulation windows, the peak and the shape of the learning rate are those
    of the run to compare with. In mixed precision AdamW is not fused, since Lightning refuses that with clipping.
    """
    settings = job.settings
    torch.manual_seed(settings.seed)
    fused = _takes_fused(settings.precision)
    runs = TextRuns(job.corpus, settings.model, settings.optimizer_steps, settings.batch_size, fused)
    model, data, timer = runs.make_module(), TextData(job.corpus, settings), Timer()
    trainer = pl.Trainer(
        plugins=[_plugin(job)],
        accelerator=job.accelerator,
        devices=1,
        max_epochs=1,
        accumulate_grad_batches=settings.accumulation[0],
        gradient_clip_val=CLIP_NORM,
        callbacks=[timer, InjectOverflow(settings)],
        val_check_interval=settings.validate_every_micro_batches,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    trainer.fit(model, data)
    validation_loss = trainer.validate(model, data, verbose=False)[0]["val/loss"]
    updates = max((int(state["step"]) for state in trainer.optimizers[0].state.values()), default=0)
    return {
        "tokens": settings.micro_batches * settings.micro_batch_tokens,
        "optimizer_steps": trainer.global_step,
        "skipped_steps": trainer.global_step - updates,
        "schedule_steps_on_skips": trainer.lr_scheduler_configs[0].scheduler.last_epoch - updates,
        "validation_loss": validation_loss,
        "fit_seconds": timer.time_elapsed("train"),
    }


def _plugin(job: Job) -> Any:
    """By class, since Lightning turns ``precision="16-mixed"`` into bf16 on a CPU."""
    match job.settings.precision:
        case "32-true":
            return Precision()
        case "bf16-true" | "16-true" as true:
            return HalfPrecision(true)
        case mixed:
            return MixedPrecision(cast(Any, mixed), job.accelerator)


def _takes_fused(precision: str) -> bool:
    return not precision.endswith("-mixed")


def format_comparison(stock: Mapping[str, Any], summary: Mapping[str, Any], history: Mapping[str, Any]) -> str:
    """A table of the figures of :func:`train_with_stock` and of the run with this pack."""
    moved = sum(skip["next_learning_rate"] not in (None, skip["learning_rate"]) for skip in summary["skips"])
    both = (stock, {**summary, "schedule_steps_on_skips": moved, "fit_seconds": history["fit_seconds"]})
    fused = "yes" if _takes_fused(history["settings"]["precision"]) else "refused"
    rows = [
        ("", "Lightning", "lightning_mp"),
        ("tokens", *(f"{run['tokens']:,}" for run in both)),
        ("over the budget", *(f"{run['tokens'] - summary['budget_tokens']:+,}" for run in both)),
        ("optimizer steps", *(f"{run['optimizer_steps']:,}" for run in both)),
        ("of these skipped", *(f"{run['skipped_steps']:,}" for run in both)),
        ("scheduler steps on skips", *(f"{run['schedule_steps_on_skips']:,}" for run in both)),
        ("validation loss", *(f"{run['validation_loss']:.4f}" for run in both)),
        ("time of the fit", *(f"{run['fit_seconds']:.1f} s" for run in both)),
        ("fused AdamW with clipping", fused, "yes"),
    ]
    table = "\n".join(f"{name:<26}{left:>14}{right:>14}" for name, left, right in rows)
    if not math.isfinite(stock["validation_loss"]):
        table += "\nA gradient that is not finite reached the weights of Lightning's run."
    return table
