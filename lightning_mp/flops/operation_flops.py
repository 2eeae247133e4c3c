"""Floating-point operations of one operation of torch: products, convolutions and attention, two per multiply-add."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from lightning_mp.flops.packed_attention import PACKED_FORMULAS, packed_score_flops

__all__ = ["operation_flops", "score_flops"]


def operation_flops(packet: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> int | None:
    """What an operation cost, from the shapes it saw; None where nothing is known of it.

    By torch's own formulas (``torch.utils.flop_counter``, and what was added to it by ``register_flop_formula``), and
    by ours for what it lacks (attention on the CPU and in sliding windows, grouped products, a matrix times a vector)
    or multiplies by the number of groups, the gradient of a grouped convolution's weight.

    Args:
        packet: the operation, all overloads alike: ``torch.ops.aten.mm``.
        args: it was called with.
        kwargs: the same by name.
        result: it returned.

    Example:
        >>> import torch
        >>> x, w = torch.ones(3, 4), torch.ones(4, 5)
        >>> operation_flops(torch.ops.aten.mm, (x, w), {}, x @ w), operation_flops(torch.ops.aten.relu, (x,), {}, x)
        (120, None)
    """
    formula = (
        _CORRECTED_FORMULAS.get(packet)
        or PACKED_FORMULAS.get(str(packet))
        or flop_registry.get(packet)
        or _MISSING_FORMULAS.get(packet)
    )
    return None if formula is None else int(formula(*args, **kwargs, out_val=result))


def score_flops(packet: Any, args: Sequence[Any]) -> int:
    """Queries times keys once more, in the backward of a fused attention kernel; 0 for all else."""
    if str(packet) in PACKED_FORMULAS:
        return packed_score_flops(str(packet), args)
    if packet not in _FUSED_ATTENTION_BACKWARD:
        return 0
    query, key = args[1], args[2]
    if query.ndim != 4 or packet in _PACKED_ATTENTION_BACKWARD:
        # Sequences of many lengths in one tensor: the score product is one of five alike if the heads are alike.
        formula = flop_registry.get(packet)
        assert formula is not None
        return int(formula(*args)) // 5
    batch, heads, queries, size = query.shape
    return int(2 * batch * heads * queries * key.shape[-2] * size)


_aten = torch.ops.aten


def _overloads(*names: str) -> set[Any]:
    """Operations by name, as far as this torch has them."""
    return {getattr(_aten, name) for name in names if hasattr(_aten, name)}


_PACKED_ATTENTION_BACKWARD = _overloads("_flash_attention_backward", "_efficient_attention_backward")
_FUSED_ATTENTION_BACKWARD = _PACKED_ATTENTION_BACKWARD | _overloads(
    "_scaled_dot_product_flash_attention_backward",
    "_scaled_dot_product_efficient_attention_backward",
    "_scaled_dot_product_cudnn_attention_backward",
    "_scaled_dot_product_flash_attention_for_cpu_backward",
    "_scaled_dot_product_fused_attention_overrideable_backward",
)


def _attention_forward(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> int:
    batch, heads, queries, size = query.shape
    return 2 * batch * heads * queries * key.shape[-2] * (size + value.shape[-1])


def _attention_backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> int:
    # Scores again; gradients of queries and keys: three products over the head size. Gradients of the attention
    # weights and of the values: two over the size of a value.
    batch, heads, queries, size = query.shape
    return 2 * batch * heads * queries * key.shape[-2] * (3 * size + 2 * value.shape[-1])


def _matrix_vector(matrix: Tensor, vector: Tensor, *args: Any, **kwargs: Any) -> int:
    return 2 * matrix.numel()


def _add_matrix_vector(start: Tensor, matrix: Tensor, vector: Tensor, *args: Any, **kwargs: Any) -> int:
    return 2 * matrix.numel()


def _grouped(left: Tensor, right: Tensor, *args: Any, **kwargs: Any) -> int:
    """Groups of rows, each with a matrix of its own: every row meets one matrix.

    ``[rows, k] x [groups, k, n]``, ``[m, rows] x [rows, n]`` (groups along the sum) or one matrix per group in both.
    """
    if left.ndim == 2 and right.ndim == 2:
        return 2 * left.shape[0] * left.shape[1] * right.shape[1]
    if left.ndim == 3 and right.ndim == 2:
        return 2 * left.shape[1] * left.shape[2] * right.shape[1]
    return 2 * left.numel() * right.shape[-1]


def _convolution_backward(grad: Tensor, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> int:
    """Each gradient takes as many products as the forward: those of one place with one filter, at every place."""
    _bias_sizes, _stride, _padding, _dilation, transposed, _output_padding, _groups, output_mask = args
    places = (input if transposed else grad).numel()
    gradients: int = sum(output_mask[:2])
    return 2 * places * (weight.numel() // max(weight.shape[0], 1)) * gradients


_CORRECTED_FORMULAS: Mapping[Any, Callable[..., int]] = {
    **dict.fromkeys(_overloads("convolution_backward"), _convolution_backward),
}
_MISSING_FORMULAS: Mapping[Any, Callable[..., int]] = {
    **dict.fromkeys(_overloads("mv"), _matrix_vector),
    **dict.fromkeys(_overloads("addmv"), _add_matrix_vector),
    **dict.fromkeys(_overloads("_grouped_mm", "_scaled_grouped_mm"), _grouped),
    **dict.fromkeys(
        _overloads(
            "_scaled_dot_product_flash_attention_for_cpu",
            "_scaled_dot_product_fused_attention_overrideable",
        ),
        _attention_forward,
    ),
    **dict.fromkeys(
        _overloads(
            "_scaled_dot_product_flash_attention_for_cpu_backward",
            "_scaled_dot_product_fused_attention_overrideable_backward",
        ),
        _attention_backward,
    ),
}
