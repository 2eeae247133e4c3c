"""The same run with Lightning's own plugin for the same precision, and what differs."""

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Timer
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision

from lightning_mp.demo.data import TextData
from lightning_mp.demo.history import InjectOverflow
from lightning_mp.demo.module import LanguageModel
from lightning_mp.demo.prepare import Job
from lightning_mp.demo.settings import CLIP_NORM, WARMUP_SHARE, peak_learning_rate

__all__ = ["format_comparison", "train_with_stock"]


def train_with_stock(job: Job) -> dict[str, Any]:
    """Trains once more as one would without this pack, and returns its figures.

    The seed, the batches, the length of the accumulation windows, the peak and the shape of the learning rate are those
    of the run to compare with. In mixed precision AdamW is not fused, since Lightning refuses that with clipping.
    """
    settings = job.settings
    steps = settings.optimizer_steps
    torch.manual_seed(settings.seed)
    model = LanguageModel(
        **asdict(settings.model),
        learning_rate=peak_learning_rate(settings.model.parameters),
        total_steps=steps,
        warmup_steps=max(1, round(WARMUP_SHARE * steps)),
        fused=_takes_fused(settings.precision),
    )
    timer = Timer()
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
    data = TextData(job.corpus, settings)
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
    moved = [skip["next_learning_rate"] not in (None, skip["learning_rate"]) for skip in summary["skips"]]
    ours = {**summary, "schedule_steps_on_skips": sum(moved), "fit_seconds": history["fit_seconds"]}
    table = f"{'':<26}{'Lightning':>14}{'lightning_mp':>14}"
    for name, text in (
        ("tokens", "{tokens:,}"),
        ("over the budget", "{excess:+,}"),
        ("optimizer steps", "{optimizer_steps:,}"),
        ("of these skipped", "{skipped_steps:,}"),
        ("scheduler steps on skips", "{schedule_steps_on_skips:,}"),
        ("validation loss", "{validation_loss:.4f}"),
        ("time of the fit", "{fit_seconds:.1f} s"),
    ):
        values = [text.format(**run, excess=run["tokens"] - summary["budget_tokens"]) for run in (stock, ours)]
        table += "\n{:<26}{:>14}{:>14}".format(name, *values)
    fused = "yes" if _takes_fused(history["settings"]["precision"]) else "refused"
    table += f"\n{'fused AdamW with clipping':<26}{fused:>14}{'yes':>14}"
    if not math.isfinite(stock["validation_loss"]):
        table += "\nA gradient that is not finite reached the weights of Lightning's run."
    return table
