"""``lightning-mp demo``: the options."""

import argparse
import sys
from pathlib import Path
from typing import Any, NoReturn

__all__ = ["OneLineParser", "add_demo_command"]

_DESCRIPTION = """\
Train a byte-level GPT on the Python standard library's own source, in mixed precision, on exactly its Chinchilla budget
(20 tokens per parameter). With the default options this takes about a minute on two CPU cores."""


class OneLineParser(argparse.ArgumentParser):
    """Says what was wrong in one line."""

    def error(self, message: str) -> NoReturn:
        """Prints one line and exits with code 2."""
        self.exit(2, f"{self.prog}: {message[:1].lower()}{message[1:].rstrip('.')}. See {self.prog} --help.\n")


def add_demo_command(commands: "argparse._SubParsersAction[OneLineParser]") -> None:
    """Adds ``demo`` to the command line."""
    parser = commands.add_parser("demo", help="train a small language model on real text", description=_DESCRIPTION)
    outcome = parser.add_argument_group("what to train (a resumed run keeps its own)")
    outcome.add_argument(
        "--precision", metavar="P", help="32-true, bf16-mixed or 16-mixed; default bf16-mixed (16-mixed: slow on a CPU)"
    )
    outcome.add_argument("--params", type=int, metavar="N", dest="parameters", help="model size; default 100000")
    outcome.add_argument(
        "--tokens-per-parameter", type=float, metavar="R", help="size of the budget; default 20 (Chinchilla)"
    )
    outcome.add_argument("--batch-size", type=int, metavar="B", help="sequences per batch and device; default 8")
    outcome.add_argument("--text", metavar="FILE", help="train on this file instead of the standard library")
    outcome.add_argument("--seed", type=int, metavar="S", help="default 0")
    outcome.add_argument("--devices", type=int, metavar="N", help="number of devices or CPU processes; default 1")
    outcome.add_argument(
        "--inject-overflow",
        type=int,
        metavar="STEP",
        help="make a gradient infinite at this optimizer step, counted from 0 (with --precision 16-mixed)",
    )
    how = parser.add_argument_group("how")
    how.add_argument("--accelerator", default="auto", metavar="A", help="auto, cpu, cuda or mps; auto: cuda, else cpu")
    how.add_argument("--strategy", default="auto", help="a Lightning strategy: auto, ddp, ddp_fork, fsdp, ...")
    how.add_argument("--out", type=Path, default=Path("runs/demo"), metavar="DIR", help="default runs/demo")
    how.add_argument("--max-minutes", type=float, metavar="M", help="stop after M minutes of training, with checkpoint")
    how.add_argument("--resume", action="store_true", help="go on with the newest run under --out")
    parser.set_defaults(run=_run, parser=parser)


_SETTINGS = (
    "precision",
    "parameters",
    "tokens_per_parameter",
    "batch_size",
    "text",
    "seed",
    "devices",
    "inject_overflow",
)


def _run(arguments: argparse.Namespace) -> int:
    try:
        return _run_demo(arguments)
    except KeyboardInterrupt as interrupt:
        print(f"\nInterrupted. {str(interrupt) or 'Nothing has been written.'}", file=sys.stderr)
        return 130


def _run_demo(arguments: argparse.Namespace) -> int:
    # Imported here: torch and Lightning take seconds, `--help` should not.
    from lightning.pytorch.utilities.exceptions import MisconfigurationException

    from lightning_mp.demo.prepare import Options, prepare
    from lightning_mp.demo.run import run_job

    given: dict[str, Any] = {name: getattr(arguments, name) for name in _SETTINGS}
    if given["text"] is not None:
        given["text"] = str(Path(given["text"]).resolve())
    options = Options(
        given={name: value for name, value in given.items() if value is not None},
        out=arguments.out,
        resume=arguments.resume,
        max_minutes=arguments.max_minutes,
        accelerator=arguments.accelerator,
        strategy=arguments.strategy,
    )
    parser: OneLineParser = arguments.parser
    try:
        job = prepare(options)
    except ValueError as error:
        parser.error(str(error))
    try:
        return run_job(job)
    except MisconfigurationException as error:
        parser.error(" ".join(str(error).split()))
