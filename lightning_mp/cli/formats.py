"""``lightning-mp formats``: the table of number formats."""

import argparse
import math
from typing import Any

from lightning_mp.ground.core.bit_layouts import FORMATS, NumberFormat
from lightning_mp.ground.core.cli_text import print_json, print_table

_DESCRIPTION = """\
Range and precision of each number format, computed from its exponent and mantissa bits (exp+man). Below the smallest
normal number, precision is lost bit by bit; magnitudes up to half the smallest subnormal number round to 0. Digits are
decimal; epsilon is the distance from 1 to the next larger number."""

_EXAMPLES = """\
examples:
  lightning-mp formats
  lightning-mp formats --json"""

_FIGURES = (
    *("name", "bits", "exponent_bits", "mantissa_bits", "storage_bits"),
    *("largest_finite", "smallest_normal", "smallest_subnormal", "epsilon", "source"),
)


def fill_formats(parser: argparse.ArgumentParser) -> None:
    """Gives the parser of ``formats`` its options."""
    parser.description, parser.epilog = _DESCRIPTION, _EXAMPLES
    parser.add_argument("--json", action="store_true", help="print JSON, with the source of each format")
    parser.set_defaults(run=_run, parser=parser)


def _run(arguments: argparse.Namespace) -> int:
    if arguments.json:
        print_json({"formats": [_as_json(row) for row in FORMATS.values()]})
        return 0
    header = ("format", "bits", "exp+man", "largest", "min normal", "subnormal", "digits", "epsilon")
    rows = [
        (
            row.name,
            str(row.bits),
            f"{row.exponent_bits}+{row.mantissa_bits}",
            _short(row.largest_finite),
            _short(row.smallest_normal),
            _short(row.smallest_subnormal),
            f"{_digits(row):.1f}",
            _short(row.epsilon),
        )
        for row in FORMATS.values()
    ]
    print_table(header, rows)
    return 0


def _short(value: float) -> str:
    return f"{value:g}" if 1 <= value < 1e6 else f"{value:.2e}"


def _digits(row: NumberFormat) -> float:
    return row.significant_bits * math.log10(2)


def _as_json(row: NumberFormat) -> dict[str, Any]:
    dtype = None if row.torch_name is None else f"torch.{row.torch_name}"
    return {name: getattr(row, name) for name in _FIGURES} | {"decimal_digits": _digits(row), "torch_dtype": dtype}
