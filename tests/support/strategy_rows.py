"""The strategies of the matrix; a further one is a line in ``FAMILIES``, and a model if it wants one of its own."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from cpu_fsdp import CpuFsdp
from gloo import FLOAT8, run_same_ranks
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, Strategy
from strategy_runs import WIDTH, Cell, Layout, Net, Run, train
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from lightning_mp.pipelining.api import pipelined_loss
from lightning_mp.pipelining.layers import PipelineLayer
from lightning_mp.strategies import FSDP2Strategy
from lightning_mp.strategies.pipeline import PipelineParallelStrategy


class UnusedLayerNet(Net):
    """With a layer that no loss depends on."""

    def __init__(self, accumulation: int, plants: bool) -> None:
        super().__init__(accumulation, plants)
        self.unused = nn.Linear(2, 2)

    def whole_weights(self) -> list[Tensor]:
        return [p for name, p in self.named_parameters() if not name.startswith("unused")]


class ParallelNet(Net):
    """Splits and shards itself as ``ModelParallelStrategy`` wants it."""

    def configure_model(self) -> None:
        if isinstance(self.up.weight, DTensor):
            return
        tensor = self.device_mesh["tensor_parallel"]
        if tensor.size() > 1:
            parallelize_module(self, tensor, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        data = self.device_mesh["data_parallel"]
        if data.size() > 1:
            _shard_layers(self, data)


class HybridNet(Net):
    """Two copies, each over half of the ranks."""

    def configure_model(self) -> None:
        if not isinstance(self.up.weight, DTensor):
            shape = (2, self.trainer.world_size // 2)
            _shard_layers(self, init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")))


def _shard_layers(net: Net, mesh: DeviceMesh) -> None:
    """Compressed masters want their 16-bit copies to be what is gathered."""
    compressed = getattr(net.trainer.precision_plugin, "storage", "fp32") != "fp32"
    for layer in (net.up, net.down, net.norm, net.head):
        low = torch.bfloat16 if compressed and layer is not net.norm else None
        fully_shard(layer, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32))


class PipelinedNet(Net):
    """Says how it is split: inside of the residual block, so that both stages have something to multiply in fp8."""

    def pipeline_layers(self) -> list[Any]:
        def up(x: Tensor, batch: Any) -> Tensor:
            return torch.cat([x, nn.functional.gelu(self.up(x)).to(x.dtype)], dim=1)

        def down(both: Tensor, batch: Any) -> Tensor:
            return both[:, :WIDTH] + self.down(both[:, WIDTH:])

        return [PipelineLayer(up, self.up), PipelineLayer(down, self.down), self.norm, self.head]

    def pipeline_loss(self, output: Tensor, batch: Any) -> Tensor:
        return nn.functional.mse_loss(output.float(), batch[1].float())

    def loss(self, batch: Any) -> Tensor:
        return pipelined_loss(self, batch)

    def whole_weights(self) -> list[Tensor]:
        """Its own stage as this rank has it, the others as they send it."""
        own = {name: p.detach() for name, p in self.named_parameters()}
        stages: list[dict[str, Tensor]] = [{}] * self.trainer.world_size
        dist.all_gather_object(stages, own)
        weights = {name: weight for stage in (*stages, own) for name, weight in stage.items()}
        return [weights[name] for name, _ in Net(1, plants=False).named_parameters()]


def _ddp(**arguments: Any) -> Callable[[], Strategy]:
    return lambda: DDPStrategy(process_group_backend="gloo", **arguments)


def _fsdp1(**arguments: Any) -> Callable[[], Strategy]:
    return lambda: CpuFsdp(auto_wrap_policy={nn.Linear}, **arguments)


def _fsdp1_hybrid(sharding_strategy: str) -> Layout:
    return Layout(_fsdp1(sharding_strategy=sharding_strategy, device_mesh=(2, 2)), 4, 4)


def _parallel(data: int, tensor: int, model: type[Net] = ParallelNet) -> Layout:
    def make() -> Strategy:
        return ModelParallelStrategy(data_parallel_size=data, tensor_parallel_size=tensor, process_group_backend="gloo")

    return Layout(make, data * tensor, data, model)


def _fsdp2(ranks: int, **sizes: int) -> Layout:
    tensor = sizes.get("tensor_parallel_size", 1)
    plan: Any = {"up": "column", "down": "row"} if tensor > 1 else None

    def make() -> Strategy:
        return FSDP2Strategy(nn.Linear, tensor_parallel_plan=plan, process_group_backend="gloo", **sizes)

    return Layout(make, ranks, ranks // tensor)


def _pipeline(copies: int, schedule: Any) -> Layout:
    def make() -> Strategy:
        return PipelineParallelStrategy(2, 4, schedule=schedule, split_points=["down"], process_group_backend="gloo")

    return Layout(make, 2 * copies, copies, PipelinedNet, neighbours_share_data=False)


FAMILIES: dict[str, dict[str, Layout]] = {
    "`DDPStrategy`": {
        "DDP": Layout(_ddp()),
        "DDP, unused layer, gradients as views of buckets": Layout(
            _ddp(find_unused_parameters=True, gradient_as_bucket_view=True), model=UnusedLayerNet
        ),
        "DDP, static graph": Layout(_ddp(static_graph=True)),
        "DDP, bf16 reduction": Layout(lambda: "mp_ddp_bf16_reduce"),
        "DDP, fp16 reduction": Layout(lambda: "mp_ddp_fp16_reduce"),
    },
    "`FSDPStrategy`": {
        "FSDP1, full shard": Layout(_fsdp1()),
        "FSDP1, gradients and optimizer": Layout(_fsdp1(sharding_strategy="SHARD_GRAD_OP")),
        "FSDP1, hybrid 2 x 2": _fsdp1_hybrid("HYBRID_SHARD"),
        "FSDP1, hybrid 2 x 2, gradients and optimizer": _fsdp1_hybrid("_HYBRID_SHARD_ZERO2"),
    },
    "`ModelParallelStrategy`": {
        "FSDP2": _parallel(2, 1),
        "FSDP2, hybrid 2 x 2": _parallel(4, 1, HybridNet),
        "tensor parallel": _parallel(1, 2),
        "FSDP2 x tensor parallel, 2 x 2": _parallel(2, 2),
    },
    "`FSDP2Strategy`": {
        "FSDP2Strategy": _fsdp2(2),
        "FSDP2Strategy, hybrid 2 x 2": _fsdp2(4, replicate_size=2),
        "FSDP2Strategy, tensor parallel": _fsdp2(2, tensor_parallel_size=2),
        "FSDP2Strategy x tensor parallel, 2 x 2": _fsdp2(4, tensor_parallel_size=2),
    },
    "`PipelineParallelStrategy`": {
        "pipeline, GPipe": _pipeline(1, "gpipe"),
        "pipeline, 1F1B": _pipeline(1, "1f1b"),
        "pipeline x data parallel, 2 x 2": _pipeline(2, "1f1b"),
    },
}

STRATEGIES = {name: layout for family in FAMILIES.values() for name, layout in family.items()}


@cache
def distributed(strategy: str, chosen: Callable[[str], list[Cell]]) -> list[tuple[Cell, list[Run | str]]]:
    """The chosen cells, and of each what every rank has."""
    cells, layout = chosen(strategy), STRATEGIES[strategy]

    def run(rank: int) -> list[Run | str]:
        return [train(cell, layout, rank) for cell in cells]

    of_ranks = run_same_ranks(run, layout.ranks, 600, imports=FLOAT8)
    return [(cell, list(runs)) for cell, *runs in zip(cells, *of_ranks, strict=True)]
