"""Floating-point operations of one operation of torch: products, convolutions and attention, two per multiply-add.

By torch's own formulas (``torch.utils.flop_counter``, and what was added to it by ``register_flop_formula``), and by
ours for what it lacks (attention on the CPU and in sliding windows, grouped products, a matrix times a vector, cuDNN's
recurrent layers), or multiplies by the number of groups (the gradient of a grouped convolution's weight). Products with
a sparse matrix are not known: torch's formulas take it for dense.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from lightning_mp.ground.core.nested_tensors import tensors_in


def operation_flops(packet: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> int | None:
    """FLOPs of an operation, from the shapes of its arguments; None if there is no formula for it."""
    formula = _formula_of(packet)
    if formula is None or _multiplies_integers(packet, args) or _takes_sparse(args):
        return None
    return int(formula(*args, **kwargs, out_val=result))


def multiplies(packet: Any, args: Sequence[Any]) -> bool:
    """Whether it is an operation of torch that is known to multiply matrices, and has no formula here.

    >>> import torch
    >>> multiplies(torch.ops.aten._fft_r2c, ()), multiplies(torch.ops.aten.relu, ())
    (True, False)
    """
    return _name(packet) in _MULTIPLYING or (_takes_sparse(args) and _formula_of(packet) is not None)


def score_flops(packet: Any, args: Sequence[Any]) -> int:
    """Queries times keys once more, in the backward of a fused attention kernel; 0 for all else."""
    name = _name(packet)
    if name == _VARLEN_BACKWARD:
        query: Tensor = args[1]
        pairs = _packed_pairs(args[6:], args[10], args[13] if len(args) > 13 else None)
        return 2 * query.shape[-2] * query.shape[-1] * pairs
    if name not in _FUSED_ATTENTION_BACKWARD:
        return 0
    query, key = args[1], args[2]
    if query.ndim != 4 or name in ("_flash_attention_backward", "_efficient_attention_backward"):
        # Sequences of many lengths in one tensor: the score product is one of five, equal if heads are.
        return int(flop_registry[packet](*args)) // 5
    batch, heads, queries, size = query.shape
    return int(2 * batch * heads * queries * key.shape[-2] * size)


def _formula_of(packet: Any) -> Callable[..., int] | None:
    name = _name(packet)
    return _CORRECTED_FORMULAS.get(name) or flop_registry.get(packet) or _MISSING_FORMULAS.get(name)


def _name(packet: Any) -> str:
    """The name without torch's own namespace: "mm" of ``aten.mm``."""
    return str(packet).removeprefix("aten.")


def _takes_sparse(args: Sequence[Any]) -> bool:
    return any(isinstance(value, Tensor) and value.layout in _SPARSE_LAYOUTS for value in args[:3])


def _multiplies_integers(packet: Any, args: Sequence[Any]) -> bool:
    """Whether it is an operation of torch on integers alone, whose operations are not floating-point."""
    tensors = list(tensors_in(args)) if str(packet).startswith("aten.") else []
    return bool(tensors) and not any(tensor.is_floating_point() or tensor.is_complex() for tensor in tensors)


# -- attention ---------------------------------------------------------------------------------------------------------
#
# With p pairs of query and key per head, size d of a head and d_v of a value, a forward takes 2 p (d + d_v) per head.
# A fused backward makes the scores again and the gradients of queries and keys, three products over d, and those of the
# attention weights and of the values, two over d_v. A causal mask is not subtracted.


def _attention_forward(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> int:
    batch, heads, queries, size = query.shape
    return 2 * batch * heads * queries * key.shape[-2] * (size + value.shape[-1])


def _attention_backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> int:
    batch, heads, queries, size = query.shape
    return 2 * batch * heads * queries * key.shape[-2] * (3 * size + 2 * value.shape[-1])


def _varlen_forward(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> int:
    """``torch.nn.attention.varlen.varlen_attn`` over packed sequences; torch's formula for it knows no window."""
    is_causal = args[4] if len(args) > 4 else kwargs.get("is_causal", False)
    window = args[6] if len(args) > 6 else kwargs.get("window_size")
    return 2 * query.shape[-2] * (query.shape[-1] + value.shape[-1]) * _packed_pairs(args, is_causal, window)


def _varlen_backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> int:
    window = args[9] if len(args) > 9 else kwargs.get("window_size")
    sizes = 3 * query.shape[-1] + 2 * value.shape[-1]
    return 2 * query.shape[-2] * sizes * _packed_pairs(args[2:], args[6], window)


def _packed_pairs(places: Sequence[Any], is_causal: bool, window: Sequence[int] | None) -> int:
    """Pairs of query and key that a kernel multiplies, of ``cu_seq_q, cu_seq_k, max_q, max_k``: a window has its width.

    Two sequences of 4 and 100 tokens, and the same where a token sees itself and 9 before it:

    >>> ends = torch.tensor([0, 4, 104])
    >>> _packed_pairs((ends, None, 100, 100), True, None), _packed_pairs((ends, None, 100, 100), True, (9, 0))
    (10016, 1016)
    """
    ends_q, ends_k, longest_q, longest_k = places[:4]
    left, right = window if window is not None else (-1, -1)
    if is_causal and left >= 0:
        right = 0
    widest = left + right + 1 if left >= 0 and right >= 0 else None
    lengths = _lengths(ends_q, longest_q), _lengths(ends_q if ends_k is None else ends_k, longest_k)
    return sum(
        queries * (keys if widest is None else min(keys, widest)) for queries, keys in zip(*lengths, strict=True)
    )


def _lengths(ends: Tensor, longest: int) -> list[int]:
    """From the running sum of lengths; without numbers all are as long as the longest may be."""
    if ends.is_meta:
        return [int(longest)] * (len(ends) - 1)
    lengths: list[int] = ends.diff().tolist()
    return lengths


# -- fused recurrent layers --------------------------------------------------------------------------------------------
#
# Where no fused kernel serves (a GRU on the CPU, the meta device), a layer runs as products that are counted one by
# one; oneDNN's LSTM is named as unknown. cuDNN multiplies each weight matrix, of the input, of the hidden state and of
# the projection, with every token. Its backward takes that twice, for the gradients of weights and of what they are
# multiplied with, less those that are not needed: of frozen weights, of an input without gradient, and of the initial
# hidden state.


def _products(matrices: Sequence[Tensor], rows: int) -> int:
    return 2 * rows * sum(matrix.numel() for matrix in matrices)


def _rows(input: Tensor) -> int:
    """Tokens of a batch, padded ``[time, batch, size]`` or packed ``[tokens, size]``."""
    return input.numel() // max(input.shape[-1], 1)


def _cudnn(input: Tensor, weight: Sequence[Tensor], *args: Any, **kwargs: Any) -> int:
    return _products([part for part in weight if part.ndim == 2], _rows(input))


def _cudnn_backward(
    input: Tensor, weight: Sequence[Tensor], stride: int, buffer: Tensor, hidden: Tensor, *args: Any, **kwargs: Any
) -> int:
    # Layer by layer and direction by direction, each with `stride` parts: input, hidden, biases, projection.
    bidirectional, (needs_input, needs_hidden, _, needs_weights) = args[-5], args[-1]
    cells = [weight[first : first + stride] for first in range(0, len(weight), stride)]
    total = _cudnn(input, weight) * (2 if needs_weights else 1)
    if not needs_input:
        total -= _products([cell[0] for cell in cells[: 1 + bidirectional]], _rows(input))
    return total if needs_hidden else total - _products([cell[1] for cell in cells], hidden.shape[-2])


# -- products ----------------------------------------------------------------------------------------------------------


def _matrix_vector(matrix: Tensor, vector: Tensor, *args: Any, **kwargs: Any) -> int:
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
    """Each gradient takes as many products as the forward: those of one place with one filter, at every place.

    pytorch/pytorch#183405 corrects torch's own formula, which takes a grouped gradient for one over all channels.
    """
    _bias_sizes, _stride, _padding, _dilation, transposed, _output_padding, _groups, output_mask = args
    places = (input if transposed else grad).numel()
    gradients: int = sum(output_mask[:2])
    return 2 * places * (weight.numel() // max(weight.shape[0], 1)) * gradients


_VARLEN_BACKWARD = "torch_attn._varlen_attn_backward"
_FUSED_ATTENTION_BACKWARD = {
    "_flash_attention_backward",
    "_efficient_attention_backward",
    "_scaled_dot_product_flash_attention_backward",
    "_scaled_dot_product_efficient_attention_backward",
    "_scaled_dot_product_cudnn_attention_backward",
    "_scaled_dot_product_flash_attention_for_cpu_backward",
    "_scaled_dot_product_fused_attention_overrideable_backward",
}
_CORRECTED_FORMULAS: Mapping[str, Callable[..., int]] = {
    "convolution_backward": _convolution_backward,
    "torch_attn._varlen_attn": _varlen_forward,
    _VARLEN_BACKWARD: _varlen_backward,
}
_MISSING_FORMULAS: Mapping[str, Callable[..., int]] = {
    "mv": _matrix_vector,
    "addmv": lambda start, *args, **kwargs: _matrix_vector(*args),
    "dot": _matrix_vector,
    "vdot": _matrix_vector,
    "addbmm": lambda start, *args, **kwargs: _grouped(*args),
    "_cudnn_rnn": _cudnn,
    "_cudnn_rnn_backward": _cudnn_backward,
    "miopen_rnn": _cudnn,
    "miopen_rnn_backward": _cudnn_backward,
    "_grouped_mm": _grouped,
    "_scaled_grouped_mm": _grouped,
    "_scaled_dot_product_flash_attention_for_cpu": _attention_forward,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
    "_scaled_dot_product_fused_attention_overrideable": _attention_forward,
    "_scaled_dot_product_fused_attention_overrideable_backward": _attention_backward,
}
_SPARSE_LAYOUTS = {torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc}
_MULTIPLYING = {
    "_sparse_addmm", "_sparse_mm_reduce_impl", "_sparse_mm_reduce_impl_backward", "sparse_sampled_addmm",
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
    "linalg_solve_triangular", "triangular_solve", "_trilinear", "_euclidean_dist", "mkldnn_rnn_layer",
    "mkldnn_rnn_layer_backward",
}  # fmt: skip
"""Operations of torch that multiply, and that no formula is known for, at least on some of torch's releases."""
