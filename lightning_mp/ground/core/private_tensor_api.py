"""What is not public of tensors: kernels over lists of them, their versions and their hooks."""

from collections.abc import Sequence

import torch
from torch import Tensor

#: (owner, private name, why it is needed)
PRIVATE_NAMES: tuple[tuple[object, str, str], ...] = (
    (torch, "_amp_foreach_non_finite_check_and_unscale_", "torch's own unscaling with its check, in one kernel"),
    (torch, "_foreach_norm", "the norm of all gradients in one kernel"),
    (torch, "_foreach_mul_", "all gradients multiplied in one kernel"),
    (torch, "_foreach_clamp_min_", "all masters held within the range of fp16 in one kernel"),
    (torch, "_foreach_clamp_max_", "the same from above"),
    (torch, "_foreach_copy_", "all weights or gradients cast in one kernel"),
    (torch.Tensor, "_backward_hooks", "whether a parameter has hooks that would run on every microbatch"),
    (torch.Tensor, "_post_accumulate_grad_hooks", "the same after its gradient was accumulated"),
    (torch.Tensor, "_version", "shows that other code has changed a weight in place"),
    (torch.ops.aten, "huber_loss_backward", "gradients scaled and clamped in one kernel"),
)


def amp_unscale_(shards: Sequence[Tensor], found_inf: Tensor, inverse_scale: Tensor) -> None:
    """torch's own unscaling of plain tensors of one device and dtype, in place; sets ``found_inf`` to 1.0."""
    torch._amp_foreach_non_finite_check_and_unscale_(list(shards), found_inf, inverse_scale)


#: The norm of each tensor of a list, in one kernel where torch can: shards, order, dtype.
foreach_norm = torch._foreach_norm


def foreach_mul_(shards: Sequence[Tensor], factor: Tensor) -> None:
    """All tensors times one scalar tensor in place, in one kernel where torch can."""
    torch._foreach_mul_(list(shards), factor)


def scaled_clamp_(shard: Tensor, factor: float, bound: float) -> None:
    """``factor * clamp(shard, -bound, bound)`` in place, in one kernel: it is the derivative of Huber's loss."""
    scalar = torch.full((), factor, dtype=shard.dtype, device=shard.device)
    zero = torch.zeros((), dtype=shard.dtype, device=shard.device)
    torch.ops.aten.huber_loss_backward.out(scalar, shard, zero, 0, bound, grad_input=shard)


def foreach_copy_(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copies each source into its target, casting, in one kernel where torch can."""
    torch._foreach_copy_(list(targets), list(sources))


def foreach_clamp_(tensors: Sequence[Tensor], limit: float) -> None:
    """Limits all elements to ``[-limit, limit]`` in place, in two kernels where torch can; nan stays."""
    torch._foreach_clamp_min_(list(tensors), -limit)
    torch._foreach_clamp_max_(list(tensors), limit)


def version_of(tensor: Tensor) -> int:
    """How often a tensor was changed in place, views of it included and ``tensor.data`` left out."""
    return tensor._version


def versions_of(tensors: Sequence[Tensor]) -> list[int]:
    """:func:`version_of` each, without a call for each."""
    return [tensor._version for tensor in tensors]


def has_gradient_hooks(parameter: Tensor) -> bool:
    """Whether Python hooks run on the gradient of a parameter."""
    return bool(parameter._backward_hooks)


def has_hooks_after_accumulation(parameter: Tensor) -> bool:
    """Whether Python hooks run after the gradient of a parameter was accumulated."""
    return bool(parameter._post_accumulate_grad_hooks)
