"""The demo's model for ``lightning-mp compare``."""

import argparse
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

from lightning_mp.comparison.cli import DefaultModel
from lightning_mp.core.quantities import parse_quantity
from lightning_mp.demo.prepare import use_few_threads
from lightning_mp.demo.settings import CLIP_NORM, WARMUP_SHARE, Settings
from lightning_mp.language_model import Corpus, GPTConfig, LanguageModel, TextData, load_text, peak_learning_rate


def short_runs(
    corpus: Corpus,
    shape: GPTConfig,
    steps: int,
    batch_size: int,
    *,
    fused: bool = True,
    module: type[LanguageModel] = LanguageModel,
) -> tuple[Callable[..., LanguageModel], Callable[[], TextData]]:
    """Functions that make a model and its data for runs of n steps, as ``compare_precisions`` takes them.

    Weights and the order of the text follow from torch's global seed. Lightning's own mixed precision refuses a fused
    AdamW together with clipping. The first function takes other arguments of the module by keyword.
    """
    schedule = {"total_steps": steps, "warmup_steps": min(max(1, round(WARMUP_SHARE * steps)), steps - 1)}
    peak = peak_learning_rate(shape.parameters)
    make_module = partial(module, **asdict(shape), learning_rate=peak, fused=fused, **schedule)
    return make_module, partial(TextData, corpus, batch_size, steps)


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
