"""What the verbs share: tables and paragraphs as wide as the terminal, JSON, warnings, and errors of one line."""

import argparse
import json
import shutil
import sys
import textwrap
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from lightning_mp.ground.core.text_columns import aligned

_WIDEST = 120
_PIPED = 80
# Of arguments of Python functions whose option has another name.
_OTHER_OPTIONS = {
    "parameters": "--params",
    "model": "--params",
    "vocabulary": "--vocab",
    "ffn_width": "--ffn",
    "context_tokens": "--context",
    "bootstrap_samples": "--samples",
    "precisions": "--precision",
    "data": "--module",
    "val_data": "a third value from --module",
}


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints columns under their names, the first aligned left, the others right.

    On a terminal, columns for which there is no room continue below, beside the first one again. A file or a pipe gets
    every row in one line.
    """
    print("\n".join(table_lines([header, *rows], terminal_columns())))


def table_lines(rows: Sequence[Sequence[str]], room: int | None = None, left: Sequence[str] = ()) -> list[str]:
    r"""A table as lines.

    >>> print("\n".join(table_lines([("law", "loss", "range"), ("kaplan", "2.31", "inside")], room=14)))
      law     loss
      kaplan  2.31
    <BLANKLINE>
      law      range
      kaplan  inside
    """
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines: list[str] = []
    for columns in _fitting(widths, room):
        lines += [""] if lines else []
        at_left = [place for place, column in enumerate(columns) if column == 0 or rows[0][column] in left]
        lines += [f"  {line}" for line in aligned([[row[column] for column in columns] for row in rows], at_left)]
    return lines


def print_facts(facts: Sequence[tuple[str, str]], width: int = 20, indent: str = "  ") -> None:
    """Prints a name and a text in each line; longer texts continue below themselves."""
    print(listed_facts(facts, width, indent))


def listed_facts(facts: Sequence[tuple[str, str]], width: int, indent: str = "") -> str:
    """The same as one string."""
    lines = []
    for name, text in facts:
        first = f"{indent}{name:<{width}}  "
        lines.append(_filled(text, text_columns(), first, len(first) * " "))
    return "\n".join(lines)


def print_paragraph(text: str, indent: str = "") -> None:
    """Prints filled text; newlines before and after it stay."""
    before, after = len(text) - len(text.lstrip("\n")), len(text) - len(text.rstrip("\n"))
    print("\n" * before + _filled(text, text_columns(), indent, indent) + "\n" * after)


def _filled(text: str, columns: int, first: str, others: str) -> str:
    return textwrap.fill(
        " ".join(text.split()),
        columns,
        initial_indent=first,
        subsequent_indent=others,
        break_long_words=False,
        break_on_hyphens=False,
    )


def text_columns() -> int:
    """The terminal's, at most 120; 80 in a file or a pipe."""
    return min(terminal_columns() or _PIPED, _WIDEST)


def terminal_columns() -> int | None:
    """None where the output goes elsewhere."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def _fitting(widths: Sequence[int], room: int | None) -> list[list[int]]:
    """Columns that are printed beside each other."""
    blocks: list[list[int]] = [[0]]
    for column in range(1, len(widths)):
        beside = [*blocks[-1], column]
        if room is None or len(blocks[-1]) == 1 or sum(widths[each] + 2 for each in beside) <= room:
            blocks[-1] = beside
        else:
            blocks.append([0, column])
    return blocks


def print_json(content: Mapping[str, Any]) -> None:
    """Prints one JSON object, in which every number is finite."""
    print(json.dumps(content, indent=2, allow_nan=False))


def run_with_one_line_errors(arguments: argparse.Namespace, work: Callable[[], Any]) -> tuple[Any, list[str]]:
    """Runs the work of a command; wrong input ends the process with one line that speaks of options.

    An error of the user's own module, or of what it calls, keeps its traceback.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        try:
            result = work()
        except (OSError, ValueError) as error:
            if not _is_of_this_package(error):
                raise
            if isinstance(error, OSError) and error.filename is not None:
                arguments.parser.error(f"{error.filename} cannot be read or written ({error.strerror})")
            arguments.parser.error(name_options(str(error), vars(arguments)))
    said = [name_options(str(warning.message), vars(arguments)) for warning in caught]
    return result, list(dict.fromkeys(said))


def answer_command(
    arguments: argparse.Namespace,
    work: Callable[[argparse.Namespace], Any],
    as_json: Callable[[Any], Mapping[str, Any]],
    show: Callable[[Any, argparse.Namespace], None],
) -> int:
    """The whole of a command that computes one answer and prints it, with ``--json`` as JSON."""
    answer, said = run_with_one_line_errors(arguments, lambda: work(arguments))
    if arguments.json:
        print_json({**as_json(answer), "warnings": said})
    else:
        show(answer, arguments)
        print_warnings(said)
    return 0


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


def name_options(message: str, arguments: Iterable[str]) -> str:
    """A message in one line, with the option behind each argument of the Python function in place of its name."""
    for name in {*arguments, *_OTHER_OPTIONS}:
        message = message.replace(f"`{name}`", _OTHER_OPTIONS.get(name, "--" + name.replace("_", "-")))
    return " ".join(message.split())
