"""``lightning-mp demo``: the options."""

import argparse
import sys
from pathlib import Path
from typing import Any

from lightning_mp.cli.parser import OneLineParser

__all__ = ["add_demo_command"]

_DESCRIPTION = """\
Train a byte-level GPT on the Python standard library's own source, in mixed precision, on exactly its Chinchilla budget
(20 tokens per parameter). With the default options this takes two to five minutes on two idle CPU cores,
by whether they have bf16 instructions."""


def add_demo_command(commands: "argparse._SubParsersAction[OneLineParser]") -> None:
    """Adds ``demo`` to the command line."""
    parser = commands.add_parser("demo", help="train a small language model on real text", description=_DESCRIPTION)
    outcome = parser.add_argument_group("what to train (a resumed run keeps its own)")
    outcome.add_argument(
        "--precision",
        metavar="P",
        help="32-true, tf32, bf16-mixed, 16-mixed, bf16-true, 16-true (both with fp32 masters) or fp8; default "
        "bf16-mixed (fp16 is slow on a CPU, and fp8 is emulated there)",
    )
    outcome.add_argument("--storage", metavar="S", help="masters of bf16-true: fp32 or remainder; default fp32")
    outcome.add_argument(
        "--recipe", metavar="R", help="of fp8: rowwise, tensorwise or rowwise_with_gw_hp; default rowwise"
    )
    outcome.add_argument("--params", type=int, metavar="N", dest="parameters", help="model size; default 100000")
    outcome.add_argument(
        "--tokens-per-parameter", type=float, metavar="R", help="size of the budget; default 20 (Chinchilla)"
    )
    outcome.add_argument(
        "--batch-size", type=int, metavar="B", help="sequences per batch and copy of the model; default 8"
    )
    outcome.add_argument("--text", metavar="FILE", help="train on this file instead of the standard library")
    outcome.add_argument("--seed", type=int, metavar="S", help="default 0")
    outcome.add_argument(
        "--inject-overflow",
        type=int,
        metavar="STEP",
        help="make a gradient infinite at this optimizer step, counted from 0 (with 16-mixed or 16-true)",
    )
    _add_layout(parser)
    how = parser.add_argument_group("how")
    how.add_argument("--accelerator", default="auto", metavar="A", help="auto, cpu, cuda or mps; auto: cuda, else cpu")
    how.add_argument("--out", type=Path, default=Path("runs/demo"), metavar="DIR", help="default runs/demo")
    how.add_argument("--max-minutes", type=float, metavar="M", help="stop after M minutes of training, with checkpoint")
    how.add_argument("--resume", action="store_true", help="go on with the newest run under --out")
    parser.set_defaults(run=_run, parser=parser)


def _add_layout(parser: OneLineParser) -> None:
    shared = parser.add_argument_group("how to share the work out (a resumed run may have others)")
    shared.add_argument("--devices", type=int, metavar="N", help="number of devices or CPU processes; default 1")
    shared.add_argument(
        "--strategy",
        metavar="NAME",
        help="auto (ddp on several devices), ddp, fsdp (GPUs only), model_parallel (Lightning's FSDP2), mp_fsdp2, "
        "mp_pipeline, mp_ddp_bf16_reduce, mp_ddp_fp16_reduce, or any other that Lightning knows; default auto",
    )
    shared.add_argument(
        "--tensor-parallel",
        type=int,
        metavar="N",
        help="cut each layer over so many devices, with mp_fsdp2; shards over the rest of --devices; default 1",
    )
    shared.add_argument(
        "--stages", type=int, metavar="N", help="stages of mp_pipeline, with copies over the rest; default: devices"
    )


def _run(arguments: argparse.Namespace) -> int:
    try:
        return _run_demo(arguments)
    except KeyboardInterrupt as interrupt:
        print(f"\nInterrupted. {str(interrupt) or 'Nothing has been written.'}", file=sys.stderr)
        return 130


def _run_demo(arguments: argparse.Namespace) -> int:
    # Imported here: torch and Lightning take seconds, `--help` should not.
    from lightning.pytorch.utilities import rank_zero_only
    from lightning.pytorch.utilities.exceptions import MisconfigurationException

    from lightning_mp.demo.prepare import Options, prepare
    from lightning_mp.demo.run import run_job
    from lightning_mp.demo.settings import FLAGS

    given: dict[str, Any] = {name: getattr(arguments, name) for name in FLAGS}
    if given["text"] is not None:
        given["text"] = str(Path(given["text"]).resolve())
    options = Options(
        given={name: value for name, value in given.items() if value is not None},
        out=arguments.out,
        resume=arguments.resume,
        max_minutes=arguments.max_minutes,
        accelerator=arguments.accelerator,
    )
    parser: OneLineParser = arguments.parser
    try:
        job = prepare(options)
    except ValueError as error:
        rank_zero_only(parser.error)(str(error))
        return 2
    try:
        return run_job(job)
    except MisconfigurationException as error:
        rank_zero_only(parser.error)(" ".join(str(error).split()))
        return 2  # another process has said it
