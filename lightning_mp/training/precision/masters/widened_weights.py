"""Weights that were loaded in 16 bit and are trained: fp32 from the set-up on."""

from collections.abc import Iterable, Sequence

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.rank_zero import rank_zero_info
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lightning_mp.ground.core import private_trainer_api
from lightning_mp.ground.core.half_dtypes import HALF_DTYPES
from lightning_mp.ground.core.messages import listed


def averages_of(trainer: "pl.Trainer") -> list[nn.Module]:
    """The copies of the model that Lightning's averaging callbacks have made before its set-up."""
    averaging = StochasticWeightAveraging | WeightAveraging
    callbacks = [callback for callback in private_trainer_api.callbacks_of(trainer) if isinstance(callback, averaging)]
    copies = [private_trainer_api.average_model_of(callback) for callback in callbacks]
    return [getattr(copied, "module", copied) for copied in copies if copied is not None]


def widen_trained_weights(module: nn.Module, copies: Iterable[nn.Module] = ()) -> None:
    """Trainable weights that were loaded in 16 bit become fp32, in copies of the model as well."""
    named = [(name, p) for name, p in module.named_parameters() if p.requires_grad and p.dtype in HALF_DTYPES]
    if not named:
        return
    widen_([parameter for _, parameter in named])
    for copied in copies:
        own = dict(copied.named_parameters())
        widen_([own[name] for name, _ in named])
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
