"""Cross-entropy of logits that are split by vocabulary: each rank has the columns of some tokens, in all rows."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup


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
    reductions of 12 bytes per row in all, and none in backward, where every rank has ``softmax - one_hot`` of its own
    columns. It computes in fp32 at least.

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
    return total / of_target.sum() if reduction == "mean" else total


class _CrossEntropy(torch.autograd.Function):
    """Rows' ``-log p[target]``, and ``-sum_c weight_c log p_c`` for label smoothing."""

    @staticmethod
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
    def backward(ctx: Any, of_plain: Tensor, of_smooth: Tensor) -> tuple[Tensor | None, ...]:
        exponentials, total, column, mine, own_weights, weight_in_all = ctx.saved_tensors
        of_all = of_plain if own_weights is None else of_plain + weight_in_all * of_smooth
        gradient = exponentials * (of_all / total)[:, None]
        gradient.scatter_add_(1, column[:, None], (-of_plain).where(mine, 0)[:, None])
        if own_weights is not None:
            gradient -= of_smooth[:, None] * own_weights
        return gradient.to(ctx.dtype), None, None, None, None
