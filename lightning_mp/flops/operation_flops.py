"""Floating-point operations of one operation of torch: products, convolutions and attention, two per multiply-add."""

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from lightning_mp.core.nested_tensors import tensors_in
from lightning_mp.flops.packed_attention import PACKED_FORMULAS, packed_score_flops
from lightning_mp.flops.recurrent_flops import RECURRENT_FORMULAS


def operation_flops(packet: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> int | None:
    """What an operation cost, from the shapes it saw; None where nothing is known of it.

    By torch's own formulas (``torch.utils.flop_counter``, and what was added to it by ``register_flop_formula``), and
    by ours for what it lacks (attention on the CPU and in sliding windows, grouped products, a matrix times a vector,
    fused recurrent layers, ``nn.Bilinear``), or multiplies by the number of groups (the gradient of a grouped
    convolution's weight). Products with a sparse matrix are not known: torch's formulas take it for dense.
    """
    if _multiplies_integers(packet, args):
        return None
    if _takes_sparse(args):
        return None
    formula = (
        _CORRECTED_FORMULAS.get(packet)
        or PACKED_FORMULAS.get(str(packet))
        or flop_registry.get(packet)
        or _MISSING_FORMULAS.get(packet)
    )
    return None if formula is None else int(formula(*args, **kwargs, out_val=result))


def multiplies(packet: Any, args: Sequence[Any]) -> bool:
    """Whether it is an operation of torch that is known to multiply matrices, and has no formula here.

    >>> import torch
    >>> multiplies(torch.ops.aten._fft_r2c, ()), multiplies(torch.ops.aten.relu, ())
    (True, False)
    """
    name = _name(packet)
    return name in _MULTIPLYING or (name in _MULTIPLYING_SPARSE and _takes_sparse(args))


def _takes_sparse(args: Sequence[Any]) -> bool:
    return any(isinstance(value, Tensor) and value.layout in _SPARSE_LAYOUTS for value in args[:3])


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


def _multiplies_integers(packet: Any, args: Sequence[Any]) -> bool:
    """Whether it is an operation of torch on integers alone, whose operations are not floating-point."""
    tensors = list(tensors_in(args)) if str(packet).startswith("aten.") else []
    return bool(tensors) and not any(tensor.is_floating_point() or tensor.is_complex() for tensor in tensors)


def _name(packet: Any) -> str:
    """The name without torch's own namespace: "mm" of ``aten.mm``."""
    return str(packet).removeprefix("aten.")


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
    """Groups of rows, each with its own matrix: every row is multiplied by one matrix.

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


def _dot(left: Tensor, right: Tensor, *args: Any, **kwargs: Any) -> int:
    return 2 * left.numel()


def _add_batched(start: Tensor, left: Tensor, right: Tensor, *args: Any, **kwargs: Any) -> int:
    return 2 * left.numel() * right.shape[-1]


def _distances(left: Tensor, right: Tensor, *args: Any, out_val: Tensor, **kwargs: Any) -> int:
    """Of ``cdist`` by a product of both sides."""
    return int(2 * out_val.numel() * left.shape[-1])


def _trilinear(
    first: Tensor,
    second: Tensor,
    third: Tensor,
    expand_first: Sequence[int],
    expand_second: Sequence[int],
    expand_third: Sequence[int],
    summed: Sequence[int],
    *args: Any,
    **kwargs: Any,
) -> int:
    """``nn.Bilinear`` and its gradients: a product of two tensors, and of its result with the third.

    Dimensions that the third does not have are summed in the first product.
    """
    sizes = [
        _with_ones(tensor, expanded)
        for tensor, expanded in ((first, expand_first), (second, expand_second), (third, expand_third))
    ]
    both = list(map(max, sizes[0], sizes[1]))
    kept = [1 if dim in summed and dim in expand_third else size for dim, size in enumerate(both)]
    return 2 * (prod(both) + prod(map(max, kept, sizes[2])))


def _with_ones(tensor: Tensor, expanded: Sequence[int]) -> list[int]:
    sizes = list(tensor.shape)
    for dim in sorted(expanded):
        sizes.insert(dim, 1)
    return sizes


_CORRECTED_FORMULAS: Mapping[Any, Callable[..., int]] = {
    **dict.fromkeys(_overloads("convolution_backward"), _convolution_backward)
}
_MISSING_FORMULAS: Mapping[Any, Callable[..., int]] = {
    **dict.fromkeys(_overloads("mv"), _matrix_vector),
    **dict.fromkeys(_overloads("addmv"), _add_matrix_vector),
    **dict.fromkeys(_overloads("dot", "vdot"), _dot),
    **dict.fromkeys(_overloads("addbmm"), _add_batched),
    **dict.fromkeys(_overloads("_trilinear"), _trilinear),
    **dict.fromkeys(_overloads("_euclidean_dist"), _distances),
    **{packet: formula for name, formula in RECURRENT_FORMULAS.items() for packet in _overloads(name)},
    **dict.fromkeys(_overloads("_grouped_mm", "_scaled_grouped_mm"), _grouped),
    **dict.fromkeys(
        _overloads("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_fused_attention_overrideable"),
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
_SPARSE_LAYOUTS = {torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc}
_MULTIPLYING_SPARSE = {
    "mm", "bmm", "mv", "addmm", "addmv", "baddbmm", "_sparse_addmm", "_sparse_mm_reduce_impl",
    "_sparse_mm_reduce_impl_backward", "sparse_sampled_addmm",
}  # fmt: skip
_MULTIPLYING = {
    "_sparse_sparse_matmul", "sspaddmm", "_spsolve", "_cslt_sparse_mm", "_sparse_semi_structured_mm",
    "_sparse_semi_structured_addmm", "_sparse_semi_structured_linear", "_sparse_semi_structured_apply_dense",
    "_compute_linear_combination", "_lstm_mps", "lstm_mps_backward", "quantized_lstm", "quantized_gru",
    "_int_mm", "_addmm_activation", "_foreach_mm", "_weight_int8pack_mm", "_weight_int4pack_mm",
    "_weight_int4pack_mm_for_cpu", "_weight_int4pack_mm_with_scales_and_zeros", "_dyn_quant_matmul_4bit",
    "_mixed_dtypes_linear", "_scaled_mm_v2", "_scaled_grouped_mm_v2", "_native_multi_head_attention",
    "_triton_multi_head_attention", "_triton_scaled_dot_attention", "_transformer_encoder_layer_fwd",
    "conv_tbc", "conv_tbc_backward", "_conv_depthwise2d", "conv_depthwise3d", "mkldnn_linear",
    "mkldnn_linear_backward", "_cdist_forward", "_cdist_backward", "_fft_r2c", "_fft_c2r", "_fft_c2c",
    "_cholesky_solve_helper", "cholesky", "cholesky_inverse", "_linalg_det", "_linalg_eigh", "_linalg_eigvals",
    "_linalg_slogdet", "_linalg_solve_ex", "_linalg_svd", "linalg_cholesky_ex", "linalg_eig",
    "linalg_householder_product", "linalg_inv_ex", "linalg_ldl_factor_ex", "linalg_ldl_solve", "linalg_lstsq",
    "linalg_lu", "linalg_lu_factor_ex", "linalg_lu_solve", "linalg_matrix_exp", "linalg_qr",
    "linalg_solve_triangular", "triangular_solve",
}  # fmt: skip
"""Operations of torch that multiply, and that no formula is known for, at least on some of torch's releases."""
