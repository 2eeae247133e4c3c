"""Parameters, tokens and FLOPs as people write them: read from "1.3B" or "1e21", and written back."""

import math
import re
from decimal import Decimal
from typing import SupportsFloat

_SUFFIXES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_NUMBER = re.compile(r"(?P<number>[+-]?(?:\d+(?:_\d+)*(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?)\s?(?P<suffix>[kKmMbBtT]?)")

Quantity = str | SupportsFloat
"""A number, or a text that these functions read."""


def parse_quantity(value: Quantity, name: str) -> float:
    """Reads a positive count, whatever way it was written."""
    number = _number(value, name)
    if not (number > 0 and math.isfinite(number)):
        raise ValueError(f"`{name}` must be a positive finite number, got {value!r}.")
    return number


_FLOP_UNITS = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18, "Z": 1e21, "Y": 1e24}
_FLOPS = re.compile(
    r"(?P<number>[^A-Za-z\s]+(?:[eE][+-]?\d+)?)\s?(?P<unit>[KMGTPEZY]?)(?P<kind>FLOPs?|F(LOPs?)?(/s)?-?days?)", re.I
)
_SECONDS_PER_DAY = 86_400


def parse_flops(value: Quantity, name: str) -> float:
    """Reads an amount of compute: a quantity, or one with the unit FLOP, or F-days for FLOP/s over days.

    >>> parse_flops("1e21", "flops"), parse_flops("1EFLOP", "flops"), parse_flops("5PF-days", "flops")
    (1e+21, 1e+18, 4.32e+20)
    >>> parse_flops("5 PFLOP/s-days", "flops")
    4.32e+20
    """
    match = _FLOPS.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        if isinstance(value, str) and "f" in value.lower().replace("inf", ""):
            raise ValueError(f"`{name}` cannot be read, got {value!r}. Write 1e21, 1EFLOP or 5PF-days.")
        return parse_quantity(value, name)
    days = _SECONDS_PER_DAY if "day" in match["kind"].lower() else 1
    return parse_quantity(match["number"], name) * _FLOP_UNITS[match["unit"].upper()] * days


def parse_fraction(value: Quantity, name: str) -> float:
    """Reads a share of a whole: a number over 0 and at most 1, or a percentage.

    >>> parse_fraction("40%", "mfu"), parse_fraction(0.4, "mfu")
    (0.4, 0.4)
    """
    if isinstance(value, str) and value.strip().endswith("%"):
        percent = _number(value.strip()[:-1], name)
        if not percent > 0:
            raise ValueError(f"`{name}` must be a positive finite number, got {value!r}.")
        share = percent / 100
    else:
        share = parse_quantity(value, name)
    if share > 1:
        meant = f" For {share:g}%, write {share / 100:g}." if share <= 100 and not str(value).endswith("%") else ""
        raise ValueError(f"`{name}` is a fraction of the whole, over 0 and at most 1, got {value!r}.{meant}")
    return share


_BYTE_UNITS = {"KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def parse_bytes(value: Quantity, name: str) -> float:
    """Reads an amount of memory: a quantity, or one with a unit, of which GB is 10^9 and GiB 2^30 bytes.

    >>> parse_bytes("80GB", "memory"), parse_bytes("1.5 GiB", "memory"), parse_bytes("40e9", "memory")
    (80000000000.0, 1610612736.0, 40000000000.0)
    """
    text = value.strip() if isinstance(value, str) else ""
    for unit, size in _BYTE_UNITS.items():
        if text.upper().endswith(unit):
            return parse_quantity(text[: -len(unit)], name) * size
    return parse_quantity(value, name)


def _number(value: Quantity, name: str) -> float:
    if isinstance(value, str):
        text = value.strip()
        match = _NUMBER.fullmatch(text)
        if match:
            return float(Decimal(match["number"]) * _SUFFIXES[match["suffix"].upper()])  # 8.03B is a whole number
        if text.lower().lstrip("+-") in ("nan", "inf", "infinity"):
            return float(text)
    elif not isinstance(value, bool):
        try:
            return float(value)
        except (TypeError, ValueError):
            pass  # refused below, with what is allowed
    raise ValueError(
        f"`{name}` cannot be read, got {value!r}. Write digits, optionally with K, M, B or T (thousand, million, 10^9,"
        " 10^12): 1.3B, 20e9 or 300_000_000."
    )


def format_quantity(value: float) -> str:
    """Three digits and K, M, B or T; powers of ten beyond 10^15.

    >>> format_quantity(1.3e9), format_quantity(21_350_000), format_quantity(926), format_quantity(5.76e23)
    ('1.3B', '21.4M', '926', '5.76e23')
    """
    rounded = float(f"{value:.3g}")
    if not 1 <= rounded < 1e16:
        return f"{value:.3g}".replace("e+", "e")
    suffix = next(name for name, size in reversed(_SUFFIXES.items()) if rounded >= size)
    return f"{rounded / _SUFFIXES[suffix]:.6g}{suffix}"


def format_share(share: float) -> str:
    """A share in percent: one decimal place, or two significant digits below 1 %.

    >>> format_share(0.4), format_share(0.00042), format_share(0.0)
    ('40.0%', '0.042%', '0.0%')
    """
    return f"{share:.1%}" if share >= 0.01 or not share else f"{100 * share:.2g}%"


def format_bytes(size: float) -> str:
    """Three digits and bytes, KiB, MiB or GiB: powers of 1024, as GPUs are sold and ``nvidia-smi`` counts.

    >>> format_bytes(80 * 1024**3), format_bytes(1536), format_bytes(12)
    ('80 GiB', '1.5 KiB', '12 bytes')
    """
    for power, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if size >= 1024**power:
            value = size / 1024**power
            return f"{value:.0f} {unit}" if value >= 1000 else f"{value:.3g} {unit}"
    return f"{size:.0f} bytes"
