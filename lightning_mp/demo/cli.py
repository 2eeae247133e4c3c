"""``lightning-mp demo``: the options, and how a run ends for the shell; and its model for ``lightning-mp compare``."""

import argparse
import json
import sys
from collections.abc import Callable
from contextlib import nullcontext, redirect_stdout
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_mp.demo import prepare, run
from lightning_mp.demo.prepare import use_few_threads
from lightning_mp.demo.settings import CLIP_NORM, WARMUP_SHARE, Settings, add_options
from lightning_mp.ground.core.cli_text import name_options, print_json
from lightning_mp.ground.core.quantities import parse_quantity
from lightning_mp.language_model import Corpus, GPTConfig, LanguageModel, TextData, load_text, peak_learning_rate
from lightning_mp.monitors.comparison.cli import DefaultModel, fill_compare

_DESCRIPTION = """\
Train a byte-level GPT on the source text of the Python standard library, in mixed precision, on exactly its Chinchilla
budget (20 tokens per parameter). With the default options this takes 2 to 8 minutes on 2 idle CPU cores, depending on
whether they have bf16 instructions."""

_EXAMPLES = """\
examples:
  lightning-mp demo
  lightning-mp demo --precision 16-mixed --max-minutes 2
  lightning-mp demo --resume
  lightning-mp demo --text my_corpus.txt --json > summary.json"""


def fill_demo(parser: argparse.ArgumentParser) -> None:
    """Gives the parser of ``demo`` its options."""
    parser.description, parser.epilog = _DESCRIPTION, _EXAMPLES
    groups = {
        "": parser.add_argument_group("what to train (fixed when a run is resumed)"),
        "layout": parser.add_argument_group("devices (may change when a run is resumed)"),
    }
    # an option that was not given has no entry in the namespace: a resumed run keeps its own
    add_options(Settings, groups)
    others = parser.add_argument_group("other options")
    others.add_argument(
        "--accelerator", default="auto", choices=("auto", "cpu", "cuda", "mps"), help="default auto: cuda, or cpu"
    )
    others.add_argument("--out", type=Path, default=Path("runs/demo"), metavar="DIR", help="default runs/demo")
    others.add_argument("--max-minutes", type=float, metavar="M", help="write a checkpoint and stop after M minutes")
    others.add_argument("--resume", action="store_true", help="resume the newest run under --out")
    others.add_argument("--json", action="store_true", help="print the summary as JSON; progress goes to stderr")
    parser.set_defaults(run=_run, parser=parser)


def _run(arguments: argparse.Namespace) -> int:
    given = vars(arguments)
    parser, as_json, _ = given.pop("parser"), given.pop("json"), given.pop("run")
    others = {name: given.pop(name) for name in ("out", "accelerator", "max_minutes", "resume")}
    try:
        with redirect_stdout(sys.stderr) if as_json else nullcontext():
            job = prepare.prepare(given, **others)
            code = run.run_job(job)
    except (ValueError, ModuleNotFoundError, MisconfigurationException) as error:
        rank_zero_only(parser.error)(name_options(str(error), ("accelerator", "batch_size", "text")))
        return 2  # rank 0 has said it
    except KeyboardInterrupt as interrupt:
        print(f"\nInterrupted. {str(interrupt) or 'Nothing has been written.'}", file=sys.stderr)
        return 130
    if as_json:
        rank_zero_only(_print_summary)(job.folder)
    return code


def _print_summary(folder: Path) -> None:
    summary = folder / "summary.json"
    print_json(json.loads(summary.read_text(encoding="utf-8")) if summary.is_file() else {"folder": str(folder)})


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
    group.add_argument("--params", metavar="N", help="model size in parameters; default 100k")
    group.add_argument("--text", metavar="FILE", help="train on this file instead of the standard library")
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


def fill_compare_with_demo(parser: argparse.ArgumentParser) -> None:
    """Gives the parser of ``compare`` its options; without ``--module`` it takes the demo's model."""
    fill_compare(parser, DefaultModel(_add_options, ("params", "text", "batch_size"), _make))
