"""The part of the seams that is about sharding: what is not public of how DDP, FSDP1 and FSDP2 hold and reduce."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d
from lightning.pytorch.strategies import ModelParallelStrategy, ParallelStrategy
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor, _utils
from torch.nn.parallel import DistributedDataParallel

#: (owner, private name, why it is needed)
PRIVATE_NAMES: tuple[tuple[object, str, str], ...] = (
    (FSDPModule, "_get_fsdp_state", "in which dtype FSDP2 gathers the parameters of a unit"),
    (torch.distributed.tensor, "_utils", "where in the whole tensor the part of a rank begins"),
    (torch.distributed.distributed_c10d, "_set_pg_timeout", "how long operations on a group of a mesh may take"),
    (torch.distributed.distributed_c10d, "_get_default_store", "texts of ranks that may take no part in a collective"),
    (ModelParallelStrategy, "_setup_distributed", "its set-up without the new mesh that it makes in each run"),
    (torch.nn.parallel.DistributedDataParallel, "_get_ddp_logging_data", "how many parameters it reduces"),
    (torch.nn.parallel.DistributedDataParallel, "_sync_buffers", "rank 0's buffers, before a forward that may fail"),
)


def sharding_groups(unit: object) -> list[Any]:
    """What FSDP2 gathers and reduces together of a unit; none without parameters."""
    assert isinstance(unit, FSDPModule)
    state: Any = unit._get_fsdp_state()
    # Until torch 2.12 a unit has one group at most.
    groups = getattr(state, "_fsdp_param_groups", None)
    return list(groups) if groups is not None else [g for g in (state._fsdp_param_group,) if g is not None]


def sharding_mesh(group: Any) -> DeviceMesh:
    """The ranks over which FSDP2 shards, and keeps copies of, one of :func:`sharding_groups`."""
    mesh: DeviceMesh = group.mesh_info.mesh
    return mesh


def sharded_parameters(group: Any) -> list[Tensor]:
    """What the optimizer holds of one of :func:`sharding_groups`."""
    return [parameter.sharded_param for parameter in group.fsdp_params]


def before_each_gather(group: Any, note: Callable[[], None]) -> Callable[[], None]:
    """Calls ``note`` whenever FSDP2 gathers one of :func:`sharding_groups`; returns what ends it."""
    own = group._all_gather_comm

    class Noted:
        allocate = own.allocate

        def __call__(self, *arguments: Any, **named: Any) -> Any:
            note()
            return own(*arguments, **named)

    group._all_gather_comm = noted = Noted()

    def end() -> None:
        if group._all_gather_comm is noted:
            group._all_gather_comm = own

    return end


def broadcast_buffers_early(model: DistributedDataParallel) -> None:
    """Does now what the next forward would begin with, if it would: gives all ranks the buffers of the first one."""
    if model.will_sync_module_buffers():
        model._sync_buffers()
        model.require_forward_param_sync = False


def allow_unused_layers(unit: object) -> None:
    """Lets FSDP2 reduce the gradients of layers that are not used, or not trained, in every micro-batch.

    Until torch 2.15 training stops at a unit never used before a backward without reduction (AttributeError,
    pytorch/pytorch#194058), at gradients of the last micro-batch in 16 bit beside sums in fp32 (AssertionError,
    pytorch/pytorch#196996), and at a unit that was frozen in the first forward, whose dtypes it has not read
    (RuntimeError about ``grad_dtype``, pytorch/pytorch#186998).
    """

    def after_backward(group: Any, post_backward: Callable[..., None], *unused: Any) -> None:
        used = [parameter for parameter in group.fsdp_params if hasattr(parameter, "_unsharded_param")]
        if not used:
            return
        if group._orig_dtype is None and any(parameter.sharded_param.requires_grad for parameter in used):
            group._init_mp_dtypes()
        if group.reduce_grads and any(parameter.unsharded_accumulated_grad is not None for parameter in used):
            for parameter in used:
                if parameter.unsharded_accumulated_grad is None:
                    parameter.to_accumulated_grad_if_needed()
        post_backward(*unused)

    outside_of_dynamo: Callable[..., None] = torch.compiler.disable(after_backward)
    for group in sharding_groups(unit):
        if "post_backward" not in vars(group) and hasattr(group.fsdp_params[0], "to_accumulated_grad_if_needed"):
            group.post_backward = partial(outside_of_dynamo, group, group.post_backward)


def sharding_param_dtype(unit: FSDPModule) -> torch.dtype | None:
    """The dtype in which FSDP2 gathers the parameters of a unit; None for the dtype that they have."""
    return unit._get_fsdp_state()._mp_policy.param_dtype


@dataclass(frozen=True)
class FlatPart:
    """One parameter in a flat parameter of FSDP1: its whole shape, and the modules' objects that hold its shard."""

    shape: torch.Size
    element_bytes: int
    learns: bool
    owners: tuple[torch.nn.Module, ...]
    held_as: tuple[Tensor, ...]


def flat_parts(unit: FullyShardedDataParallel) -> Iterator[FlatPart]:
    """What the flat parameter of a unit of FSDP1 was made of, padding left out; tied parameters once."""
    if unit._handle is None:
        return
    flat: Any = unit._handle.flat_param
    originals = flat._params if flat._params is not None else [flat] * len(flat._shapes)
    for info, shape, original in zip(flat._param_infos, flat._shapes, originals, strict=True):
        name, module = info.param_name, info.module
        tied = [s.module for s in flat._shared_param_infos if s.prim_module is module and s.prim_param_name == name]
        yield FlatPart(shape, flat.element_size(), original.requires_grad, (module, *tied), (flat, original))


def is_flat_shard(parameter: Tensor) -> bool:
    """Whether a parameter is a flat one of FSDP1, or the shard of one that was made a part of it."""
    return bool(getattr(parameter, "_fsdp_flattened", False))


@contextmanager
def without_forward_hooks_of_sharding(unit: FSDPModule) -> Iterator[None]:
    """While this is entered, calling a unit of FSDP2 neither gathers nor frees its weights; its units inside do."""
    state = unit._get_fsdp_state()
    assert isinstance(unit, torch.nn.Module)
    aside = [
        (hooks, key, hook)
        for hooks in (unit._forward_pre_hooks, unit._forward_hooks)
        for key, hook in hooks.items()
        if getattr(hook, "__self__", None) is state
    ]
    # In their places, so that the order of hooks stays.
    for hooks, key, _ in aside:
        hooks[key] = lambda *_, **__: None
    try:
        yield
    finally:
        for hooks, key, hook in aside:
            hooks[key] = hook


def set_up_environment_on(strategy: ModelParallelStrategy, make_mesh: Callable[[], DeviceMesh]) -> DeviceMesh:
    """Starts the processes' group as ``ModelParallelStrategy.setup_environment`` does, on a mesh of the caller.

    Lightning's own method makes a mesh, and new groups of ranks, in each run.
    """
    ParallelStrategy.setup_environment(strategy)
    strategy._setup_distributed()
    mesh = make_mesh()
    strategy._device_mesh = mesh
    strategy._data_parallel_size, strategy._tensor_parallel_size = mesh.shape
    assert strategy.lightning_module is not None
    strategy.lightning_module._device_mesh = mesh
    return mesh


def first_element_of_shard(tensor: DTensor) -> tuple[int, ...]:
    """Where in the whole tensor this rank's part of it begins, along each dimension."""
    offsets = _utils.compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)[1]
    return tuple(offsets)


def set_group_timeout(group: ProcessGroup, timeout: timedelta) -> None:
    """How long operations on a group may take. Groups of a mesh begin with torch's default, not with that of all."""
    # Until torch 2.15 the name is private; there it is public, and the private one warns.
    set_timeout = getattr(torch.distributed, "set_timeout", None) or c10d._set_pg_timeout
    set_timeout(timeout, group)


def store_of_all_ranks() -> c10d.Store:
    """The store through which the ranks of this process group found each other."""
    return c10d._get_default_store()


def number_reduced_by_ddp(model: torch.nn.parallel.DistributedDataParallel) -> int:
    """How many parameters DDP reduces: those that required a gradient when it was made."""
    return int(model._get_ddp_logging_data()["num_parameter_tensors"])


def uses_sync_batchnorm(strategy: ParallelStrategy) -> bool:
    """Whether the Trainer was given ``sync_batchnorm=True`` or a plugin for it; it informs only the strategy."""
    return strategy._layer_sync is not None


def unsaved_buffers(owner: torch.nn.Module) -> set[str]:
    """Names of a module's own buffers that its state dict leaves out."""
    names: set[str] = owner._non_persistent_buffers_set
    return names
