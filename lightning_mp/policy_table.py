"""What a policy resolved to, as a table: plain text, or with rich where that is installed."""

import re
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING

from lightning_mp.policy_operations import FAMILIES
from lightning_mp.policy_rules import dtype_name

if TYPE_CHECKING:
    from lightning_mp.policy import PolicyModule, ResolvedPolicy

__all__ = ["plain_table", "show", "table_rows"]

HEAD = ("what", "rule", "dtype")
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
_MOST_OPERATIONS = 6
_SHOWN_OPERATIONS = 4


def table_rows(policy: "ResolvedPolicy") -> list[tuple[str, str, str]]:
    """One row per rule and group of like-named modules, or per rule and its operations, in the order of the rules.

    Modules that follow a module above them have no row of their own; names that differ only in numbers share one.
    """
    rows = []
    for number, rule in enumerate(policy.rules):
        found = _operation_texts(policy, number) if rule.kind == "op" else _module_texts(policy, number)
        rows += [(text, f"{number + 1} {rule.text!r}", dtype_name(rule.dtype)) for text in found]
    rows.append(("everything else", "-", "as autocast has it"))
    return rows


def plain_table(policy: "ResolvedPolicy") -> str:
    """The table as text."""
    rows = [HEAD, *table_rows(policy)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEAD))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines.insert(1, "-" * (sum(widths) + 2 * (len(HEAD) - 1)))
    return "\n".join(lines)


def show(policy: "ResolvedPolicy") -> None:
    """Prints the table to standard output."""
    if find_spec("rich") is None:
        sys.stdout.write(f"{plain_table(policy)}\n")
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(*HEAD, title="Precision policy")
    for row in table_rows(policy):
        table.add_row(*row)
    Console(markup=False).print(table)


def _module_texts(policy: "ResolvedPolicy", number: int) -> Iterator[str]:
    by_name = {module.name: module for module in policy.modules}
    groups: dict[str, list[PolicyModule]] = {}
    for module in policy.modules:
        if module.rule == number and not _follows_its_parent(module, by_name):
            groups.setdefault(_NUMBER.sub("*", module.name), []).append(module)
    for pattern, modules in groups.items():
        first = modules[0].name or "(the model)"
        yield first if len(modules) == 1 else f"{pattern} ({len(modules)} modules)"


def _follows_its_parent(module: "PolicyModule", by_name: dict[str, "PolicyModule"]) -> bool:
    parent = by_name.get(module.name.rpartition(".")[0]) if module.name else None
    return parent is not None and parent.rule == module.rule


def _operation_texts(policy: "ResolvedPolicy", number: int) -> Iterator[str]:
    operations = [name for name, first in policy.operations.items() if first == number]
    if len(operations) <= _MOST_OPERATIONS:
        yield from [", ".join(operations)] if operations else []
        return
    family = next((name for name, members in FAMILIES.items() if set(members) >= set(operations)), "operations")
    yield f"{family}: {', '.join(operations[:_SHOWN_OPERATIONS])} and {len(operations) - _SHOWN_OPERATIONS} more"
