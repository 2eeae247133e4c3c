"""Accelerators: generation, memory, and peak matmul rates, dense and per number format, each with its source.

The figures live in ``peak_flops.csv`` beside this file, in TFLOP/s as the datasheet prints them. Datasheets that print
tensor rates with 2:4 sparsity are halved there and say so. Consumer cards are listed at their rate with fp32
accumulation, which is what torch uses. Boards with two devices (GB200, MI250X) are listed per device, as torch sees
them. Memory is in GB, of 10^9 bytes here, in the larger size where a chip is sold in more than one: most vendors mean
2^30, and ECC, driver and firmware take a part of that. What a datasheet does not give is left empty, and using it is
an error: a wrong peak makes a wrong MFU that goes unnoticed.

The last column, ``checked``, is the month in which every rate of the row was looked up a second time, in published
text other than this table; see ``Chip.checked``.
"""

import csv
import re
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
from importlib import resources
from itertools import chain
from types import MappingProxyType

import torch

from lightning_mp.ground.core.number_formats import number_format
from lightning_mp.ground.core.precisions import format_of

_RATE_COLUMNS = ("fp32", "tf32", "bf16", "fp16", "fp8")
_SEPARATORS = re.compile(r"[\s_-]+")
_VENDOR_PREFIX = re.compile(r"^(NVIDIA|Tesla)\s+", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Chip:
    """An accelerator and its dense peaks."""

    name: str  #: Short name, such as "H100 SXM".
    #: Regular expression for the whole of ``torch.cuda.get_device_name()`` without its vendor prefix.
    device_name_pattern: str
    peak_flops: Mapping[str, float]
    """Dense peak in FLOP/s by format: fp32, tf32, bf16, fp16, fp8. Absent where unknown.

    fp32 is the rate of exact fp32 products: without tensor cores on NVIDIA, with the matrix cores on AMD.
    """
    source: str  #: The datasheet or whitepaper of the figures.
    #: Month, such as "2026-11", in which every figure was found again in published text: vendor pages, reviews, or the
    #: tables of other projects. There it stood as here up to rounding, or doubled where the text prints the rate with
    #: sparsity or with fp16 accumulation. Empty: entered from ``source``, not looked up again.
    checked: str = ""
    generation: str = ""  #: Of the vendor's designs, such as "Turing" or "Hopper".
    memory_bytes: int = 0  #: Of the largest version that is sold.

    def matches(self, device_name: str) -> bool:
        """Whether a device name, with or without its vendor prefix, means this chip."""
        bare = _VENDOR_PREFIX.sub("", device_name.strip())
        return any(
            re.fullmatch(pattern, bare, re.IGNORECASE) is not None
            for pattern in (self.device_name_pattern, re.escape(self.name))
        )


@lru_cache(maxsize=1)
def known_chips() -> tuple[Chip, ...]:
    """Every chip of the data file, in its order."""
    text = resources.files("lightning_mp.ground.flops").joinpath("peak_flops.csv").read_text(encoding="utf-8")
    return tuple(_chip_from_row(row) for row in csv.DictReader(text.splitlines()))


def find_chip(device_name: str) -> Chip | None:
    """The chip behind a device name, None when it is not in the table.

    Names are matched as a whole: a laptop, "Ti" or MIG variant of a known chip has a different peak and is not matched.

    Args:
        device_name: What ``torch.cuda.get_device_name()`` returns, or a chip's short name, with or without spaces and
            "RTX". A family means its first chip: "h100" is "H100 SXM".

    Raises:
        ValueError: it is not a string.

    Example:
        >>> find_chip("h100").name, find_chip("h100-pcie").name, find_chip("4090").name
        ('H100 SXM', 'H100 PCIe', 'RTX 4090')
        >>> find_chip("NVIDIA H100 80GB HBM3").name
        'H100 SXM'
        >>> find_chip("NVIDIA A100-SXM4-40GB MIG 1g.5gb") is None
        True
    """
    if not isinstance(device_name, str):
        raise ValueError(f"The name of a device must be a string, such as 'H100 SXM' or 'h100', got {device_name!r}.")
    wanted = _SEPARATORS.sub("", device_name.lower())
    by_device = (chip for chip in known_chips() if chip.matches(device_name))
    by_short_name = (chip for chip in known_chips() if wanted in _spellings(chip.name))
    return next(chain(by_device, by_short_name), None)


def chip_of(device: str) -> Chip:
    """A chip by its name, with or without spaces and "RTX", or the first of a family: "h100" is "H100 SXM"."""
    chip = find_chip(device)
    if chip is None:
        raise ValueError(
            f"No peak FLOP/s are known for the device {device!r}. {similar_chips(device)} For another, give the FLOPs "
            "themselves."
        )
    return chip


def similar_chips(device_name: str) -> str:
    """The known chips whose names resemble the given one, as a sentence; else where the table is.

    >>> similar_chips("h10")
    'Similar: H100 SXM, H100 PCIe, H100 NVL.'
    >>> similar_chips("abacus")
    'The known chips are in lightning_mp.planning.known_chips().'
    """
    wanted = _SEPARATORS.sub("", device_name.lower()).removeprefix("nvidia")
    whole = {chip.name: _SEPARATORS.sub("", chip.name.lower()) for chip in known_chips()}
    starts = [name for name, spelled in whole.items() if len(wanted) > 1 and spelled.startswith(wanted)]
    families = {spelling: chip.name for chip in reversed(known_chips()) for spelling in _spellings(chip.name)}
    close = [families[spelling] for spelling in get_close_matches(wanted, families, n=5, cutoff=0.5)]
    near = list(dict.fromkeys(starts or close))
    return f"Similar: {', '.join(near)}." if near else "The known chips are in lightning_mp.planning.known_chips()."


def _spellings(name: str) -> tuple[str, ...]:
    """Accepted forms of a chip's short name: all of it, its family, its number; "rtx" alone is not a family."""
    first, *rest = name.lower().split()
    family = (first,) if any(character.isdigit() for character in first) else ()
    number = ("".join(rest),) if first == "rtx" else ()
    return (_SEPARATORS.sub("", name.lower()), *family, *number)


def peak_flops(device_name: str, dtype: str | torch.dtype) -> float:
    """Dense peak of one device in FLOP/s, for matmuls whose inputs have the given format.

    Args:
        device_name: As in :func:`find_chip`.
        dtype: "fp32" (no tensor cores), "tf32", "bf16", "fp16" or "fp8", or a torch dtype. ``torch.float32`` means
            "fp32": a run with TF32 matmuls must pass "tf32".

    Raises:
        ValueError: The chip is not in the table, or has no figure for this format.

    Example:
        >>> peak_flops("NVIDIA A100-SXM4-80GB", torch.bfloat16) / 1e12
        312.0
        >>> peak_flops("Tesla T4", "bf16")
        Traceback (most recent call last):
        ...
        ValueError: No bf16 peak is known for T4. Known for it: fp32, fp16.
    """
    chip = find_chip(device_name)
    if chip is None:
        raise ValueError(
            f"No peak FLOP/s are known for the device {device_name!r}, so it has no MFU. {similar_chips(device_name)} "
            "For another device, pass the dense figure of its datasheet instead, as in "
            "MFUMonitor(peak_flops=...)."
        )
    column = rate_column(dtype)
    if column not in chip.peak_flops:
        raise ValueError(f"No {column} peak is known for {chip.name}. Known for it: {', '.join(chip.peak_flops)}.")
    return chip.peak_flops[column]


def dtype_on(chip: Chip, dtype: str | torch.dtype | None) -> str:
    """The format as given, or "bf16" when None, "fp16" on chips without bf16 units."""
    if dtype is None:
        dtype = "bf16" if "bf16" in chip.peak_flops else "fp16"
    peak_flops(chip.name, dtype)  # raises where none is known
    return rate_column(dtype)


def matmul_format(precision: str, *, tf32: bool = False) -> str | None:
    """The format that matrix products run in, of a Trainer's ``precision``; None if the name does not determine it.

    >>> matmul_format("16-true"), matmul_format("32-true", tf32=True), matmul_format("fp8-mixed")
    ('fp16', 'tf32', 'fp8')
    """
    if str(precision).startswith("transformer-engine"):
        return "fp8"
    found = format_of(str(precision))
    return "tf32" if found == "fp32" and tf32 else found


def device_peak(
    device: torch.device, precision: str, counted_format: str | None, *, given: float | None = None
) -> tuple[float | None, str]:
    """Dense peak of a run's device with its description, or None with the reason.

    >>> device_peak(torch.device("cpu"), "bf16-mixed", None)
    (None, "no peak is known for the device 'cpu'. Give it: MFUMonitor(peak_flops=...).")
    >>> device_peak(torch.device("cpu"), "32-true", "bf16", given=1e12)
    (1000000000000.0, 'cpu, products in bf16, peak as given')
    """
    tf32 = device.type == "cuda" and torch.backends.cuda.matmul.fp32_precision == "tf32"
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    dtype = counted_format
    if dtype is None:
        dtype = matmul_format(precision, tf32=tf32)
    elif dtype == "fp32" and tf32:
        dtype = "tf32"
    if given is not None:
        return float(given), f"{name}, products in {dtype}, peak as given"
    if dtype is None:
        return None, (
            f"Trainer(precision={precision!r}) does not determine the format in which products run. Give the peak:"
            " MFUMonitor(peak_flops=...)."
        )
    if device.type != "cuda":
        return None, f"no peak is known for the device {name!r}. Give it: MFUMonitor(peak_flops=...)."
    try:
        return peak_flops(name, dtype), f"{name}, products in {dtype}"
    except ValueError as error:
        return None, str(error)


def rate_column(dtype: str | torch.dtype) -> str:
    """The name of a format in the table."""
    if isinstance(dtype, str) and dtype in _RATE_COLUMNS:
        return dtype
    row = number_format(dtype)
    return "fp8" if row.storage_bits == 8 else row.name


def _chip_from_row(row: dict[str, str]) -> Chip:
    rates = {column: float(row[column]) * 1e12 for column in _RATE_COLUMNS if row[column]}
    return Chip(
        row["chip"],
        row["device_name_pattern"],
        MappingProxyType(rates),
        row["source"],
        row["checked"],
        row.get("generation", ""),
        int(row.get("gigabytes", 0)) * 10**9,
    )
