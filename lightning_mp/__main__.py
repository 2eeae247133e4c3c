"""The command line: ``lightning-mp COMMAND`` or ``python -m lightning_mp COMMAND``."""

import argparse
import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import lightning_mp
from lightning_mp._version import __version__
from lightning_mp.ground.core.cli_parser import OneLineParser

# By command: a line of help, and the function that gives its parser the options. Only the command that was given is
# imported: torch and Lightning take seconds, which an answer of one line is not worth.
_COMMANDS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "demo": ("train a small language model on real text", "lightning_mp.demo.cli.fill_demo"),
        "plan": ("size a model, its run and its machine", "lightning_mp.cli.plan.fill_plan"),
        "advise": ("which precision and strategy to use, and why", "lightning_mp.cli.advise.fill_advise"),
        "memory": ("what a training step keeps in memory", "lightning_mp.cli.memory.fill_memory"),
        "compare": (
            "measure what a precision costs and how well it trains",
            "lightning_mp.demo.cli.fill_compare_with_demo",
        ),
        "fit": ("fit a scaling law to your own runs", "lightning_mp.cli.fit.fill_fit"),
        "bits": (
            "what differs between two checkpoints or two recorded runs",
            "lightning_mp.training.resume.cli.fill_bits",
        ),
        "consolidate": (
            "a sharded checkpoint as a single file",
            "lightning_mp.training.checkpoints.cli.fill_consolidate",
        ),
        "formats": ("range and precision of number formats", "lightning_mp.cli.formats.fill_formats"),
    }
)
_WITHOUT_TORCH = frozenset({"formats"})


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command."""
    try:
        try:
            return _run(sys.argv[1:] if arguments is None else arguments)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more when it ends
        return 141


def _run(arguments: Sequence[str]) -> int:
    parser = OneLineParser(prog="lightning-mp", description="Mixed precision for PyTorch Lightning.")
    parser.add_argument("--version", action="version", version=f"lightning-mp {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=OneLineParser)
    given = next((word for word in arguments if not word.startswith("-")), None)
    for name, (line, function) in _COMMANDS.items():
        own = commands.add_parser(name, help=line)
        if name == given:
            _fill(own, name, function)
    parsed: argparse.Namespace = parser.parse_args(arguments)
    code: int = parsed.run(parsed)
    return code


def _fill(parser: OneLineParser, name: str, function: str) -> None:
    if name not in _WITHOUT_TORCH and not hasattr(lightning_mp, "AutocastPrecision"):
        import torch  # noqa: F401

        importlib.reload(lightning_mp)  # with all of its names, for the demo and for the user's own modules
    module, _, fill = function.rpartition(".")
    getattr(importlib.import_module(module), fill)(parser)


if __name__ == "__main__":
    sys.exit(main())
