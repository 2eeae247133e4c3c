"""Splits a LightningModule by tensor parallelism and shards it into FSDP2 units."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

from lightning_mp.ground.core import private_sharding_api
from lightning_mp.ground.core.messages import listed
from lightning_mp.ground.core.patches import Patches
from lightning_mp.ground.core.precisions import low_dtype
from lightning_mp.ground.modules.forward_wrapper import class_forward
from lightning_mp.ground.modules.names import is_inside, named_modules
from lightning_mp.training.distributed.materialize import materialise, not_initialisable
from lightning_mp.training.distributed.odd_parameters import refuse_odd_parameters, units_of_one_dtype
from lightning_mp.training.policy.sharding_units import ShardingUnit, units_in_dtypes
from lightning_mp.training.policy.unit_selection import refuse_half_tied_units
from lightning_mp.training.tensor_parallel.apply import TensorParallelSplit

#: Methods of a LightningModule that begin with a forward.
STEPS = ("training_step", "validation_step", "test_step", "predict_step")


def shard_model(
    module: "pl.LightningModule",
    names: Sequence[str],
    split: TensorParallelSplit | None,
    *,
    data_mesh: DeviceMesh,
    plugin: Precision,
    device: torch.device,
    reshard_after_forward: bool | int | None,
) -> None:
    """Materializes each unit on the device, splits its layers and shards it; the model itself comes last."""
    refuse_odd_parameters(module, "FSDP2Strategy")
    lost = not_initialisable(module)
    if lost:
        raise MisconfigurationException(
            f"FSDP2Strategy: modules of class {', '.join(lost)} are on the meta device and have no reset_parameters(),"
            " so nothing can give their parameters and buffers a value. Define it, or build the model without"
            " init_module(empty_init=True)."
        )
    modules = dict(named_modules(module))
    roots = [""] if module.automatic_optimization else _roots_in_manual_optimization(module, names)
    done: set[int] = set()
    for unit in units_of_one_dtype(module, units_for(module, [*names, *roots], plugin)):
        owned = []
        for name in unit.modules:
            for part_name, part in named_modules(modules[name]):
                if id(part) not in done:
                    done.add(id(part))
                    owned.append((f"{name}.{part_name}".strip("."), part))
        materialise([part for _, part in owned], device)
        if split is not None:
            split.layers([name for name, _ in owned])
        parts = [modules[name] for name in unit.modules]
        fully_shard(
            parts if len(parts) > 1 else parts[0],
            mesh=data_mesh,
            mp_policy=unit.mixed_precision,
            reshard_after_forward=reshard_after_forward,
        )
        for part in parts:
            private_sharding_api.allow_unused_layers(part)
    if split is not None:
        split.finish(device)


def units_for(module: "pl.LightningModule", names: Sequence[str], plugin: Precision) -> list[ShardingUnit]:
    """The units with the dtypes that a precision plugin sets, inner ones first."""
    precision = str(plugin.precision)
    low, has_masters = low_dtype(precision), hasattr(plugin, "storage")
    if getattr(plugin, "eval_precision", precision) != precision:
        low = None  # what is gathered in 16 bit could not be evaluated in fp32
    if not (has_masters or precision.endswith("-mixed")):
        low = None
    return units_in_dtypes(module, names, getattr(plugin, "policy", None), low, has_masters=has_masters)


def gather_in_steps(module: nn.Module, patches: Patches) -> None:
    """Lets the step methods of a unit gather and free its weights as its forward does, until the run ends.

    Inside these methods ``self(...)`` does not gather again, and keeps the weights gathered.
    """
    if not isinstance(module, FSDPModule):
        return
    for name in STEPS:
        # torch's function leaves its method on the module; here it is to stay until the run ends.
        own = vars(module)
        before = {name: own[name]} if name in own else {}
        setattr(module, name, _with_weights_at_hand(module, getattr(module, name)))
        register_fsdp_forward_method(module, name)
        gathering = own.pop(name)
        own.update(before)
        patches.replace(module, name, gathering)


def _with_weights_at_hand(module: FSDPModule, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        with private_sharding_api.without_forward_hooks_of_sharding(module):
            return method(*args, **kwargs)

    return run


def _roots_in_manual_optimization(module: "pl.LightningModule", names: Sequence[str]) -> list[str]:
    """The outermost modules with a forward, each gathered when it is called."""
    roots: list[str] = []
    for name, part in named_modules(module):
        has_forward = class_forward(part) is not None
        inside = any(is_inside(name, root) for root in (*roots, *names))
        if name and has_forward and not inside and name not in names and next(part.parameters(), None) is not None:
            roots.append(name)
    parts = dict(named_modules(module))
    held = {id(parameter) for name in (*roots, *names) for parameter in parts[name].parameters()}
    own = [name for name, parameter in module.named_parameters() if id(parameter) not in held]
    if own:
        raise MisconfigurationException(
            f"FSDP2Strategy in manual optimization: {listed(own)} of {type(module).__name__} belongs"
            " to no module that is called, so nothing would gather it. Put it into a submodule with a forward of its"
            " own."
        )
    refuse_half_tied_units(module, roots, "put the modules that share it into one submodule with a forward.")
    return roots
