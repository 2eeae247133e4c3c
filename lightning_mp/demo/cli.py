"""``lightning-mp demo``: the options, and how a run ends for the shell."""

import argparse
import json
import sys
from contextlib import nullcontext, redirect_stdout
from pathlib import Path

from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_mp.cli.dataclass_options import add_options
from lightning_mp.cli.parser import OneLineParser
from lightning_mp.cli.text import name_options, print_json
from lightning_mp.demo import prepare, run
from lightning_mp.demo.settings import Settings

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

# of arguments of the functions that are called
_OPTIONS = {"accelerator": "--accelerator", "batch_size": "--batch-size", "text": "--text"}


def add_demo_command(commands: "argparse._SubParsersAction[OneLineParser]") -> None:
    """Adds ``demo`` to the command line."""
    parser = commands.add_parser(
        "demo",
        help="train a small language model on real text",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
    )
    groups = {
        "": parser.add_argument_group("what to train (a resumed run keeps its own)"),
        "layout": parser.add_argument_group("devices (a resumed run may have others)"),
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
    others.add_argument(
        "--json", action="store_true", help="print the summary for machines; what happens meanwhile goes to stderr"
    )
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
        rank_zero_only(parser.error)(name_options(str(error), _OPTIONS))
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
