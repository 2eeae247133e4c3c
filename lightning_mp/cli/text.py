"""What ``lightning-mp plan`` and ``lightning-mp fit`` share: tables, JSON, and warnings and errors of one line."""

import argparse
import json
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints columns under their names, the first aligned left, the others right."""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    for row in (header, *rows):
        first, *rest = (
            text.ljust(width) if column == 0 else text.rjust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        )
        print("  " + "  ".join((first, *rest)).rstrip())


def print_json(content: Mapping[str, Any]) -> None:
    """Prints one JSON object, in which every number is finite."""
    print(json.dumps(content, indent=2, allow_nan=False))


def run_with_one_line_errors(
    parser: argparse.ArgumentParser, options: Mapping[str, str], work: Callable[[], Any]
) -> tuple[Any, list[str]]:
    """Runs the work of a command; wrong input ends the process with one line that speaks of options.

    An error of the user's own module, or of what it calls, keeps its traceback.

    Args:
        parser: Says the error and ends with code 2.
        options: The option behind each argument of the Python function.
        work: What may raise ``ValueError`` or ``OSError``.

    Returns:
        The result, and the warnings that were given, each once.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        try:
            result = work()
        except (OSError, ValueError) as error:
            if not _is_of_this_package(error):
                raise
            if isinstance(error, OSError) and error.filename is not None:
                parser.error(f"{error.filename} cannot be read or written ({error.strerror})")
            parser.error(speak_of_options(str(error), options))
    said = [speak_of_options(str(warning.message), options) for warning in caught]
    return result, list(dict.fromkeys(said))


def _is_of_this_package(error: Exception) -> bool:
    """Whether it was raised here, or in Python's library as this package called it."""
    callers = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    roots = [name.partition(".")[0] for name in callers]
    called_last = roots[len(roots) - roots[::-1].index("lightning_mp") :]
    return all(root in sys.stdlib_module_names for root in called_last)


def print_warnings(said: Sequence[str]) -> None:
    """Prints warnings where they do not mix with the result."""
    for text in said:
        print(f"warning: {text}", file=sys.stderr)


def speak_of_options(message: str, options: Mapping[str, str]) -> str:
    """A message in one line, with the option behind each argument of the Python function in place of its name."""
    for name, option in options.items():
        message = message.replace(f"`{name}`", option)
    return " ".join(message.split())
