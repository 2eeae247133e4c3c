"""Which weights are fp32, and which modules compute with them as they are."""

from collections.abc import Collection, Sequence

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_info
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.utils.parametrize import ParametrizationList

from lightning_mp.core.messages import listed
from lightning_mp.core.precisions import HALF_DTYPES
from lightning_mp.modules.names import named_modules
from lightning_mp.modules.norms import NORMS_WITH_STATISTICS
from lightning_mp.policy.policy import PrecisionPolicy

# Their kernels take 16-bit activations with fp32 weights, and compute in fp32: a copy would only be rounded.
_NORMS = (*NORMS_WITH_STATISTICS, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def kept_in_float32(module: nn.Module, policy: PrecisionPolicy | None, dtype: torch.dtype) -> Collection[nn.Module]:
    """Modules that compute with their own weights in fp32.

    These are norms, parametrizations (a product or an inverse in 16 bit is none), modules for which a policy requests
    another dtype than the 16-bit one, and LightningModules, whose steps use their own weights outside of any forward.

    >>> layers = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    >>> kept_in_float32(layers, None, torch.bfloat16) == {layers[1]}
    True
    """
    kept: set[nn.Module] = {part for part in module.modules() if isinstance(part, (*_NORMS, LightningModule))}
    for part in module.modules():
        if isinstance(part, ParametrizationList):
            kept.update(part.modules())
    if policy is not None:
        names = policy.resolve(module).modules_not_used_in(dtype)
        kept.update(part for name, part in named_modules(module) if name in names)
    return kept


def with_exact_parametrizations(policy: PrecisionPolicy | None, module: nn.Module) -> PrecisionPolicy | None:
    """The policy, with a first rule that computes parametrizations in fp32 if the model has any.

    Autocast would make 16-bit products in them, and torch has no matrix decompositions in 16 bit.
    """
    if not any(isinstance(part, ParametrizationList) for part in module.modules()):
        return policy
    return PrecisionPolicy([(ParametrizationList, "fp32"), *(policy.rules if policy is not None else ())])


def widen_trained_weights(module: nn.Module) -> None:
    """Trainable weights that were loaded in 16 bit become fp32."""
    named = [(name, p) for name, p in module.named_parameters() if p.requires_grad and p.dtype in HALF_DTYPES]
    if not named:
        return
    widen_([parameter for _, parameter in named])
    for unit in module.modules():
        if isinstance(unit, FSDPModule):
            unit.to(next(unit.parameters()).device)  # changes nothing, but lets FSDP2 find what was put in place
    rank_zero_info(
        f"MasterWeightsPrecision: {len(named)} trainable weights were loaded in 16 bit"
        f" ({listed([name for name, _ in named], 3)}) and are trained in fp32. Load the model in fp32 if its checkpoint"
        " has more digits: from_pretrained(..., dtype=torch.float32)."
    )


def widen_(parameters: Sequence[Tensor]) -> None:
    """Gives parameters fp32 numbers; their gradients are dropped."""
    for parameter in parameters:
        parameter.grad = None
        wide = parameter.detach().float()
        if isinstance(parameter, DTensor):
            torch.utils.swap_tensors(parameter, nn.Parameter(wide, parameter.requires_grad))
        else:
            parameter.data = wide
