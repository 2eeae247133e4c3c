"""The tensors in a batch, in the arguments of an operation or in an output, nested as they may be."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor in mappings, sequences and dataclasses, in order.

    >>> import torch
    >>> [tensor.tolist() for tensor in tensors_in({"x": [torch.ones(1), "text"], "y": (torch.zeros(2), 3)})]
    [[1.0], [0.0, 0.0]]
    """
    return iter([tensor for _, tensor in named_tensors_in(value)])


def named_tensors_in(value: Any, path: str = "batch") -> Iterator[tuple[str, Tensor]]:
    """Every tensor of :func:`tensors_in`, in the same order, with the expression that leads to it.

    >>> import torch
    >>> [path for path, _ in named_tensors_in({"x": [torch.ones(1), "text"], "y": (torch.zeros(2), 3)})]
    ["batch['x'][0]", "batch['y'][0]"]
    """
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from named_tensors_in(inner, f"{path}[{key!r}]")
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        for index, inner in enumerate(value):
            yield from named_tensors_in(inner, f"{path}[{index}]")
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from named_tensors_in(getattr(value, field.name, None), f"{path}.{field.name}")


def why_unreadable(tensor: Tensor) -> str:
    """Why the numbers of a tensor cannot be read, for a message; "" if they can, and nothing is read.

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
        return "tensors inside of torch.vmap and torch.func, and those of opaque layouts, have no storage"
    return ""
