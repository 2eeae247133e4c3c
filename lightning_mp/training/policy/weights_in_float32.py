"""Which modules compute with their own fp32 weights where the others have 16-bit copies of theirs."""

from collections.abc import Collection

import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from lightning_mp.ground.modules.names import named_modules
from lightning_mp.ground.modules.norms import NORMS_WITH_STATISTICS
from lightning_mp.training.policy.policy import PrecisionPolicy

# Their kernels take 16-bit activations with fp32 weights, and compute in fp32: a copy would only be rounded.
_NORMS = (*NORMS_WITH_STATISTICS, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
_KEPT = (*_NORMS, LightningModule, torch.jit.ScriptModule)


def kept_in_float32(module: nn.Module, policy: PrecisionPolicy | None, dtype: torch.dtype) -> Collection[nn.Module]:
    """Modules that compute with their own weights in fp32.

    These are norms, parametrizations (a product or an inverse in 16 bit is none), modules for which a policy requests
    another dtype than the 16-bit one, LightningModules, whose steps use their own weights outside of any forward,
    TorchScript modules, which take no others, and embeddings with sparse gradients, which torch cannot add up in fp16
    on a CPU.

    >>> layers = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    >>> kept_in_float32(layers, None, torch.bfloat16) == {layers[1]}
    True
    """
    kept: set[nn.Module] = {part for part in module.modules() if isinstance(part, _KEPT)}
    for part in module.modules():
        if isinstance(part, ParametrizationList):
            kept.update(part.modules())
        elif isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse and dtype == torch.float16:
            kept.add(part)
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
