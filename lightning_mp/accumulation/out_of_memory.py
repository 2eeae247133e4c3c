"""Errors that say that memory ran out: how to recognise them, what to free, and what to try next."""

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


def smaller_size(size: int, min_size: int) -> int | None:
    """Half of ``size``, rounded up, but not below ``min_size``; None if that is no smaller.

    >>> [smaller_size(size, 2) for size in (8, 5, 3, 2)]
    [4, 3, 2, None]
    """
    smaller = max(-(-size // 2), min_size)
    return smaller if smaller < size else None


def advice_when_out_of_memory(sizes: list[int], min_size: int) -> str:
    """The note that is added to the error of a run that could not be saved."""
    tried = ", ".join(str(size) for size in sizes)
    return (
        f"MicroBatchOnOOM: out of memory with at most {tried} samples at a time, and min_size={min_size} allows no"
        " fewer. Use ActivationCheckpointing(...), shorter samples, a lower precision, an optimizer with less state,"
        " or strategy='fsdp' without this callback."
    )
