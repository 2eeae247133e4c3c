"""Logits of which each rank holds the columns of some tokens: whole for any other reader, in parts for the loss."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup
from torch.nn import functional as F
from typing_extensions import override

from lightning_mp.ground.core import private_dispatch_api
from lightning_mp.training.tensor_parallel.vocab_parallel_ops import InParts, VocabParallelSplit, run_on_parts


class VocabParallelLogits(InParts):
    """A tensor of which this rank has some columns.

    ``F.cross_entropy`` is computed on the parts. Casts, changes of shape, rows taken out and arithmetic leave it in
    parts. Everything else gets the whole, gathered at once from the ranks, so all of them have to do it; ``detach()``
    does so as well, and its result is a plain tensor that one rank alone can use.

    Writing into a view of single columns (``logits[..., 3].zero_()``) is lost; ``logits[..., 3] = 0`` is not.
    """

    @classmethod
    @override
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Above autograd: the loss, and functions that do not reach the dispatcher."""
        with private_dispatch_api.without_function_subclasses():
            return _FUNCTIONS.get(func, func)(*args, **kwargs or {})

    @classmethod
    @override
    def __torch_dispatch__(  # type: ignore[override]  # torch's own stub is of a function that is none of the class
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Below autograd: operations on the part, or else on the whole."""
        return run_on_parts(func, args, kwargs or {})


def split_logits(part: Tensor, split: VocabParallelSplit) -> Tensor:
    """Logits of this rank's columns as one tensor, ``[..., vocabulary]``.

    Where nothing is recorded for a backward (validation, generation) they are gathered at once.
    """
    if torch.is_grad_enabled() and part.requires_grad:
        wrapped: Tensor = _FromPart.apply(part, split)  # type: ignore[no-untyped-call]
        return wrapped
    return split.whole(part, part.ndim - 1)


class _FromPart(torch.autograd.Function):
    @staticmethod
    @override
    def forward(ctx: Any, part: Tensor, split: VocabParallelSplit) -> Tensor:
        ctx.split = split
        return VocabParallelLogits(part.detach(), part.ndim - 1, split)

    @staticmethod
    @override
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        # What was computed from the whole is the same on all ranks, and so is its gradient.
        own = gradient.part if isinstance(gradient, VocabParallelLogits) else ctx.split.own(gradient, gradient.ndim - 1)
        return own, None


class _ToPart(torch.autograd.Function):
    @staticmethod
    @override
    def forward(ctx: Any, logits: VocabParallelLogits) -> Tensor:
        ctx.layout = logits.dim_of_vocabulary, logits.vocab_split
        return logits.part.detach()

    @staticmethod
    @override
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return VocabParallelLogits(gradient, *ctx.layout)


class _ToWhole(torch.autograd.Function):
    @staticmethod
    @override
    def forward(ctx: Any, logits: VocabParallelLogits) -> Tensor:
        return logits.vocab_split.whole(logits.part, logits.dim_of_vocabulary)

    @staticmethod
    @override
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def _whole(value: Any) -> Any:
    return _ToWhole.apply(value) if isinstance(value, VocabParallelLogits) else value  # type: ignore[no-untyped-call]


# -- above autograd ----------------------------------------------------------------------------------------------------


def _cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    dim = 1 if input.ndim > 1 else 0
    rows = (*input.shape[:dim], *input.shape[dim + 1 :])
    in_parts = isinstance(input, VocabParallelLogits) and input.dim_of_vocabulary == dim
    plain = type(target) is Tensor and target.dtype == torch.int64 and (weight is None or type(weight) is Tensor)
    known = size_average is None and reduce is None and reduction in ("none", "mean", "sum")
    if not (in_parts and plain and known and target.shape == rows and 0 <= label_smoothing <= 1):
        # Probabilities as targets, and whatever torch refuses.
        return F.cross_entropy(
            _whole(input), _whole(target), weight, size_average, ignore_index, reduce, reduction, label_smoothing
        )
    assert isinstance(input, VocabParallelLogits)
    split, device_type = input.vocab_split, input.device.type
    part: Tensor = _ToPart.apply(input)  # type: ignore[no-untyped-call]
    by_autocast = torch.is_autocast_enabled(device_type)
    dtype = torch.promote_types(input.dtype, torch.float32)
    with torch.autocast(device_type, enabled=False):
        losses = cross_entropy_of_part(
            part.movedim(dim, -1).reshape(-1, part.shape[dim]),
            target.reshape(-1),
            first=split.rank * part.shape[dim],
            vocabulary=input.shape[dim],
            group=split.group,
            weight=None if weight is None else weight.to(dtype),
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
        )
    losses = losses if by_autocast else losses.to(input.dtype)
    return losses.reshape(rows) if reduction == "none" else losses


def _set_item(logits: Tensor, index: Any, value: Any) -> None:
    if not isinstance(logits, VocabParallelLogits):
        logits[index] = _whole(value)
        return
    whole = _whole(logits)
    whole[index] = _whole(value)
    logits.copy_(whole)


def _plain_first(function: Callable[..., Any]) -> Callable[..., Any]:
    def on_the_whole(logits: Tensor, *args: Any, **kwargs: Any) -> Any:
        return function(_whole(logits), *args, **kwargs)

    return on_the_whole


def _shown(logits: VocabParallelLogits, **_: Any) -> str:
    size, rank, ranks = tuple(logits.shape), logits.vocab_split.rank, logits.vocab_split.ranks
    return f"VocabParallelLogits(part {rank} of {ranks}, size={size}, dtype={logits.dtype})"


_PYTHON = (Tensor.detach, Tensor.numpy, Tensor.tolist, Tensor.__array__, Tensor.__deepcopy__, Tensor.__reduce_ex__)
_FUNCTIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    F.cross_entropy: _cross_entropy,
    Tensor.__setitem__: _set_item,
    Tensor.__repr__: _shown,
    **{function: _plain_first(function) for function in _PYTHON},
}


def cross_entropy_of_part(
    part: Tensor,
    target: Tensor,
    *,
    first: int,
    vocabulary: int,
    group: ProcessGroup,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """What ``F.cross_entropy`` gives for the whole logits, the same number on every rank of the group.

    With ``m`` the maximum of a row and ``s`` the sum of ``exp(logit - m)`` over all ranks, the loss of a row is
    ``m + log(s) - logit[target]``. The ranks exchange ``m``, then ``s`` and the logit of the target together: two
    reductions of 12 bytes per row in all, and none in backward, where every rank computes ``softmax - one_hot`` for its
    own columns. It computes in fp32 at least.

    References:
        Shoeybi et al., "Megatron-LM", 2019, section 3, https://arxiv.org/abs/1909.08053
    """
    ignored = target == ignore_index
    known = target.masked_fill(ignored, 0)
    # Without weights an expanded one: it takes no memory, and a target outside of the vocabulary is found all the same.
    weights = part.new_ones(1).expand(vocabulary) if weight is None else weight
    of_target = weights.index_select(0, known).masked_fill(ignored, 0)
    plain, smooth = _CrossEntropy.apply(  # type: ignore[no-untyped-call]
        part, known, first, weights if label_smoothing else None, group
    )
    losses: Tensor = plain * of_target
    if label_smoothing:
        smooth = smooth.masked_fill(ignored, 0) / vocabulary
        losses = (1 - label_smoothing) * losses + label_smoothing * smooth
    losses = losses.masked_fill(ignored, 0)
    if reduction == "none":
        return losses
    total = losses.sum()
    if reduction == "sum":
        return total
    number = of_target.sum(dtype=losses.dtype)  # 16 bits would round it
    mean: Tensor = _MeanOfTargets.apply(total, number, vocabulary)  # type: ignore[no-untyped-call]
    return mean


class _MeanOfTargets(torch.autograd.Function):
    """``total / number``; the node says what it counts, in the words for the node of torch's own cross-entropy."""

    @staticmethod
    @override
    def forward(ctx: Any, total: Tensor, number: Tensor, classes: int) -> Tensor:
        ctx.save_for_backward(number)
        ctx.classes = classes
        return total / number

    @staticmethod
    @override
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (number,) = ctx.saved_tensors
        return gradient / number, None, None


class _CrossEntropy(torch.autograd.Function):
    """Rows' ``-log p[target]``, and ``-sum_c weight_c log p_c`` for label smoothing."""

    @staticmethod
    @override
    def forward(
        ctx: Any, part: Tensor, target: Tensor, first: int, weights: Tensor | None, group: ProcessGroup
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(part.dtype, torch.float32)
        largest = part.amax(1).to(dtype)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        shifted = part.to(dtype) - largest[:, None]
        column = target - first
        mine = (column >= 0) & (column < part.shape[1])
        column = column.clamp(0, part.shape[1] - 1)
        picked = shifted.gather(1, column[:, None])[:, 0].where(mine, 0)
        sums = [picked]
        own_weights = weight_in_all = None
        if weights is not None:
            own_weights = weights[first : first + part.shape[1]].to(dtype)
            weight_in_all = weights.sum(dtype=dtype)
            sums.append((shifted * own_weights).sum(1))
        exponentials = shifted.exp_()
        in_all = torch.stack([exponentials.sum(1), *sums])
        dist.all_reduce(in_all, group=group)
        ctx.save_for_backward(exponentials, in_all[0], column, mine, own_weights, weight_in_all)
        ctx.dtype = part.dtype
        log_sum = in_all[0].log()
        smooth = log_sum.new_zeros(()) if weight_in_all is None else weight_in_all * log_sum - in_all[2]
        return log_sum - in_all[1], smooth

    @staticmethod
    @once_differentiable
    @override
    def backward(ctx: Any, of_plain: Tensor, of_smooth: Tensor) -> tuple[Tensor | None, ...]:
        exponentials, total, column, mine, own_weights, weight_in_all = ctx.saved_tensors
        of_all = of_plain if own_weights is None else of_plain + weight_in_all * of_smooth
        gradient = exponentials * (of_all / total)[:, None]
        gradient.scatter_add_(1, column[:, None], (-of_plain).where(mine, 0)[:, None])
        if own_weights is not None:
            gradient -= of_smooth[:, None] * own_weights
        return gradient.to(ctx.dtype), None, None, None, None
