"""Grouped matrix products (mixtures of experts) on tensors without data, in every format."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode
from typing_extensions import override


class GroupedProducts(TorchFunctionMode):
    """While this is entered, grouped products of meta and fake tensors work in every format.

    torch refuses other formats than bf16 for them (torch 2.13; not reported). How many rows a group has is data, and
    neither the shape nor the FLOPs of the result depend on it: all rows are multiplied by the matrix of one group.

    >>> rows, weights = torch.empty(5, 4, device="meta"), torch.empty(3, 4, 2, device="meta")
    >>> with GroupedProducts():
    ...     torch.nn.functional.grouped_mm(rows, weights, offs=torch.empty(3, dtype=torch.int32, device="meta")).shape
    torch.Size([5, 2])
    """

    @override
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in ("grouped_mm", "_grouped_mm") and args[0].ndim == 2 and args[1].ndim == 3:
            rows, weights = args[0], args[1]
            with torch.autocast("cpu", enabled=False):  # it does not know grouped products
                return torch.mm(rows, weights[0].to(rows.dtype))
        return func(*args, **(kwargs or {}))


def backward_in_modes(loss: Tensor) -> None:
    """``loss.backward()`` that leaves no ``TorchFunctionMode``, so that checkpoints recompute under those entered here.

    A tensor handed to torch would end the modes until backward is over; a gradient edge does not.
    """
    torch.autograd.backward(get_gradient_edge(loss), torch.ones_like(loss))
