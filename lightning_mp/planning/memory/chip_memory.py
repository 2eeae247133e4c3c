"""How much memory accelerators have.

The figures of ``chip_memory.csv`` are in GB, as the datasheet of each chip in ``flops/peak_flops.csv`` prints them;
where a chip is sold in more than one size, the larger one. A GB is taken as 10^9 bytes: most vendors mean 2^30, and
ECC, driver and firmware take a part of that.
"""

import csv
from functools import lru_cache
from importlib import resources

from lightning_mp.core.arguments import positive_number

_LEAST_BYTES = 1e6


@lru_cache(maxsize=1)
def _table() -> dict[str, int]:
    text = resources.files("lightning_mp.planning.memory").joinpath("chip_memory.csv").read_text(encoding="utf-8")
    return {row["chip"]: int(row["gigabytes"]) * 10**9 for row in csv.DictReader(text.splitlines())}


def chips_by_memory() -> dict[int, list[str]]:
    """Names of chips by their bytes of memory, the smallest first.

    >>> chips_by_memory()[80 * 10**9][:2]
    ['A100', 'A800']
    """
    found: dict[int, list[str]] = {}
    for chip, size in sorted(_table().items(), key=lambda row: row[1]):
        found.setdefault(size, []).append(chip)
    return found


def chip_memory_bytes(chip: str) -> int | None:
    """Bytes of memory of a chip by its short name; None where it is not in the table.

    >>> chip_memory_bytes("H100 SXM"), chip_memory_bytes("A5000")
    (80000000000, None)
    """
    return _table().get(chip)


def check_memory_bytes(memory_bytes: float) -> None:
    """Refuses gigabytes that were given as bytes.

    >>> check_memory_bytes(80)
    Traceback (most recent call last):
    ...
    ValueError: `memory_bytes` of 80 is less than a megabyte. Give 80e9 for 80 GB.
    """
    positive_number(memory_bytes, "memory_bytes", unit="bytes")
    if memory_bytes < _LEAST_BYTES:
        size = f"{memory_bytes:g}"
        raise ValueError(f"`memory_bytes` of {size} is less than a megabyte. Give {size}e9 for {size} GB.")
