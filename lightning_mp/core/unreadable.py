"""Tensors whose numbers or memory cannot be read where a monitor reads them."""

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy


def why_unreadable(tensor: Tensor) -> str:
    """Why the numbers of a tensor cannot be read, for a message; "" if they can, and nothing is read.

    Example:
        >>> why_unreadable(torch.ones(2)), why_unreadable(torch.nn.LazyLinear(2).weight)
        ('', 'parameters of lazy modules have no numbers before the first forward')
    """
    if is_lazy(tensor):
        return "parameters of lazy modules have no numbers before the first forward"
    if tensor.is_nested:
        has_gaps = tensor.layout == torch.jagged and tensor.lengths() is not None  # type: ignore[attr-defined]
        return "between the parts of a nested tensor with gaps are numbers that are not its own" if has_gaps else ""
    if tensor.is_sparse:
        return ""
    try:
        tensor.untyped_storage()
    except NotImplementedError:
        return "tensors inside of torch.vmap and torch.func, and those of opaque layouts, have no memory of their own"
    return ""
