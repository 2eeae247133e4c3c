"""What a policy resolved to, as a table: plain text, or with rich where that is installed."""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec

import torch
from typing_extensions import override

from lightning_mp.ground.core.text_columns import aligned
from lightning_mp.ground.modules.names import numbers_as_stars
from lightning_mp.training.policy.operations import FAMILIES, PRODUCTS_WITH_A_VECTOR, by_autocast, operations_named
from lightning_mp.training.policy.rules import LOW, Dtype, Rule, dtype_name


@dataclass(frozen=True)
class PolicyModule:
    """What a policy says about one module."""

    name: str
    class_name: str
    operation: str | None
    has_parameters: bool
    rule: int | None
    dtype: Dtype | None


@dataclass(frozen=True)
class ResolvedPolicy:
    """A policy and what it applies to in one model; ``print`` shows it as a table."""

    rules: tuple[Rule, ...]
    modules: tuple[PolicyModule, ...]
    operations: Mapping[str, int]

    @override
    def __str__(self) -> str:
        return plain_table(self)

    def operation_dtype(self, operation: str) -> Dtype | None:
        """What an operation runs in where autocast is on; None if no rule is about it."""
        number = self.operations.get(operation)
        return self.rules[number].dtype if number is not None else None

    def leaves_to_autocast(self, operation: str, device_type: str) -> bool:
        """Whether a rule to 16 bit covers an operation without naming it, and autocast on this device type has it fp32.

        That is so for the product of a matrix and a vector. Its 16-bit result would be combined with fp32 vectors, as
        never without a policy: in the power iteration of ``spectral_norm``, say. Only inputs of two dtypes are cast.

        >>> from lightning_mp import PrecisionPolicy
        >>> policy = PrecisionPolicy([("mv", "low"), ("matmuls", "low")]).resolve(torch.nn.Identity())
        >>> policy.leaves_to_autocast("addmv", "cpu"), policy.leaves_to_autocast("mv", "cpu")
        (True, False)
        """
        number = self.operations.get(operation)
        if number is None or operation not in PRODUCTS_WITH_A_VECTOR or by_autocast(operation, device_type) is not None:
            return False
        return self.rules[number].dtype != torch.float32 and not self.is_named(operation)

    def is_named(self, operation: str) -> bool:
        """Whether the rule about an operation names it alone, and no family or pattern."""
        return operations_named(str(self.rules[self.operations[operation]].pattern)) == (operation,)

    def compute_dtype(self, module: PolicyModule) -> Dtype:
        """What a module's own weights are used in: its rule's fp32, else its operation's dtype, else its rule's.

        What no rule is about counts as :data:`~lightning_mp.training.policy.rules.LOW`.
        """
        number = self.deciding_rule(module)
        return self.rules[number].dtype if number is not None else LOW

    def deciding_rule(self, module: PolicyModule) -> int | None:
        """Number, from 0, of the rule that :meth:`compute_dtype` follows; None if no rule is about the module."""
        if module.dtype == torch.float32 or module.operation is None:
            return module.rule
        number = self.operations.get(module.operation)
        return module.rule if number is None or self.rules[number].dtype == LOW else number

    def modules_not_used_in(self, dtype: torch.dtype) -> tuple[str, ...]:
        """Names of the modules whose own weights are used in another dtype, where :data:`LOW` is this 16-bit dtype."""
        return tuple(m.name for m in self.modules if m.has_parameters and self.compute_dtype(m) not in (LOW, dtype))


HEAD = ("what", "rule", "dtype")
_MOST_OPERATIONS = 6
_SHOWN_OPERATIONS = 4


def table_rows(policy: "ResolvedPolicy") -> list[tuple[str, str, str]]:
    """One row per rule and group of like-named modules, or per rule and its operations, in the order of the rules.

    Modules that follow a module above them have no row; names that differ only in numbers share one.
    """
    rows = []
    for number, rule in enumerate(policy.rules):
        found = _operation_texts(policy, number) if rule.kind == "op" else _module_texts(policy, number)
        rows += [(text, f"{number + 1} {rule.text!r}", dtype_name(rule.dtype)) for text in found]
    rows.append(("everything else", "-", "as autocast has it"))
    return rows


def plain_table(policy: "ResolvedPolicy") -> str:
    """The table as text."""
    head, *rows = aligned([HEAD, *table_rows(policy)], left=range(len(HEAD)))
    return "\n".join([head, "-" * max(map(len, (head, *rows))), *rows])


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
            groups.setdefault(numbers_as_stars(module.name), []).append(module)
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
