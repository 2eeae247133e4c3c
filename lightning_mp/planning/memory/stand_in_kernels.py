"""Kernels whose version for fake tensors differs from the real one: what they take, save and keep for themselves."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import ceil
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_LINE_BYTES = 64


def workspace_bytes(operation: Any, args: Sequence[Any]) -> int:
    """What oneDNN's LSTM layer keeps for its backward, which its version for fake tensors leaves out; else 0.

    Per step and row of the batch in fp32: gates (4 H), states and their gradients (5 H), and what comes in and its
    gradients (6 max(I, H)), in whole cache lines. In bf16 a part of it has 2 bytes. Fitted to torch 2.13; a test
    compares.
    """
    if operation.overloadpacket.__name__ != "mkldnn_rnn_layer":
        return 0
    steps, rows, width = args[0].shape
    line = _LINE_BYTES // args[0].element_size()
    width, hidden = (ceil(size / line) * line for size in (width, args[10]))
    of_hidden, of_input = (36, 24) if args[0].dtype == torch.float32 else (22, 20)
    return int((steps + 1) * rows * (of_hidden * hidden + of_input * max(width, hidden) + _LINE_BYTES))


class StandInKernels(TorchFunctionMode):
    """While this is entered, an LSTM and grouped products run on fake tensors as they do on real ones.

    torch takes oneDNN's LSTM on the CPU for every input, and for fake ones only where the input needs no gradient.
    Grouped products of fake tensors are refused in other formats than bf16. For a GPU an LSTM is taken step by step;
    what cuDNN keeps was not measured.
    """

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self._on_cpu = device_type == "cpu"

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name == "lstm" and not isinstance(args[1], Tensor):
            with _one_dnn(enabled=self._on_cpu):
                if not (self._on_cpu and args[0].requires_grad):
                    return func(*args, **(kwargs or {}))
                output, *states = func(args[0].detach(), *args[1:], **(kwargs or {}))
                depends: Callable[..., Tensor] = _DependsOn.apply
                return (depends(output, args[0]), *states)
        if name in ("grouped_mm", "_grouped_mm") and args[0].ndim == 2 and args[1].ndim == 3:
            product: Callable[..., Tensor] = _GroupedProduct.apply
            return product(args[0], args[1])
        return func(*args, **(kwargs or {}))


@contextmanager
def _one_dnn(*, enabled: bool) -> Iterator[None]:
    set_flags: Callable[..., Sequence[Any]] = torch.backends.mkldnn.set_flags
    before = set_flags(_enabled=enabled and torch.backends.mkldnn.is_available(), _fp32_precision=None)[0]
    try:
        yield
    finally:
        set_flags(_enabled=before, _fp32_precision=None)


class _DependsOn(torch.autograd.Function):
    """An output whose input was detached: the input gets a gradient nevertheless."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, source: Tensor) -> Tensor:
        ctx.like = source.shape, source.dtype, source.device
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        shape, dtype, device = ctx.like
        return gradient, torch.empty(shape, dtype=dtype, device=device)


class _GroupedProduct(torch.autograd.Function):
    """Rows times the matrix of their group."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weights)
        return rows.new_empty(rows.shape[0], weights.shape[-1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        rows, weights = ctx.saved_tensors
        return torch.empty_like(rows), torch.empty_like(weights)
