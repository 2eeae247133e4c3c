"""The command line: ``lightning-mp COMMAND`` or ``python -m lightning_mp COMMAND``."""

import argparse
import os
import sys
from collections.abc import Sequence

from lightning_mp._version import __version__
from lightning_mp.checkpoints.cli import add_consolidate_command
from lightning_mp.cli.advise import add_advise_command
from lightning_mp.cli.fit import add_fit_command
from lightning_mp.cli.formats import add_formats_command
from lightning_mp.cli.memory import add_memory_command
from lightning_mp.cli.plan import add_plan_command
from lightning_mp.comparison.cli import add_compare_command
from lightning_mp.core.cli_parser import OneLineParser
from lightning_mp.demo.cli import DEMO_MODEL, add_demo_command
from lightning_mp.resume.cli import add_bits_command


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command."""
    try:
        try:
            return _run(arguments)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more when it ends
        return 141


def _run(arguments: Sequence[str] | None) -> int:
    parser = OneLineParser(prog="lightning-mp", description="Mixed precision for PyTorch Lightning.")
    parser.add_argument("--version", action="version", version=f"lightning-mp {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=OneLineParser)
    add_demo_command(commands)
    add_plan_command(commands)
    add_advise_command(commands)
    add_memory_command(commands)
    add_compare_command(commands, DEMO_MODEL)
    add_fit_command(commands)
    add_bits_command(commands)
    add_consolidate_command(commands)
    add_formats_command(commands)
    parsed: argparse.Namespace = parser.parse_args(arguments)
    code: int = parsed.run(parsed)
    return code


if __name__ == "__main__":
    sys.exit(main())
