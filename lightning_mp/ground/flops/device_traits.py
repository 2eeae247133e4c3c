"""What a device can do, as far as the choice of a precision depends on it: named, or found by torch."""

from dataclasses import dataclass
from typing import Literal

import torch

from lightning_mp.ground.flops.hardware import Chip, find_chip, similar_chips

_FP16 = frozenset({"fp16"})
_AMPERE = frozenset({"tf32", "bf16", "fp16"})
_ADA = _AMPERE | {"fp8"}

# NVIDIA, CUDA C++ Programming Guide, table of compute capabilities; the highest that is not above the device's.
_CAPABILITIES: tuple[tuple[tuple[int, int], str, frozenset[str]], ...] = (
    ((12, 0), "Blackwell RTX", _ADA),
    ((10, 0), "Blackwell", _ADA),
    ((9, 0), "Hopper", _ADA),
    ((8, 9), "Ada", _ADA),
    ((8, 0), "Ampere", _AMPERE),
    ((7, 5), "Turing", _FP16),
    ((7, 0), "Volta", _FP16),
)


@dataclass(frozen=True, slots=True)
class DeviceTraits:
    """What one device supports."""

    name: str  #: short name of a known chip, "CPU", "MPS", or what torch calls the device.
    accelerator: Literal["cuda", "mps", "cpu"]  #: for ``Trainer(accelerator=...)``; "cuda" on AMD as well.
    generation: str  #: such as "Turing" or "Hopper"; of a CPU and of MPS their name.
    #: of "tf32", "bf16", "fp16" and "fp8" those that its matrix units multiply in; empty where that is not known (CPU,
    #: MPS) or nothing (before Volta).
    formats: frozenset[str]
    memory_bytes: int | None  #: of the device; None where it shares that of the host.


def named_device(name: str) -> DeviceTraits:
    """A device by name."""
    kind = name.strip().lower()
    if kind == "cpu":
        return DeviceTraits("CPU", "cpu", "CPU", frozenset(), None)
    if kind == "mps":
        return DeviceTraits("MPS", "mps", "MPS", frozenset(), None)
    chip = find_chip(name)
    if chip is None:
        raise ValueError(
            f"`device` {name!r} is not known. {similar_chips(name)} Use cpu, mps or a chip; for the device of this"
            " machine, leave it out."
        )
    return _of_chip(chip, chip.memory_bytes)


def find_device() -> DeviceTraits:
    """The first CUDA or ROCm device of this machine, else MPS, else the CPU. A CUDA context is started for it."""
    if not torch.cuda.is_available():
        return named_device("mps" if torch.backends.mps.is_available() else "cpu")
    properties = torch.cuda.get_device_properties(0)
    chip = find_chip(properties.name)
    memory_bytes = int(properties.total_memory)
    if chip is not None:
        return _of_chip(chip, memory_bytes)
    if torch.version.hip is not None:
        # Every AMD device that torch supports multiplies in these two; for fp8 the name alone shows nothing.
        return DeviceTraits(properties.name, "cuda", "AMD Instinct", _FP16 | {"bf16"}, memory_bytes)
    generation, formats = _of_capability((properties.major, properties.minor))
    return DeviceTraits(properties.name, "cuda", generation, formats, memory_bytes)


def _of_chip(chip: Chip, memory_bytes: int) -> DeviceTraits:
    formats = frozenset(chip.peak_flops) & _ADA
    return DeviceTraits(chip.name, "cuda", chip.generation, formats, memory_bytes)


def _of_capability(capability: tuple[int, int]) -> tuple[str, frozenset[str]]:
    for least, generation, formats in _CAPABILITIES:
        if capability >= least:
            return generation, formats
    return "before Volta", frozenset()
