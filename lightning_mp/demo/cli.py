"""``lightning-mp demo``: the options, and how a run ends for the shell."""

import argparse
import sys
from dataclasses import fields
from pathlib import Path

from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_mp.cli.parser import OneLineParser
from lightning_mp.demo import prepare, run
from lightning_mp.demo.settings import Settings, flag

__all__ = ["add_demo_command"]

_DESCRIPTION = """\
Train a byte-level GPT on the source text of the Python standard library, in mixed precision, on exactly its Chinchilla
budget (20 tokens per parameter). With the default options this takes 2 to 5 minutes on 2 idle CPU cores, depending on
whether they have bf16 instructions."""


def add_demo_command(commands: "argparse._SubParsersAction[OneLineParser]") -> None:
    """Adds ``demo`` to the command line."""
    parser = commands.add_parser("demo", help="train a small language model on real text", description=_DESCRIPTION)
    groups = {
        "model": parser.add_argument_group("what to train (a resumed run keeps its own)"),
        "layout": parser.add_argument_group("devices (a resumed run may have others)"),
    }
    for setting in fields(Settings):
        options = dict(setting.metadata)
        group, help = groups[options.pop("group")], options.pop("help")
        if setting.default not in (None, False):
            help += f"; default {setting.default}"
        group.add_argument(flag(setting.name), help=help, default=None, **options)
    others = parser.add_argument_group("other options")
    others.add_argument(
        "--accelerator", default="auto", choices=prepare.ACCELERATORS, help="default auto: cuda, or cpu"
    )
    others.add_argument("--out", type=Path, default=Path("runs/demo"), metavar="DIR", help="default runs/demo")
    others.add_argument("--max-minutes", type=float, metavar="M", help="write a checkpoint and stop after M minutes")
    others.add_argument("--resume", action="store_true", help="go on with the newest run under --out")
    parser.set_defaults(run=_run, parser=parser)


def _run(arguments: argparse.Namespace) -> int:
    given = {setting.name: getattr(arguments, setting.name) for setting in fields(Settings)}
    given = {name: value for name, value in given.items() if value is not None}
    try:
        job = prepare.prepare(
            given,
            arguments.out,
            resume=arguments.resume,
            max_minutes=arguments.max_minutes,
            accelerator=arguments.accelerator,
        )
    except ValueError as error:
        return _refuse(arguments.parser, error)
    except KeyboardInterrupt:
        return _interrupted("Nothing has been written.")
    try:
        return run.run_job(job)
    except MisconfigurationException as error:
        return _refuse(arguments.parser, error)
    except KeyboardInterrupt as interrupt:
        return _interrupted(str(interrupt))


def _refuse(parser: OneLineParser, error: Exception) -> int:
    rank_zero_only(parser.error)(" ".join(str(error).split()))
    return 2  # rank 0 has said it


def _interrupted(message: str) -> int:
    print(f"\nInterrupted. {message}", file=sys.stderr)
    return 130
