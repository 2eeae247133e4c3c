"""Arguments from a caller, checked: what was got, what is allowed, and what to do, in one wording."""

import math
from collections.abc import Callable, Iterable
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from lightning_mp.ground.core.quantities import parse_quantity


def whole_number(
    value: object, argument: str, owner: str = "", *, minimum: int = 1, unit: str = "", hint: str = ""
) -> int:
    """The value as an ``int``; True, strings and 2.0 are none.

    >>> whole_number(0, "window", "MFUMonitor", unit="optimizer steps")
    Traceback (most recent call last):
    ...
    ValueError: MFUMonitor(window=0): it must be a whole number of optimizer steps, 1 or more.
    >>> whole_number(2.5, "stages")
    Traceback (most recent call last):
    ...
    ValueError: `stages` must be a whole number, 1 or more, got 2.5.
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or value < minimum:
        counted = f" of {unit}" if unit else ""
        raise _refusal(value, argument, owner, f"a whole number{counted}, {minimum} or more", hint)
    return int(value)


def positive_number(value: object, argument: str, owner: str = "", *, unit: str = "", hint: str = "") -> float:
    """The value, unless it is True, a string, not finite, zero or below.

    >>> positive_number(float("nan"), "timeout_seconds", "RankWatchdog", unit="seconds", hint="For instance 600.")
    Traceback (most recent call last):
    ...
    ValueError: RankWatchdog(timeout_seconds=nan): it must be a positive finite number of seconds. For instance 600.
    """
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 < float(value) < math.inf:
        measured = f" of {unit}" if unit else ""
        raise _refusal(value, argument, owner, f"a positive finite number{measured}", hint)
    number: float = value  # type: ignore[assignment]  # typeshed's float is no Real
    return number


def whole_tokens(value: object, argument: str, owner: str) -> int:
    """A number of tokens, given as a number or as text such as "1.5B".

    >>> whole_tokens("1.5B", "tokens", "ChinchillaBudget"), whole_tokens(2e9, "tokens", "ChinchillaBudget")
    (1500000000, 2000000000)
    """
    return whole_quantity(value, argument, owner, unit="tokens")


def whole_quantity(value: object, argument: str, owner: str = "", *, unit: str = "") -> int:
    """A count, given as a number or as text such as "1.5B"; 2.0 is whole.

    >>> whole_quantity("16k", "gpus"), whole_quantity(124e6, "parameters")
    (16000, 124000000)
    """
    number = parse_quantity(value, argument) if isinstance(value, str) else value
    if isinstance(number, float) and number.is_integer():
        number = int(number)
    return whole_number(number, argument, owner, unit=unit)


def positive_quantity(value: object, argument: str) -> float:
    """A number, or text such as "1.5B"; an ``int`` stays one.

    >>> positive_quantity("7B", "parameters"), positive_quantity(7, "parameters")
    (7000000000.0, 7)
    """
    return parse_quantity(value, argument) if isinstance(value, str) else positive_number(value, argument)


def true_or_false(value: object, argument: str, owner: str = "", *, hint: str = "") -> bool:
    """The value, unless it is anything else than True or False: the string "false" would be true.

    >>> true_or_false("no", "guard", "OverflowMonitor")
    Traceback (most recent call last):
    ...
    ValueError: OverflowMonitor(guard='no'): it must be True or False.
    """
    if not isinstance(value, bool):
        raise _refusal(value, argument, owner, "True or False", hint)
    return value


def function_or_none(
    value: Callable[..., Any] | None, argument: str, owner: str, signature: str
) -> Callable[..., Any] | None:
    """The function.

    >>> function_or_none(3, "split", "MicroBatchOnOOM", "from a batch and a size to a list of batches")
    Traceback (most recent call last):
    ...
    ValueError: MicroBatchOnOOM(split=3): it must be a function from a batch and a size to a list of batches, or
    None.
    """
    if value is not None and not callable(value):
        raise _refusal(value, argument, owner, f"a function {signature}, or None", "")
    return value


def quantity_from(minimum: float, value: object, argument: str) -> float:
    """A number that may be as small as ``minimum``, or text such as "1.5B".

    >>> quantity_from(0, "2T", "inference_tokens"), quantity_from(0, 0, "inference_tokens")
    (2000000000000.0, 0)
    """
    number = parse_quantity(value, argument) if isinstance(value, str) else value
    if isinstance(number, bool) or not isinstance(number, Real) or not minimum <= float(number) < math.inf:
        raise ValueError(f"`{argument}` must be a finite number of at least {minimum:g}, got {value!r}.")
    checked: float = number  # type: ignore[assignment]  # typeshed's float is no Real
    return checked


def names_in(value: object, argument: str, owner: str, example: str) -> tuple[str, ...]:
    """The names; one alone may be given without a list.

    >>> names_in("SIGTERM", "signals", "StopAtBoundary", "['SIGTERM']")
    ('SIGTERM',)
    """
    names = [value] if isinstance(value, str) else list(value) if isinstance(value, Iterable) else [None]
    if not all(isinstance(name, str) for name in names):
        raise _refusal(value, argument, owner, f"a name or a list of names, such as {example}", "")
    return tuple(names)


def folder_or_none(value: object, argument: str, owner: str) -> Path | None:
    """The path of a folder."""
    if value is None:
        return None
    if not isinstance(value, str | Path):
        raise _refusal(value, argument, owner, "the path of a folder (a string or a pathlib.Path), or None", "")
    return Path(value)


def _refusal(value: object, argument: str, owner: str, allowed: str, hint: str) -> ValueError:
    more = f" {hint}" if hint else ""
    if owner:
        return ValueError(f"{owner}({argument}={value!r}): it must be {allowed}.{more}")
    return ValueError(f"`{argument}` must be {allowed}, got {value!r}.{more}")
