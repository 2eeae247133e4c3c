"""The device that a run is made on: whether it is there, its name, the memory in use, and the dtype of its sums."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor


def available_device_type(accelerator: str) -> str:
    """The type of the device, "cpu", "cuda" or "mps".

    >>> available_device_type("cpu")
    'cpu'
    """
    available = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if accelerator == "auto":
        return "cuda" if available["cuda"] else "cpu"
    device_type = {"gpu": "cuda"}.get(accelerator, accelerator)
    if not available.get(device_type):
        usable = ", ".join(repr(name) for name, there in available.items() if there)
        raise ValueError(f"`accelerator` {accelerator!r} is not available here. Use 'auto' or one of {usable}.")
    return device_type


def device_name(device: torch.device) -> str:
    """The model of a CUDA device, the type of any other."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory in use so far: allocated by torch on a CUDA device, else resident in main memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource  # not on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak  # getrusage(2): KiB on Linux, bytes on macOS


@cache
def accumulation_dtype(device: torch.device) -> torch.dtype:
    """Where sums of squares and token counts are kept: float64, but float32 on MPS, which has no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def sent_to(values: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor on another device. The host waits only for a copy to the host.

    ``.to("cpu", non_blocking=True)`` returns before a GPU has written the numbers: what is read is what their memory
    held before.

    >>> sent_to(torch.ones(2), torch.device("cpu"), torch.float64)
    tensor([1., 1.], dtype=torch.float64)
    """
    return values.to(device=device, dtype=dtype, non_blocking=device.type != "cpu")


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """New floating-point tensors have this dtype where none is given.

    >>> import torch
    >>> with default_dtype(torch.bfloat16):
    ...     torch.zeros(1).dtype
    torch.bfloat16
    """
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(previous)
