"""Errors that say that memory ran out: how to recognise them, and what they hold."""

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
    chain = [error]
    while (inner := chain[-1].__cause__ or chain[-1].__context__) is not None and inner not in chain:
        chain.append(inner)
    for one in chain:
        traceback.clear_frames(one.__traceback__)
