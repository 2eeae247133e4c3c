"""``lightning-mp compare``: precisions beside each other, on one's own module or on a default one."""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_mp.ground.core.cli_text import print_json, print_warnings, run_with_one_line_errors, terminal_columns
from lightning_mp.ground.core.imported_function import import_function
from lightning_mp.ground.core.pictures import check_picture
from lightning_mp.monitors.comparison.compare import compare_precisions
from lightning_mp.monitors.comparison.precisions import PRECISION_NAMES
from lightning_mp.monitors.comparison.result import PrecisionComparison

_DESCRIPTION = """\
Compare precisions on your module, or on the demo's model: time per batch, peak memory and gradient error. With --steps,
also compare the loss in pairs of runs that start from the same weights and see the same data, with a confidence
interval and a verdict: not worse, worse, or how many more seeds are needed."""

_EXAMPLES = f"""\
examples:
  lightning-mp compare
  lightning-mp compare --module my_project.model:example \\
    --precision 32-true bf16-mixed bf16-true
  lightning-mp compare --params 20k --steps 200 --seeds 5 \\
    --file runs.jsonl --plot comparison.png

  example() returns (module, data) or (module, data, val_data): a LightningModule; a LightningDataModule, a loader or
  one batch; a validation loader. It is called once per run, so that each seed has its own initial weights.

precisions: {", ".join(PRECISION_NAMES)}"""

_OF_PAIRS = ("seeds", "monitor", "margin", "confidence", "file")


@dataclass(frozen=True)
class DefaultModel:
    """What is compared without ``--module``."""

    add_options: Callable[[argparse.ArgumentParser], None]
    options: Sequence[str]
    make: Callable[[argparse.Namespace], tuple[Callable[[], Any], Any, dict[str, Any]]]


def fill_compare(parser: argparse.ArgumentParser, default: DefaultModel) -> None:
    """Gives the parser of ``compare`` its options."""
    parser.description, parser.epilog = _DESCRIPTION, _EXAMPLES
    parser.add_argument(
        "--precision",
        nargs="+",
        metavar="P",
        dest="precisions",
        default=["32-true", "bf16-mixed"],
        help="two or more, the baseline first; default 32-true bf16-mixed",
    )
    parser.add_argument("--module", metavar="PACKAGE:FUNCTION", help="function that returns your module and its data")
    default.add_options(parser)
    pairs = parser.add_argument_group("paired runs")
    pairs.add_argument(
        "--steps", type=int, metavar="N", help="optimizer steps per run; without it, only costs are measured"
    )
    pairs.add_argument("--seeds", type=int, metavar="N", help="number of pairs; default 5")
    pairs.add_argument(
        "--monitor", metavar="NAME", help="logged loss to compare; default: the training loss (demo: val/loss)"
    )
    pairs.add_argument("--margin", type=float, metavar="M", help="acceptable increase of the loss; default 0.004")
    pairs.add_argument("--confidence", type=float, metavar="P", help="confidence of the intervals; default 0.95")
    pairs.add_argument(
        "--file", type=Path, metavar="FILE", help="record finished runs here; the same command continues from them"
    )
    parser.add_argument("--accelerator", default="auto", help="auto, cpu, cuda or mps; default auto")
    parser.add_argument(
        "--rounds", type=int, default=5, metavar="N", help="how often each precision is timed; default 5"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="plot the result: png, pdf or svg")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_run, parser=parser, default=default)


def _run(arguments: argparse.Namespace) -> int:
    try:
        found, said = run_with_one_line_errors(arguments, lambda: _compare(arguments))
    except KeyboardInterrupt:
        kept = f"Finished runs are in {arguments.file}; the same command continues from them"
        where = kept if arguments.file else "Nothing was kept"
        print(f"\nInterrupted. {where}.", file=sys.stderr)
        return 130
    if arguments.json:
        print_json({**found.as_dict(), "warnings": said})
        return 0
    print(found.text(terminal_columns()))
    if arguments.plot is not None:
        print(f"\nSaved the plot to {arguments.plot}.")
    print_warnings(said)
    return 0


def _compare(arguments: argparse.Namespace) -> PrecisionComparison:
    if arguments.plot is not None:
        check_picture(arguments.plot, "--plot")
    of_pairs = {name: getattr(arguments, name) for name in _OF_PAIRS if getattr(arguments, name) is not None}
    if of_pairs and arguments.steps is None:
        given = " and ".join(f"`{name}`" for name in of_pairs)
        raise ValueError(f"{given}: there are no paired runs without `steps`. Pass it too, or leave them out")
    module, data, others = _own(arguments) if arguments.module is not None else arguments.default.make(arguments)
    others |= of_pairs
    names = ("precisions", "steps", "accelerator", "rounds")
    try:
        found = compare_precisions(module, data, **{name: getattr(arguments, name) for name in names}, **others)
    except (MisconfigurationException, ModuleNotFoundError) as error:
        raise ValueError(" ".join([str(error), *getattr(error, "__notes__", ())])) from error
    if arguments.plot is not None:
        found.plot(arguments.plot)
    return found


def _own(arguments: argparse.Namespace) -> tuple[Callable[[], Any], Any, dict[str, Any]]:
    for name in arguments.default.options:
        if getattr(arguments, name) is not None:
            option = "--" + name.replace("_", "-")
            raise ValueError(f"{option} belongs to the demo's model. Leave it out, or leave --module out")
    make = import_function(arguments.module, "--module")
    made = make()
    if not isinstance(made, tuple) or len(made) not in (2, 3):
        raise ValueError(
            f"--module {arguments.module} must return (module, data) or (module, data, val_data), got"
            f" {f'{len(made)} values' if isinstance(made, tuple) else type(made).__name__}"
        )
    return lambda: make()[0], made[1], {"val_data": made[2] if len(made) == 3 else None}
