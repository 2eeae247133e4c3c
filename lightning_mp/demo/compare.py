"""The demo's model in comparisons: a run with Lightning's own plugin, and what ``lightning-mp compare`` takes."""

import argparse
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch

from lightning_mp.comparison.cli import DefaultModel
from lightning_mp.comparison.precisions import make_plugin
from lightning_mp.core.quantities import parse_quantity
from lightning_mp.demo.history import InjectOverflow
from lightning_mp.demo.prepare import Job, use_few_threads
from lightning_mp.demo.settings import CLIP_NORM, WARMUP_SHARE, Settings
from lightning_mp.language_model import Corpus, GPTConfig, LanguageModel, TextData, load_text, peak_learning_rate


def short_runs(
    corpus: Corpus, shape: GPTConfig, steps: int, batch_size: int, *, fused: bool = True
) -> tuple[Callable[..., LanguageModel], Callable[[], TextData]]:
    """Functions that make a model and its data for runs of n steps, as ``compare_precisions`` takes them.

    Weights and the order of the text follow from torch's global seed. Lightning's own mixed precision refuses a fused
    AdamW together with clipping. The first function takes other arguments of the module by keyword.
    """
    schedule = {"total_steps": steps, "warmup_steps": min(max(1, round(WARMUP_SHARE * steps)), steps - 1)}
    peak = peak_learning_rate(shape.parameters)
    make_module = partial(LanguageModel, **asdict(shape), learning_rate=peak, fused=fused, **schedule)
    return make_module, partial(TextData, corpus, batch_size, steps)


def train_with_stock(job: Job) -> dict[str, Any]:
    """Trains once more as one would without this pack, and returns its figures.

    The seed, the batches, the length of the accumulation windows, the peak and the shape of the learning rate are those
    of the run to compare with.
    """
    settings, plan = job.settings, job.settings.plan
    torch.manual_seed(settings.seed)
    fused = not settings.precision.endswith("-mixed")
    make_module, _ = short_runs(job.corpus, settings.model, plan.optimizer_steps, settings.batch_size, fused=fused)
    model, data = make_module(), job.data
    trainer = pl.Trainer(
        # by class, since Lightning turns precision="16-mixed" into bf16 on a CPU
        plugins=[make_plugin(settings.precision if fused else f"lightning:{settings.precision}", job.accelerator)],
        max_epochs=1,
        accumulate_grad_batches=settings.accumulation[0],
        callbacks=[InjectOverflow(settings)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        **job.trainer_options,
    )
    trainer.fit(model, data)
    updates = max((int(state["step"]) for state in trainer.optimizers[0].state.values()), default=0)
    return {
        "tokens": plan.micro_batches * plan.micro_batch_tokens,
        "optimizer_steps": trainer.global_step,
        "skipped_steps": trainer.global_step - updates,
        "schedule_steps_on_skips": trainer.lr_scheduler_configs[0].scheduler.last_epoch - updates,
        "validation_loss": trainer.validate(model, data, verbose=False)[0]["val/loss"],
        "fused": fused,
    }


def format_comparison(stock: Mapping[str, Any], summary: Mapping[str, Any]) -> str:
    """A table of the figures of :func:`train_with_stock` and of the run with this pack."""
    moved = sum(skip["next_learning_rate"] not in (None, skip["learning_rate"]) for skip in summary["skips"])
    both = (stock, {**summary, "schedule_steps_on_skips": moved})
    rows = [
        ("", "Lightning", "lightning_mp"),
        ("tokens", *(f"{run['tokens']:,}" for run in both)),
        ("over the budget", *(f"{run['tokens'] - summary['budget_tokens']:+,}" for run in both)),
        ("optimizer steps", *(f"{run['optimizer_steps']:,}" for run in both)),
        ("of these skipped", *(f"{run['skipped_steps']:,}" for run in both)),
        ("scheduler steps on skips", *(f"{run['schedule_steps_on_skips']:,}" for run in both)),
        ("validation loss", *(f"{run['validation_loss']:.4f}" for run in both)),
        ("fused AdamW with clipping", "yes" if stock["fused"] else "refused", "yes"),
    ]
    table = "\n".join(f"{name:<26}{left:>14}{right:>14}" for name, left, right in rows)
    if not math.isfinite(stock["validation_loss"]):
        table += "\nA gradient that is not finite reached the weights of Lightning's run."
    return table


def _add_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("or the demo's model")
    group.add_argument("--params", metavar="N", help="size of the model; default 100k")
    group.add_argument("--text", metavar="FILE", help="instead of the standard library's source")
    group.add_argument("--batch-size", type=int, metavar="B", help="sequences per batch; default 8")


def _make(arguments: argparse.Namespace) -> tuple[Callable[[], Any], Any, dict[str, Any]]:
    params = int(parse_quantity("100k" if arguments.params is None else arguments.params, "params"))
    settings = Settings(params=params, batch_size=8 if arguments.batch_size is None else arguments.batch_size)
    steps = arguments.steps or 100
    fused = not any(name.startswith("lightning:") for name in arguments.precisions)
    runs = short_runs(load_text(arguments.text), settings.model, steps, settings.batch_size, fused=fused)
    runs[1]().train_dataloader()  # refuses a text that is too short
    use_few_threads(settings.model.parameters, arguments.accelerator)
    monitor = None if arguments.steps is None else "val/loss"
    return *runs, {"monitor": monitor, "trainer_options": {"gradient_clip_val": CLIP_NORM}}


DEMO_MODEL = DefaultModel(_add_options, ("params", "text", "batch_size"), _make)
"""What ``lightning-mp compare`` takes without ``--module``."""
