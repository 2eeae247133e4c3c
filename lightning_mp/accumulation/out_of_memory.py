"""Errors that say that memory ran out: how to recognise them, and what to free."""

import gc
import traceback

import torch
from lightning.pytorch.utilities.memory import is_oom_error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out.

    That is ``torch.OutOfMemoryError`` (CUDA's and other accelerators' allocator), cuBLAS that finds no room for its
    handle, what Lightning's batch-size finder takes for one (also cuDNN's "not supported" for inputs that are too
    large), and torch's CPU allocator, which speaks of "not enough memory" or "can't allocate memory". Python's own
    ``MemoryError`` is not: it comes from code outside torch, and fewer samples need not help.

    >>> import torch
    >>> is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory.")), is_out_of_memory(RuntimeError("shape"))
    (True, False)
    """
    if isinstance(error, torch.OutOfMemoryError) or is_oom_error(error):
        return True
    text = str(error)
    cpu = "DefaultCPUAllocator" in text and ("not enough memory" in text or "can't allocate memory" in text)
    return isinstance(error, RuntimeError) and (cpu or "CUBLAS_STATUS_ALLOC_FAILED" in text)


def forget_attempt(error: BaseException) -> None:
    """Drops the local variables of all frames that an error came through: they hold the graph and its activations."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        traceback.clear_frames(current.__traceback__)
        current = current.__cause__ or current.__context__


def free_cached_memory(device: torch.device) -> None:
    """Gives the blocks that torch's allocator keeps back to the device, where it keeps any."""
    torch.clear_autocast_cache()
    if device.type == "cuda":
        # Cycles in a user's code may still hold tensors.
        gc.collect()
        torch.cuda.empty_cache()
