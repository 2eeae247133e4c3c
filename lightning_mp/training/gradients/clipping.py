"""Clipping by norm where ranks hold different parts of the gradients, for plugins that leave it to torch."""

import torch
from lightning.pytorch.plugins.precision import Precision
from torch.optim import Optimizer

from lightning_mp.ground.core.patches import Patches
from lightning_mp.training.gradients import gradient_ops
from lightning_mp.training.gradients.replication import GradientReplication


def let_clip_over_meshes(plugin: Precision, patches: Patches) -> None:
    """Lets a plugin, for a run, clip gradients of layers that are split together with those of layers that are not.

    ``torch.nn.utils.clip_grad_norm_`` refuses DTensors of two meshes. Plugins that clip by norm in their own way stay.
    """
    if type(plugin).clip_grad_by_norm is Precision.clip_grad_by_norm and "clip_grad_by_norm" not in vars(plugin):
        patches.replace(plugin, "clip_grad_by_norm", clip_norm_)


def clip_norm_(optimizer: Optimizer, clip_val: int | float) -> None:
    """:func:`clip_by_whole_norm_` where all ranks step together, as ``Precision.clip_grad_by_norm`` is called."""
    device = optimizer.param_groups[0]["params"][0].device
    clip_by_whole_norm_(optimizer, float(clip_val), GradientReplication.every_rank(), device)


def clip_by_whole_norm_(
    optimizer: Optimizer, max_norm: float, ranks: GradientReplication, device: torch.device
) -> None:
    """What :func:`torch.nn.utils.clip_grad_norm_` does on one device, by the norm over all ranks.

    Gradients times ``min(1, max_norm / (norm + 1e-6))``, in place. All ranks have to call it.
    """
    if max_norm <= 0:
        return
    here = gradient_ops.read_gradients(optimizer)
    norm = ranks.sum_(ranks.square_sum(here, device)).sqrt()
    shards = [gradient_ops.local_shard(gradient) for gradient in here.gradients]
    gradient_ops.multiply_(shards, gradient_ops.clip_coefficient(norm, max_norm))
