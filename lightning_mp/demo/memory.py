"""Peak memory of this process."""

import sys

import torch

__all__ = ["peak_memory_bytes"]


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory in use so far: allocated by torch on a CUDA device, else resident in main memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # getrusage(2): KiB on Linux, bytes on macOS.
    return peak if sys.platform == "darwin" else 1024 * peak
