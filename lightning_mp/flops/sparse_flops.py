"""Operations of products with a sparse matrix: each stored element meets one row or column of the dense one.

Stored are the specified elements of a COO, CSR or CSC matrix, also those that are 0, and whole blocks of BSR and BSC.
"""

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

__all__ = ["SPARSE_FORMULAS", "is_sparse", "sparse_product", "stored_elements"]

_LAYOUTS = {torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc}


def is_sparse(value: Any) -> bool:
    """Whether it is a tensor that stores only part of its elements."""
    return isinstance(value, Tensor) and value.layout in _LAYOUTS


def stored_elements(matrix: Tensor) -> int:
    """How many elements are stored, also in a batch of matrices.

    Example:
        >>> stored_elements(torch.eye(4).to_sparse())
        4
    """
    if matrix.layout == torch.sparse_coo:
        return matrix._nnz() * prod(matrix.shape[matrix.sparse_dim() :])
    return matrix.values().numel()


def sparse_product(left: Tensor, right: Tensor) -> int | None:
    """Of ``left @ right``; None if both are sparse, where it depends on which elements meet.

    Example:
        >>> sparse_product(torch.eye(4).to_sparse(), torch.ones(4, 5))  # 4 stored elements, 5 columns
        40
    """
    if is_sparse(left) and is_sparse(right):
        return None
    if is_sparse(left):
        return 2 * stored_elements(left) * (right.shape[-1] if right.ndim > 1 else 1)
    return 2 * stored_elements(right) * left.shape[-2]


def _product(left: Tensor, right: Tensor, *args: Any, **kwargs: Any) -> int | None:
    return sparse_product(left, right)


def _add_product(start: Tensor, left: Tensor, right: Tensor, *args: Any, **kwargs: Any) -> int | None:
    return sparse_product(left, right)


def _sampled(start: Tensor, left: Tensor, right: Tensor, *args: Any, **kwargs: Any) -> int:
    """The product of two dense matrices, at the places of a sparse one."""
    return 2 * stored_elements(start) * left.shape[-1]


def _reduce_backward(
    matrix: Tensor,
    grad: Tensor,
    other: Tensor,
    reduce: str,
    winners: Tensor,
    output_mask: Sequence[bool],
    **kwargs: Any,
) -> int:
    return 2 * stored_elements(matrix) * other.shape[-1] * sum(output_mask)


SPARSE_FORMULAS: Mapping[str, Callable[..., int | None]] = {
    "mm": _product,
    "bmm": _product,
    "mv": _product,
    "_sparse_mm_reduce_impl": _product,
    "addmm": _add_product,
    "addmv": _add_product,
    "baddbmm": _add_product,
    "_sparse_addmm": _add_product,
    "_sparse_mm_reduce_impl_backward": _reduce_backward,
    "sparse_sampled_addmm": _sampled,
}
