"""A policy for FSDP2: which modules become sharding units, and in which dtype each unit gathers its parameters."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from lightning_mp.ground.core import private_sharding_api
from lightning_mp.ground.modules.names import is_inside, named_modules
from lightning_mp.training.policy.gathered_dtypes import gathered_dtypes, gathered_of_masters
from lightning_mp.training.policy.policy import PrecisionPolicy
from lightning_mp.training.policy.resolved import PolicyModule, ResolvedPolicy
from lightning_mp.training.policy.rules import LOW, Dtype

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy


class ShardingUnit(NamedTuple):
    """Modules that share one call of ``fully_shard``, and its mixed-precision policy."""

    modules: tuple[str, ...]
    mixed_precision: "MixedPrecisionPolicy"


def units_in_dtypes(
    model: nn.Module,
    names: Sequence[str],
    policy: PrecisionPolicy | None,
    low: torch.dtype | None,
    *,
    has_masters: bool = False,
) -> list[ShardingUnit]:
    """The units of a model that trains under autocast in ``low``, or with masters; inner ones first.

    Without ``low`` each unit gathers the dtype that its parameters have.
    """
    if low is not None:
        gathered = gathered_of_masters if has_masters else gathered_dtypes
        return sharding_units(gathered(model, policy, low), names, low)
    return [ShardingUnit((name,), _mixed_precision(torch.float32)) for name in sorted(names, key=lambda n: -_depth(n))]


def sharding_units(policy: ResolvedPolicy, units: Sequence[str], low: torch.dtype) -> list[ShardingUnit]:
    """Splits the units of a user so that each gathers its parameters in one dtype.

    A unit gathers in the dtype in which most of its own modules use their weights; modules inside it that use another
    one become their own unit, all of one dtype together. Gradients are reduced in fp32. Neither inputs nor outputs
    are cast: autocast does that where an operation needs it.
    """
    members: dict[str, list[PolicyModule]] = {unit: [] for unit in units}
    for module in policy.modules:
        unit = _innermost(module.name, units)
        if unit is not None and module.has_parameters:
            members[unit].append(module)
    found = []
    for unit in sorted(units, key=lambda name: -_depth(name)):
        found += _split(policy, unit, members[unit], low)
    return found


def gathered_otherwise(
    policy: ResolvedPolicy, model: nn.Module, low: torch.dtype
) -> list[tuple[str, torch.dtype, torch.dtype]]:
    """The modules of a sharded model whose weights FSDP2 would round before they are used."""
    modules = dict(named_modules(model))
    gathered = {
        name: private_sharding_api.sharding_param_dtype(module)
        for name, module in modules.items()
        if isinstance(module, FSDPModule)
    }
    found = []
    for module in policy.modules:
        unit = _innermost(module.name, list(gathered))
        dtype = gathered[unit] if unit is not None and module.has_parameters else None
        wanted = _concrete(policy.compute_dtype(module), low)
        if dtype not in (None, torch.float32, wanted):
            found.append((module.name, wanted, dtype))
    return found


def gathered_in_another_low(model: nn.Module, low: torch.dtype) -> list[tuple[str, torch.dtype]]:
    """The units of a sharded model that gather their weights in 16 bit, but in the other format than ``low``."""
    units = [(name, module) for name, module in named_modules(model) if isinstance(module, FSDPModule)]
    dtypes = [(name, private_sharding_api.sharding_param_dtype(unit)) for name, unit in units]
    return [(name, dtype) for name, dtype in dtypes if dtype not in (None, torch.float32, torch.float64, low)]


def _split(policy: ResolvedPolicy, unit: str, members: list[PolicyModule], low: torch.dtype) -> list[ShardingUnit]:
    by_dtype: dict[torch.dtype, list[str]] = {}
    for module in members:
        by_dtype.setdefault(_concrete(policy.compute_dtype(module), low), []).append(module.name)
    own = max(by_dtype, key=lambda dtype: len(by_dtype[dtype]), default=low)
    if any(unit in names for dtype, names in by_dtype.items() if dtype != own):
        own = next(dtype for dtype, names in by_dtype.items() if unit in names)  # its own parameters are in the unit
    inner = [ShardingUnit(tuple(names), _mixed_precision(dtype)) for dtype, names in by_dtype.items() if dtype != own]
    return [*inner, ShardingUnit((unit,), _mixed_precision(own))]


def _mixed_precision(dtype: torch.dtype) -> "MixedPrecisionPolicy":
    from torch.distributed.fsdp import MixedPrecisionPolicy

    return MixedPrecisionPolicy(
        param_dtype=None if dtype == torch.float32 else dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )


def _concrete(dtype: Dtype, low: torch.dtype) -> torch.dtype:
    return low if dtype == LOW else dtype


def _innermost(name: str, units: Sequence[str]) -> str | None:
    """The unit that holds a module's parameters: itself, or the nearest of those that it is in."""
    around = [unit for unit in units if unit == name or is_inside(name, unit)]
    return max(around, key=_depth, default=None)


def _depth(name: str) -> int:
    return name.count(".") + 1 if name else 0
