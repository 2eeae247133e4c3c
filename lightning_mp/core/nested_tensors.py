"""The tensors in a batch, in the arguments of an operation or in an output, nested as they may be."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

__all__ = ["tensors_in"]


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
