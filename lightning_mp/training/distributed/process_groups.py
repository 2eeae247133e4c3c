"""Meshes and groups of ranks that are made once in a process, whatever number of runs use them.

torch makes new groups in every call of ``init_device_mesh`` and ``new_group``, and keeps them until the process ends:
each has threads and sockets, and on a GPU buffers. A model stays sharded over its groups after a run, so they cannot be
destroyed at its end.
"""

from collections.abc import Callable, Hashable, Sequence
from datetime import timedelta
from typing import Any
from weakref import ref

import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_mp.ground.core import private_sharding_api

_made: dict[Hashable, Any] = {}
_made_in: "ref[dist.ProcessGroup] | None" = None


def named_mesh(device_type: str, sizes: dict[str, int], timeout: timedelta) -> DeviceMesh:
    """All ranks laid out in dimensions, the last one next to each other. All ranks have to call it."""
    names = tuple(sizes)
    mesh: DeviceMesh = _once(
        (device_type, *sizes.items()),
        lambda: init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=names),
    )
    for name in names:  # groups of an earlier run have the timeout of that run
        private_sharding_api.set_group_timeout(mesh.get_group(name), timeout)
    return mesh


def own_group(ranks: Sequence[Sequence[int]], timeout: timedelta) -> dist.ProcessGroup | None:
    """Makes a group of each list of ranks; every rank has to call it, with the same lists."""
    groups = _once(("groups", *map(tuple, ranks)), lambda: [dist.new_group(list(of_one)) for of_one in ranks])
    own = next((group for group, of_one in zip(groups, ranks, strict=True) if dist.get_rank() in of_one), None)
    if own is not None:
        private_sharding_api.set_group_timeout(own, timeout)
    return own


def gloo_group(timeout: timedelta, owner: str) -> dist.ProcessGroup:
    """A group of all ranks for the threads that write checkpoints. All ranks have to call it.

    Raises:
        MisconfigurationException: if this torch was built without gloo.
    """
    if not dist.is_gloo_available():
        raise MisconfigurationException(
            f"{owner} coordinates the ranks that write over a gloo group, beside NCCL's of the training, and this torch"
            " was built without gloo. Use a build with gloo, such as those of pytorch.org, or leave the setting out."
        )
    group: dist.ProcessGroup = _once(("gloo",), lambda: dist.new_group(backend="gloo"))
    private_sharding_api.set_group_timeout(group, timeout)
    return group


def _once(key: Hashable, make: Callable[[], Any]) -> Any:
    """Groups end with the process group that they were made in: a later one needs new ones."""
    global _made_in
    world = dist.group.WORLD
    assert world is not None
    if _made_in is None or _made_in() is not world:
        _made.clear()
        _made_in = ref(world)
    if key not in _made:
        _made[key] = make()
    return _made[key]
