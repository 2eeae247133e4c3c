"""Promise: all runs of a process share one set of groups, and each run's time-out holds on all of them."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gloo import run_ranks

from lightning_mp.training.distributed.process_groups import named_mesh, own_group

MINUTE = timedelta(minutes=1)


def timeout_of(group: Any) -> timedelta:
    return group._get_backend(torch.device("cpu")).options._timeout


def groups_of(mesh: Any) -> list[Any]:
    return [mesh.get_group(name) for name in mesh.mesh_dim_names]


def test_meshes_and_groups_are_made_once_and_anew_in_a_new_process_group(tmp_path: Path) -> None:
    def use(rank: int) -> int:
        mesh = named_mesh("cpu", {"replicate": 2, "shard": 1}, MINUTE)
        pair = own_group([[0, 1]], MINUTE)
        alone = own_group([[1]], MINUTE)
        assert (alone is None) == (rank == 0)
        assert named_mesh("cpu", {"replicate": 2, "shard": 1}, MINUTE) is mesh
        assert named_mesh("cpu", {"shard": 1, "replicate": 2}, MINUTE) is not mesh
        assert own_group([[0, 1]], MINUTE) is pair
        dist.all_reduce(torch.ones(1), group=pair)
        for minutes in (7, 3):
            timeout = timedelta(minutes=minutes)
            named_mesh("cpu", {"replicate": 2, "shard": 1}, timeout)
            own_group([[0, 1]], timeout)
            assert {timeout_of(group) for group in (*groups_of(mesh), pair)} == {timeout}
        return dist.get_pg_count()

    def run(rank: int) -> list[int]:
        made = []
        for number in range(2):
            dist.init_process_group("gloo", f"file://{tmp_path}/{number}", rank=rank, world_size=2)
            made += [use(rank), use(rank)]
            dist.barrier()
            dist.destroy_process_group()
        return made

    for made in run_ranks(run, 2):
        assert len(set(made)) == 1
