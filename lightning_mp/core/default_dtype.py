"""torch's default dtype for a while."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """New floating-point tensors have this dtype where none is given.

    Example:
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
