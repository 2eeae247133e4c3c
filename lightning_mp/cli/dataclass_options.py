"""A dataclass of settings whose fields are the options of a command."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, field, fields
from typing import Any, get_args


def setting(
    default: Any,
    help: str,
    *,
    group: str = "",
    metavar: str | None = None,
    read: Callable[[str], Any] | None = None,
    **only_with: Sequence[Any],
) -> Any:
    """A field of the dataclass."""
    about = {"help": help, "group": group, "metavar": metavar, "read": read, "only_with": only_with}
    return field(default=default, metadata=about)


def flag(name: str) -> str:
    """The option of a setting.

    >>> flag("batch_size")
    '--batch-size'
    """
    return "--" + name.replace("_", "-")


def add_options(cls: type[Any], groups: Mapping[str, Any]) -> None:
    """Adds an option for each field. One that was not given has no entry in the parsed namespace.

    >>> from dataclasses import dataclass
    >>> @dataclass
    ... class Settings:
    ...     batch_size: int = setting(8, "sequences per batch")
    >>> parser = argparse.ArgumentParser()
    >>> add_options(Settings, {"": parser})
    >>> parser.parse_args(["--batch-size", "4"]), parser.parse_args([])
    (Namespace(batch_size=4), Namespace())
    """
    for each in fields(cls):
        help = each.metadata["help"]
        if each.default not in (None, False, MISSING):
            help += f"; default {each.default}"
        options: dict[str, Any] = {"help": help, "default": argparse.SUPPRESS}
        kinds = get_args(each.type) or (each.type,)  # of a Literal its values
        if each.default is False:
            options["action"] = "store_true"
        elif isinstance(kinds[0], type):
            metavar = each.metadata["metavar"] or ("N" if kinds[0] in (int, float) else None)
            options |= {"type": each.metadata["read"] or kinds[0], "metavar": metavar}
        else:
            options["choices"] = kinds
        groups[each.metadata["group"]].add_argument(flag(each.name), **options)


def check_combinations(settings: Any) -> None:
    """Refuses a setting that would be without effect."""
    for each in fields(settings):
        for other, values in each.metadata["only_with"].items():
            if getattr(settings, each.name) != each.default and getattr(settings, other) not in values:
                raise ValueError(
                    f"{flag(each.name)} works only with {flag(other)} {' or '.join(map(str, values))}, and that is "
                    f"{getattr(settings, other)}: change one of the two."
                )
