"""What masters are when a fit begins: weights before they were cast, former masters, or a checkpoint's weights."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_mp.gradients.gradient_ops import local_shard
from lightning_mp.precision.masters.store import MasterStore, distribute_like, refine

# A fit leaves 16-bit weights. The next one may have another Trainer and plugin, and continues from the masters as well.
_of_modules: WeakKeyDictionary[nn.Module, MasterStore] = WeakKeyDictionary()


def remember_masters(module: nn.Module, store: MasterStore) -> None:
    """Keeps the masters of a module's last fit for as long as the module lives."""
    _of_modules[module] = store


def former_masters(module: nn.Module) -> MasterStore | None:
    """The masters of a module's last fit, if it has had one."""
    return _of_modules.get(module)


def full_value(parameter: Tensor, before: Tensor, former: MasterStore | None) -> Tensor:
    """What a parameter held, or its master if it was 16 bit and has one from an earlier fit."""
    if before.dtype == torch.float32 or former is None or parameter not in former:
        return before
    working, master = local_shard(parameter.detach()), local_shard(former.get(parameter).detach())
    return distribute_like(refine(working, master.to(working.device)), parameter)


def fill(
    store: MasterStore,
    optimizers: Sequence[Optimizer],
    values: Mapping[nn.Parameter, Tensor],
    were_16_bit: Collection[nn.Parameter],
    *,
    from_rank_zero: bool,
) -> None:
    """Sets the masters of what the optimizers have."""
    for parameter in (p for o in optimizers for group in o.param_groups for p in group["params"]):
        if parameter not in values or parameter in store:
            continue
        value = values[parameter].detach().to(device=parameter.device, dtype=torch.float32)
        if from_rank_zero:
            # DDP has given every rank the 16-bit weights of rank 0; below them ranks may still differ.
            dist.broadcast(value, src=0)
        store.set(parameter, value, is_exact_fp32=parameter not in were_16_bit)


def refine_from_weights(
    module: nn.Module,
    weights: Mapping[str, Any],
    store: MasterStore,
    were_16_bit: Collection[nn.Parameter],
    widened: Mapping[nn.Parameter, torch.dtype],
) -> None:
    """Takes the fp32 weights of a checkpoint that were just loaded into a 16-bit module."""
    for name, parameter in module.named_parameters():
        value = weights.get(name)
        if not isinstance(value, Tensor) or not value.is_floating_point():
            continue
        if parameter in were_16_bit:
            store.refine_from(parameter, value, is_exact_fp32=True)
        elif parameter in widened and not isinstance(parameter, DTensor):
            refined = refine(parameter.detach().to(widened[parameter]), value.to(parameter.device))
            parameter.data.copy_(refined)
