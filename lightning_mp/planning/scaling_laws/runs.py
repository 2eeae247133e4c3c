"""Finished runs to fit: parameters, tokens and final loss, read from a CSV file or from records."""

import csv
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_mp.ground.core.arguments import positive_number
from lightning_mp.ground.core.quantities import format_quantity, parse_flops, parse_quantity
from lightning_mp.ground.flops.chinchilla import FLOPS_PER_PARAMETER_AND_TOKEN

_COLUMNS = {
    "parameters": ("parameters", "params", "n", "model_size"),
    "tokens": ("tokens", "d", "training_tokens"),
    "flops": ("flops", "flop", "c", "compute", "training_flops", "training_flop"),
    "loss": ("loss", "l", "final_loss"),
}
_DELIMITERS = ",;\t"
_LARGEST_DISAGREEMENT = 2.0
# Wide of every published run, and yet 15T tokens in billions (15,000) or 500B parameters in millions are outside.
_FEWEST_PARAMETERS, _FEWEST_TOKENS = 1e3, 1e5
_TOKENS_PER_PARAMETER = (1e-3, 1e7)


@dataclass(frozen=True, slots=True)
class Run:
    """One finished run.

    Raises:
        ValueError: A number is not positive and finite.

    Example:
        >>> Run(parameters=70e9, tokens=1.4e12, loss=1.97).flops
        5.88e+23
    """

    parameters: float  #: N.
    tokens: float  #: D, each counted as often as it was trained on.
    loss: float  #: Final loss, in nats per token.

    def __post_init__(self) -> None:
        for name in ("parameters", "tokens", "loss"):
            positive_number(getattr(self, name), name, "Run")

    @property
    def flops(self) -> float:
        """C = 6 N D."""
        return FLOPS_PER_PARAMETER_AND_TOKEN * self.parameters * self.tokens


RunsLike = str | Path | Iterable[Run | Mapping[str, Any]]
"""Runs, or the CSV file that they are in."""


def read_runs(runs: RunsLike) -> tuple[Run, ...]:
    """Reads runs from a CSV file with a header, or from records with the same names.

    The columns are ``parameters`` (or ``params``, ``n``, ``model_size``), ``loss`` (``l``, ``final_loss``), and one of
    ``tokens`` (``d``, ``training_tokens``) and ``flops`` (``c``, ``compute``, ``training_flops``), which gives
    D = C / 6 N. If both are given, ``tokens`` is used, and the two must agree to within a factor of two. Case and other
    columns do not matter. Values are separated by commas, semicolons or tabs, like the header; the decimal separator is
    a point.

    Args:
        runs: the path of a CSV file, or the records: mappings or :class:`Run`.

    Raises:
        ValueError: A column is missing, a value is not a positive finite number, or parameters or tokens are
            implausible, for example given in billions; the message names the row.
        FileNotFoundError: There is no such file.

    Example:
        >>> read_runs([{"N": "100M", "FLOPs": 1.2e18, "loss": 3.2}])
        (Run(parameters=100000000.0, tokens=2000000000.0, loss=3.2),)
    """
    if isinstance(runs, str | Path):
        return tuple(_read_csv(Path(runs)))
    found = []
    for number, run in enumerate(runs, start=1):
        place = f"run {number}"
        found.append(run if isinstance(run, Run) else _run(_named(run, place), place))
        _check_units(found[-1], place)
    return tuple(found)


def _read_csv(path: Path) -> Iterator[Run]:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            header = file.readline()
            file.seek(0)
            reader = csv.DictReader(file, strict=True, delimiter=max(_DELIMITERS, key=header.count))
            if not reader.fieldnames:
                raise ValueError(f"{path} is empty. Its first line must name the columns: parameters, tokens, loss.")
            _named(dict.fromkeys(reader.fieldnames, ""), f"{path}")
            for row in reader:
                place = f"{path}, line {reader.line_num}"
                if None in row or None in row.values():
                    raise ValueError(f"{place} does not have as many values as the header: {len(reader.fieldnames)}.")
                run = _run(_named(row, place), place)
                _check_units(run, place)
                yield run
    except (csv.Error, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not a CSV file: {error}.") from error


def _named(record: Mapping[str, Any], place: str) -> dict[str, Any]:
    """The values that matter, under our names."""
    by_name = {str(name).strip().lower().replace(" ", "_"): value for name, value in record.items()}
    found = {}
    for column, names in _COLUMNS.items():
        present = [name for name in names if name in by_name]
        if len(present) > 1:
            raise ValueError(f"{place} has two columns for {column}: {' and '.join(present)}. Keep one.")
        if present:
            found[column] = by_name[present[0]]
    missing = [column for column in ("parameters", "loss") if column not in found]
    if "tokens" not in found and "flops" not in found:
        missing.append("tokens (or flops)")
    if missing:
        raise ValueError(
            f"{place} has no column {' and no column '.join(missing)}. Needed are parameters, loss, and tokens or "
            f"flops. Found: {', '.join(map(str, record)) or 'nothing'}."
        )
    return found


def _run(record: Mapping[str, Any], place: str) -> Run:
    try:
        numbers = {
            name: parse_flops(value, name) if name == "flops" else parse_quantity(value, name)
            for name, value in record.items()
        }
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from None
    parameters, flops = numbers["parameters"], numbers.get("flops")
    tokens = numbers.get("tokens")
    if tokens is None:
        assert flops is not None
        tokens = flops / (FLOPS_PER_PARAMETER_AND_TOKEN * parameters)
    run = Run(parameters=parameters, tokens=tokens, loss=numbers["loss"])
    if flops is not None and not 1 / _LARGEST_DISAGREEMENT < flops / run.flops < _LARGEST_DISAGREEMENT:
        raise ValueError(
            f"{place}: {format_quantity(flops)} FLOPs contradict 6 N D = {format_quantity(run.flops)}. "
            "Correct one of the columns, or leave flops out."
        )
    return run


def _check_units(run: Run, place: str) -> None:
    """Parameters and tokens are counted in ones, not in millions: a fit would silently take any unit."""
    for name, value, fewest in (
        ("parameters", run.parameters, _FEWEST_PARAMETERS),
        ("tokens", run.tokens, _FEWEST_TOKENS),
    ):
        if value < fewest:
            raise ValueError(
                f"{place}: {value:g} {name} are too few for a run of a scaling law, which has at least {fewest:g}. Give"
                f" {name} in full: for billions write {value:g}B or {value:g}e9, for millions {value:g}M. With flops,"
                " give single operations: 1 PF-day is 8.64e19."
            )
    fewest, most = _TOKENS_PER_PARAMETER
    if not fewest <= run.tokens / run.parameters <= most:
        raise ValueError(
            f"{place}: {format_quantity(run.tokens)} tokens for {format_quantity(run.parameters)} parameters are"
            f" {run.tokens / run.parameters:.3g} per parameter, and {fewest:g} to {most:g} are expected. Give both"
            " in full, not one of them in millions or billions."
        )
