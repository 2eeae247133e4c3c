"""Clipping by norm where gradients lie on several meshes, for precision plugins that leave it to torch."""

import torch
from lightning.pytorch.plugins.precision import Precision
from torch.optim import Optimizer

from lightning_mp import gradients
from lightning_mp.stepping_ranks import SteppingRanks

__all__ = ["clip_norm_", "let_clip_over_meshes"]


def let_clip_over_meshes(plugin: Precision) -> bool:
    """Lets a plugin clip gradients of layers that are cut together with those of layers that are not.

    ``torch.nn.utils.clip_grad_norm_`` refuses DTensors of two meshes. Plugins that clip by norm in their own way stay.

    Returns:
        Whether the plugin has got a method of its own, ``clip_grad_by_norm``, to be deleted after the run.
    """
    if type(plugin).clip_grad_by_norm is not Precision.clip_grad_by_norm or "clip_grad_by_norm" in vars(plugin):
        return False
    plugin.clip_grad_by_norm = clip_norm_  # type: ignore[method-assign]
    return True


def clip_norm_(optimizer: Optimizer, clip_val: int | float) -> None:
    """What ``clip_grad_norm_`` does, over all ranks: gradients times ``min(1, clip_val / (norm + 1e-6))``, in place.

    All ranks have to call it.
    """
    parameters = gradients.parameters_with_gradient(optimizer)
    gradients.reduce_partial_gradients_(parameters)
    held = [p.grad for p in parameters if p.grad is not None]
    shards = [gradients.local_shard(gradient) for gradient in held]
    ranks = SteppingRanks.every_rank()
    squares = (
        gradients.square_sum(gradients.shard_norms(shards), [ranks.copies(gradient) for gradient in held])
        if shards
        else torch.zeros((), dtype=torch.float64, device=optimizer.param_groups[0]["params"][0].device)
    )
    norm = ranks.sum_(squares).sqrt()
    if shards:
        gradients.multiply_(shards, gradients.clip_coefficient(norm, float(clip_val)))
