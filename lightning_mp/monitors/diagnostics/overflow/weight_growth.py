"""How much weights have grown since the start of a run: the sign that training has diverged."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightning_mp.ground.core.messages import WarnOnce
from lightning_mp.ground.core.nested_tensors import why_unreadable
from lightning_mp.training.gradients import gradient_ops

#: A weight that is this many times as large as at the start, and of at least ``DIVERGED_RMS``, is no longer training.
DIVERGED_GROWTH = 100.0
DIVERGED_RMS = 1.0
#: Smaller ones are meant to grow by any factor: zeros, LayerScale from 1e-6.
SMALLEST_RMS_AT_START = 1e-3


@dataclass(frozen=True)
class WeightGrowth:
    """A parameter that has grown."""

    parameter: str  # its name
    rms_at_start: float  # root mean square of its values when the run began
    rms: float  # the same now


@torch.no_grad()
def weight_rms(model: nn.Module) -> Tensor:
    """Root mean square of each parameter's part on this rank, in order, left on the device; 0 for an empty part.

    What cannot be read yet is 0 as well, and a warning says so.

    >>> weight_rms(nn.Sequential(nn.LayerNorm(4), nn.LayerNorm(2))).tolist()
    [1.0, 0.0, 1.0, 0.0]
    """
    shards = []
    warn_once = WarnOnce("OverflowPostMortem")
    for name, parameter in model.named_parameters():
        if reason := why_unreadable(parameter):
            warn_once.warn(f"the growth of {name}", reason)
        shards.append(torch.empty(0) if reason else gradient_ops.local_shard(parameter))
    filled = [index for index, shard in enumerate(shards) if shard.numel() and shard.is_floating_point()]
    if not filled:
        return torch.zeros(len(shards))
    norms = gradient_ops.shard_norms([shards[index] for index in filled])
    sizes = torch.tensor([float(shards[index].numel()) for index in filled], dtype=norms.dtype).to(norms.device)
    rms = torch.zeros(len(shards), dtype=norms.dtype, device=norms.device)
    rms[torch.tensor(filled).to(norms.device)] = norms / sizes.sqrt()
    return rms


def largest_growth(names: Sequence[str], at_start: Sequence[float], now: Sequence[float]) -> WeightGrowth | None:
    """The parameter that has grown most, if that much says that training has diverged; else None.

    Parameters that were next to zero at the start (biases, the second factor of LoRA, LayerScale) are left out.

    >>> largest_growth(["bias", "weight"], [0.0, 0.02], [0.5, 40.0])
    WeightGrowth(parameter='weight', rms_at_start=0.02, rms=40.0)
    >>> largest_growth(["weight"], [0.02], [0.2]) is None
    True
    """
    rows = [
        WeightGrowth(name, before, after)
        for name, before, after in zip(names, at_start, now, strict=True)
        if before >= SMALLEST_RMS_AT_START and after >= max(DIVERGED_RMS, DIVERGED_GROWTH * before)
    ]
    return max(rows, key=lambda row: row.rms / row.rms_at_start, default=None)
