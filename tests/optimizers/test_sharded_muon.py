"""Muon over sharded weights: equal to torch's over whole ones, and each matrix is orthogonalised once."""

import weakref
from unittest.mock import patch

import pytest
import torch
from gloo import run_group
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.optim import SGD, Muon
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_mp import JointOptimizer
from lightning_mp.ground.core import private_optimizer_api

#: Rows that do not divide by the ranks, fewer rows than ranks, tall and wide ones; more matrices than ranks.
SHAPES = [(16, 8), (7, 5), (1, 6), (5, 9), (8, 8)]

LAYOUTS: dict[str, tuple[tuple[int, ...], list[Placement]]] = {
    "rows over 2": ((2,), [Shard(0)]),
    "rows over 3": ((3,), [Shard(0)]),
    "columns over 2": ((2,), [Shard(1)]),
    "copies": ((2,), [Replicate()]),
    "copies of rows": ((2, 2), [Replicate(), Shard(0)]),
    "rows and columns": ((2, 2), [Shard(0), Shard(1)]),
}


def values(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def steps(parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer, lay_out) -> None:
    for step in range(4):
        for index, (parameter, gradient) in enumerate(zip(parameters, values(step + 1), strict=True)):
            # one matrix has no gradient in one of the steps
            parameter.grad = None if (step, index) == (2, 1) else lay_out(gradient)
        optimizer.step()


def whole_run(**settings: object) -> list[torch.Tensor]:
    parameters = [nn.Parameter(value) for value in values(0)]
    steps(parameters, Muon(parameters, lr=0.1, **settings), lambda gradient: gradient)
    return [parameter.detach() for parameter in parameters]


@pytest.mark.parametrize("settings", [{}, {"nesterov": False, "adjust_lr_fn": "match_rms_adamw"}], ids=["", "settings"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_equals_torchs_muon_on_whole_matrices(name: str, settings: dict[str, object]) -> None:
    """To the bit; and every rank orthogonalises its share: each matrix once per group of ranks that hold it whole."""
    mesh_shape, placements = LAYOUTS[name]

    def run(rank: int) -> tuple[list[torch.Tensor], int]:
        mesh = init_device_mesh("cpu", mesh_shape)
        parameters = [nn.Parameter(distribute_tensor(value, mesh, placements)) for value in values(0)]
        plain = nn.Parameter(torch.ones(3, 3))
        optimizer = JointOptimizer([Muon([*parameters, plain], lr=0.1, **settings), SGD([nn.Parameter(torch.ones(1))])])
        seen, original = [], private_optimizer_api.orthogonalized
        with patch.object(private_optimizer_api, "orthogonalized", lambda *a: [seen.append(1), original(*a)][1]):
            steps(parameters, optimizer, lambda gradient: distribute_tensor(gradient, mesh, placements))
        for parameter in parameters:
            state = optimizer.state[parameter]["momentum_buffer"]
            assert isinstance(state, DTensor)
            assert state.placements == tuple(placements)
        return [parameter.full_tensor().detach() for parameter in parameters], len(seen)

    ranks = torch.tensor(mesh_shape).prod().item()
    results = run_group(run, ranks)
    for weights, _ in results:
        assert all(map(torch.equal, weights, whole_run(**settings)))
    times = 4 * len(SHAPES) - 1
    holders = {"copies": 2, "copies of rows": 2, "rows and columns": 2}.get(name, 1)
    assert sum(count for _, count in results) == times * holders
    assert max(count for _, count in results) - min(count for _, count in results) <= 4 * len(SHAPES) / ranks


def test_no_rank_holds_more_than_one_whole_matrix() -> None:
    def run(rank: int) -> int:
        mesh = init_device_mesh("cpu", (2,))
        parameters = [nn.Parameter(distribute_tensor(torch.randn(64, 64), mesh, [Shard(0)])) for _ in range(6)]
        for parameter in parameters:
            parameter.grad = distribute_tensor(torch.randn(64, 64), mesh, [Shard(0)])
        optimizer = JointOptimizer([Muon(parameters)])
        alive, most = [], [0]
        original = private_optimizer_api.orthogonalized

        def watched(whole: torch.Tensor, group: dict[str, object]) -> torch.Tensor:
            alive[:] = [reference for reference in alive if reference() is not None]
            alive.append(weakref.ref(whole))
            most[0] = max(most[0], len(alive))
            return original(whole, group)

        with patch.object(private_optimizer_api, "orthogonalized", watched):
            optimizer.step()
        return most[0]

    assert run_group(run, 2) == [1, 1]


class Exchanges(TorchDispatchMode):
    """Counts collectives, and the bytes of storages that are made inside and are alive at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.earlier: set[int] = set()
        self.alive: dict[int, int] = {}
        self.peak_bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its shards come here
        if function.namespace == "c10d":
            self.calls.append(function.name())
        self.earlier |= {storage._cdata for storage in storages((args, kwargs))} - self.alive.keys()
        result = function(*args, **(kwargs or {}))
        for storage in storages(result):
            if storage._cdata not in self.alive.keys() | self.earlier:
                self.alive[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self.alive.pop, storage._cdata)
        self.peak_bytes = max(self.peak_bytes, sum(self.alive.values()))
        return result


def storages(values: object) -> list[torch.UntypedStorage]:
    return [leaf.untyped_storage() for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


@pytest.mark.parametrize("matrices", [2, pytest.param(16, marks=pytest.mark.full)])
def test_under_fsdp2_each_matrix_is_orthogonalised_on_one_rank_and_exchanged_by_two_collectives(matrices: int) -> None:
    """Each has a shape of its own, which says whose turn it is; nothing is gathered on all ranks."""
    shapes = [(64 + 2 * index, 64) for index in range(matrices)]

    def run(rank: int) -> tuple[list[tuple[int, ...]], list[str], int]:
        torch.manual_seed(0)
        net = nn.Sequential(*(nn.Linear(columns, rows, bias=False) for rows, columns in shapes))
        fully_shard(net, mesh=init_device_mesh("cpu", (2,)))
        optimizer = JointOptimizer([Muon(net.parameters())], module=net)
        seen, original = [], private_optimizer_api.orthogonalized

        for parameter in net.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()  # makes the momentum buffers
        with (
            Exchanges() as exchanges,
            patch.object(
                private_optimizer_api, "orthogonalized", lambda w, g: [seen.append(tuple(w.shape)), original(w, g)][1]
            ),
        ):
            optimizer.step()
        return seen, exchanges.calls, exchanges.peak_bytes

    ranks = run_group(run, 2)
    assert sorted(shape for seen, _, _ in ranks for shape in seen) == shapes
    largest_bytes = 2 * shapes[-1][0] * shapes[-1][1]
    for seen, calls, peak_bytes in ranks:
        assert len(seen) == matrices // 2
        assert calls == ["c10d::alltoall_base_"] * matrices  # two for each pair
        assert peak_bytes < 10 * largest_bytes  # momentum, messages and Newton-Schulz of one, not of all
