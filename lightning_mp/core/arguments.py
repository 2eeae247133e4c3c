"""Numbers that a caller gives, checked: what was got, what is allowed, and what to do, in one wording for all."""

import math
from numbers import Integral, Real

from lightning_mp.core.quantities import parse_quantity

__all__ = ["positive_number", "whole_number", "whole_tokens"]


def whole_number(
    value: object, argument: str, owner: str = "", *, minimum: int = 1, unit: str = "", hint: str = ""
) -> int:
    """The value as an ``int``; True, strings and 2.0 are none.

    Args:
        value: what was got.
        argument: its name.
        owner: the class or function whose argument it is.
        minimum: the smallest that is allowed.
        unit: what is counted, as in "a whole number of samples".
        hint: a further sentence.

    Raises:
        ValueError: if it is not a whole number of ``minimum`` or more.

    Example:
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

    Args:
        value: what was got.
        argument: its name.
        owner: the class or function whose argument it is.
        unit: what it measures, as in "a positive finite number of seconds".
        hint: a further sentence.

    Raises:
        ValueError: if it is not a positive finite number.

    Example:
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

    Raises:
        ValueError: if it is not a whole number from 1.

    Example:
        >>> whole_tokens("1.5B", "tokens", "ChinchillaBudget"), whole_tokens(2e9, "tokens", "ChinchillaBudget")
        (1500000000, 2000000000)
    """
    number = parse_quantity(value, argument) if isinstance(value, str) else value
    if isinstance(number, float) and number.is_integer():
        number = int(number)
    return whole_number(number, argument, owner, unit="tokens")


def _refusal(value: object, argument: str, owner: str, allowed: str, hint: str) -> ValueError:
    more = f" {hint}" if hint else ""
    if owner:
        return ValueError(f"{owner}({argument}={value!r}): it must be {allowed}.{more}")
    return ValueError(f"`{argument}` must be {allowed}, got {value!r}.{more}")
