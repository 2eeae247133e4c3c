"""Operations of attention over sequences of many lengths packed into one tensor, with or without a sliding window.

``torch.nn.attention.varlen.varlen_attn`` is one operation, and torch's formula for it knows no window. With L_q
queries and L_k keys of a sequence, size d of a head and d_v of a value, a product of queries and keys takes
2 L_q min(L_k, window) d per head, one of weights and values the same with d_v. A causal mask is not subtracted, as
everywhere in :mod:`~lightning_mp.flops.flop_counter`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

_FORWARD, _BACKWARD = "torch_attn._varlen_attn", "torch_attn._varlen_attn_backward"


def attended_pairs(
    query_lengths: Sequence[int], key_lengths: Sequence[int], *, window: Sequence[int] | None, is_causal: bool
) -> int:
    """How many pairs of query and key a kernel multiplies.

    Two sequences of 4 and 100 tokens, and the same where a token sees itself and 9 before it:

    >>> attended_pairs([4, 100], [4, 100], window=None, is_causal=True)
    10016
    >>> attended_pairs([4, 100], [4, 100], window=(9, 0), is_causal=True)
    1016
    """
    left, right = window if window is not None else (-1, -1)
    if is_causal and left >= 0:
        right = 0
    widest = left + right + 1 if left >= 0 and right >= 0 else None
    return sum(
        queries * (keys if widest is None else min(keys, widest))
        for queries, keys in zip(query_lengths, key_lengths, strict=True)
    )


def packed_score_flops(name: str, args: Sequence[Any]) -> int:
    """Queries times keys once more, in the backward; 0 for the forward."""
    if name != _BACKWARD:
        return 0
    query: Tensor = args[1]
    return 2 * query.shape[-2] * query.shape[-1] * _pairs(args[6:], args[10], args[13] if len(args) > 13 else None)


def _pairs(places: Sequence[Any], is_causal: bool, window: Sequence[int] | None) -> int:
    """Of the ends of the sequences and the longest ones: ``cu_seq_q, cu_seq_k, max_q, max_k``."""
    ends_q, ends_k, longest_q, longest_k = places[:4]
    if ends_k is None:
        ends_k = ends_q
    return attended_pairs(
        _lengths(ends_q, longest_q), _lengths(ends_k, longest_k), window=window, is_causal=bool(is_causal)
    )


def _lengths(ends: Tensor, longest: int) -> list[int]:
    """From the running sum of lengths; without numbers all are as long as the longest may be."""
    if ends.is_meta:
        return [int(longest)] * (len(ends) - 1)
    lengths: list[int] = ends.diff().tolist()
    return lengths


def _forward(query: Tensor, key: Tensor, value: Tensor, *args: Any, out_val: Any = None, **kwargs: Any) -> int:
    is_causal = args[4] if len(args) > 4 else kwargs.get("is_causal", False)
    window = args[6] if len(args) > 6 else kwargs.get("window_size")
    return 2 * query.shape[-2] * (query.shape[-1] + value.shape[-1]) * _pairs(args, is_causal, window)


def _backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *args: Any, out_val: Any = None, **kwargs: Any
) -> int:
    # As for every fused kernel: scores again and gradients of queries and keys, and two over the size of a value.
    window = args[9] if len(args) > 9 else kwargs.get("window_size")
    sizes = 3 * query.shape[-1] + 2 * value.shape[-1]
    return 2 * query.shape[-2] * sizes * _pairs(args[2:], args[6], window)


PACKED_FORMULAS: Mapping[str, Callable[..., int]] = {_FORWARD: _forward, _BACKWARD: _backward}
