"""The tensors in a batch, in the arguments of an operation or in an output, nested as they may be."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor in mappings, sequences and dataclasses, in order.

    Example:
        >>> import torch
        >>> [tensor.tolist() for tensor in tensors_in({"x": [torch.ones(1), "text"], "y": (torch.zeros(2), 3)})]
        [[1.0], [0.0, 0.0]]
    """
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from tensors_in(inner)
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        for inner in value:
            yield from tensors_in(inner)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from tensors_in(getattr(value, field.name, None))


def named_tensors_in(value: Any, path: str = "batch") -> Iterator[tuple[str, Tensor]]:
    """Every tensor of :func:`tensors_in`, in the same order, with the expression that leads to it.

    Example:
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
