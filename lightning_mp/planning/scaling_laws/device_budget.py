"""What a machine can do in a given time: device hours, a chip and an MFU make a compute budget."""

from dataclasses import dataclass
from typing import SupportsFloat

import torch

from lightning_mp.core.quantities import parse_fraction, parse_quantity
from lightning_mp.flops.hardware import Chip, find_chip, peak_flops, rate_column, similar_chips

_SECONDS_PER_HOUR = 3600


@dataclass(frozen=True, slots=True)
class DeviceBudget:
    """Device hours and what they come to."""

    device_hours: float  # hours times devices
    device: str  # the chip that was meant
    dtype: str  # format of the matmul inputs
    peak_flops_per_second: float  # dense peak of one device
    mfu: float  # model FLOPs over peak

    @property
    def flops(self) -> float:
        """C = hours x 3600 x peak x MFU."""
        return self.device_hours * _SECONDS_PER_HOUR * self.peak_flops_per_second * self.mfu


def device_budget(
    device_hours: str | SupportsFloat, *, device: str, mfu: float | str, dtype: str | None = None
) -> DeviceBudget:
    """Turns device hours into FLOPs.

    >>> budget = device_budget(1000, device="h100", mfu=0.4)
    >>> budget.device, f"{budget.flops:.3g}"
    ('H100 SXM', '1.42e+21')
    """
    chip = chip_of(device)
    dtype = dtype_on(chip, dtype)
    return DeviceBudget(
        device_hours=parse_quantity(device_hours, "device_hours"),
        device=chip.name,
        dtype=dtype,
        peak_flops_per_second=chip.peak_flops[dtype],
        mfu=parse_fraction(mfu, "mfu"),
    )


def dtype_on(chip: Chip, dtype: str | torch.dtype | None) -> str:
    """The format as given, or "bf16" when None, "fp16" on chips without bf16 units.

    >>> dtype_on(chip_of("h100"), None), dtype_on(chip_of("t4"), None)
    ('bf16', 'fp16')
    """
    if dtype is None:
        dtype = "bf16" if "bf16" in chip.peak_flops else "fp16"
    peak_flops(chip.name, dtype)  # raises where none is known
    return rate_column(dtype)


def chip_of(device: str) -> Chip:
    """A chip by its name, with or without spaces and "RTX", or the first of a family: "h100" is "H100 SXM".

    >>> chip_of("h100-sxm").name, chip_of("4090").name, chip_of("v100").name
    ('H100 SXM', 'RTX 4090', 'V100 SXM2')
    """
    chip = find_chip(device)
    if chip is None:
        raise ValueError(
            f"No peak FLOP/s are known for the device {device!r}. {similar_chips(device)} For another, give the FLOPs "
            "themselves."
        )
    return chip
