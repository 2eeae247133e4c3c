"""``lightning-mp bits``: what differs between two checkpoints, or two recorded runs."""

import argparse
import pickle
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from lightning_mp.ground.core.cli_text import print_json
from lightning_mp.training.checkpoints.atomic import is_complete
from lightning_mp.training.checkpoints.consolidate import read_folder
from lightning_mp.training.resume.differences import Difference, compare_checkpoints, kinds_in
from lightning_mp.training.resume.records import first_parting, read_records

_DESCRIPTION = """\
Compare two checkpoints of the same step, or two files written by ExactResume(record=...), bit by bit. For checkpoints
(single files or sharded folders), print what differs: weights, masters, optimizer state, loss scaler, counters, random
state, position in the data. For recorded runs, print the first step at which they diverge.

The exit code is 0 if they are equal and 1 if they differ."""

_EXAMPLES = """\
examples:
  lightning-mp bits uninterrupted/last.ckpt resumed/last.ckpt
  lightning-mp bits uninterrupted.jsonl resumed.jsonl"""

_RECORD = ".jsonl"


def fill_bits(parser: argparse.ArgumentParser) -> None:
    """Gives the parser of ``bits`` its options."""
    parser.description, parser.epilog = _DESCRIPTION, _EXAMPLES
    parser.add_argument("first", type=Path, help="a checkpoint or a .jsonl file")
    parser.add_argument("second", type=Path, help="the same from another run")
    parser.add_argument("--trust", action="store_true", help="load files with arbitrary objects, which can run code")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_run, parser=parser)


def _run(arguments: argparse.Namespace) -> int:
    paths = (arguments.first, arguments.second)
    missing = [path for path in paths if not path.exists()]
    if missing:
        arguments.parser.error(f"{missing[0]} does not exist")
    recorded = [path.suffix == _RECORD for path in paths]
    if recorded[0] != recorded[1]:
        arguments.parser.error("one is a .jsonl record and the other is not; give two of a kind")
    try:
        return _compare_records(arguments, paths) if all(recorded) else _compare_checkpoints(arguments, paths)
    except ValueError as error:
        arguments.parser.error(str(error))
        raise


def _compare_records(arguments: argparse.Namespace, paths: tuple[Path, Path]) -> int:
    parting = first_parting(*map(read_records, paths))
    if arguments.json:
        print_json({"equal": not parting.kinds, **vars(parting)})
    elif parting.kinds:
        print(f"different from step {parting.step}, batch {parting.batch}: first the {parting.kinds[0]}")
        print(f"in that batch: {', '.join(parting.kinds)}")
    else:
        print(f"equal: {parting.num_compared:,} batches")
    return int(bool(parting.kinds))


def _compare_checkpoints(arguments: argparse.Namespace, paths: tuple[Path, Path]) -> int:
    first, second = (_load(path, trust=arguments.trust) for path in paths)
    steps = first.get("global_step"), second.get("global_step")
    if steps[0] != steps[1]:
        arguments.parser.error(f"the checkpoints are of steps {steps[0]} and {steps[1]}; compare two of the same step")
    found = compare_checkpoints(first, second)
    if arguments.json:
        print_json({"equal": not found, "differences": [vars(difference) for difference in found]})
    elif found:
        print(f"different, first in {found[0]}")
        for kind, group in groupby(found, key=lambda difference: difference.kind):
            print(f"  {_summary(kind, list(group))}")
    else:
        print("equal, in elements: " + ", ".join(f"{kind} {count:,}" for kind, count in kinds_in(first).items()))
    return int(bool(found))


def _summary(kind: str, differences: list[Difference]) -> str:
    elements = sum(difference.num_different for difference in differences)
    largest = max((d.largest for d in differences if d.largest is not None), default=None)
    text = f"{kind}: {elements:,} elements in {len(differences):,} values"
    return text if largest is None else f"{text}, by {largest:.3g} at most"


def _load(path: Path, *, trust: bool) -> Mapping[str, Any]:
    """Raises ValueError if it is no checkpoint."""
    if path.is_file() and not is_complete(path):
        raise ValueError(f"{path} is not a checkpoint, or it ends too early")
    try:
        loaded = (
            read_folder(path, weights_only=not trust)
            if path.is_dir()
            else torch.load(path, map_location="cpu", weights_only=not trust)
        )
    except pickle.UnpicklingError:
        raise ValueError(
            f"{path} holds objects that can run code when they are loaded; add --trust if you trust it"
        ) from None
    except (OSError, RuntimeError, EOFError) as error:
        raise ValueError(f"{path} is not a readable checkpoint: {str(error).splitlines()[0]}") from None
    if not isinstance(loaded, Mapping) or "state_dict" not in loaded:
        raise ValueError(f"{path} is not a checkpoint of a Trainer: it has no state_dict")
    return loaded
