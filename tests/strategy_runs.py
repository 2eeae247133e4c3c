"""One training run per cell of strategy, precision, clipping and accumulation, and what is kept of it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from cpu_fsdp import CpuFsdp
from gloo import run_ranks
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, Strategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from small_models import WIDTH, loader, quiet_trainer
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from lightning_mp import AccumulationScheduler, AutocastPrecision, LossScaler, MasterWeightsPrecision
from lightning_mp.strategies import ReducedPrecisionDDPStrategy

NUM_WINDOWS = 6
# The loss is planted infinite on the last rank in one window; one gradient element there, after the reduction, in the
# other.
LOSS_WINDOW, GRADIENT_WINDOW = 1, 4
SAMPLES = (8, 16, 12)


class Layout(NamedTuple):
    """A strategy, the number of its processes, and how many of them see different data."""

    make: Callable[[], Strategy]
    ranks: int = 2
    data_ranks: int = 2


def _parallel(data: int, tensor: int) -> Layout:
    return Layout(
        lambda: ModelParallelStrategy(
            data_parallel_size=data, tensor_parallel_size=tensor, process_group_backend="gloo"
        ),
        data * tensor,
        data,
    )


def _fsdp1(**arguments: Any) -> Callable[[], Strategy]:
    return lambda: CpuFsdp(auto_wrap_policy={nn.Linear}, **arguments)


STRATEGIES = {
    "DDP": Layout(lambda: DDPStrategy(process_group_backend="gloo")),
    "DDP, bf16 reduction": Layout(lambda: ReducedPrecisionDDPStrategy("bf16", process_group_backend="gloo")),
    "DDP, fp16 reduction": Layout(lambda: ReducedPrecisionDDPStrategy("fp16", process_group_backend="gloo")),
    "FSDP1, full shard": Layout(_fsdp1()),
    "FSDP1, gradients and optimizer": Layout(_fsdp1(sharding_strategy="SHARD_GRAD_OP")),
    "FSDP1, hybrid 2 x 2": Layout(_fsdp1(sharding_strategy="HYBRID_SHARD", device_mesh=(2, 2)), 4, 4),
    "FSDP2": _parallel(2, 1),
    "tensor parallel": _parallel(1, 2),
    "FSDP2 x tensor parallel, 2 x 2": _parallel(2, 2),
}


def _scaler() -> LossScaler:
    return LossScaler(init_scale=1024.0, growth_interval=2)


PRECISIONS: dict[str, Callable[[], Any]] = {
    "16-mixed": lambda: AutocastPrecision("16-mixed", scaler=_scaler()),
    "bf16-mixed": lambda: AutocastPrecision("bf16-mixed"),
    "16-true": lambda: MasterWeightsPrecision("16-true", scaler=_scaler()),
    "bf16-true": lambda: MasterWeightsPrecision("bf16-true"),
    "bf16-true, remainder": lambda: MasterWeightsPrecision("bf16-true", storage="remainder"),
}

CLIPPING: dict[str, dict[str, Any]] = {
    "none": {},
    "norm": {"gradient_clip_val": 5.0},
    "value": {"gradient_clip_val": 0.05, "gradient_clip_algorithm": "value"},
}

ACCUMULATION = (1, 3)


class Cell(NamedTuple):
    """All but the strategy."""

    precision: str
    clipping: str
    accumulation: int


CELLS = [Cell(*cell) for cell in product(PRECISIONS, CLIPPING, ACCUMULATION)]


@dataclass
class Run:
    """What a rank has seen of a run."""

    losses: list[float] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    stepped: list[bool] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)


class Net(pl.LightningModule):
    """Two layers that tensor parallelism cuts, and a norm and a head that it leaves whole."""

    def __init__(self, accumulation: int, plants: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 1)
        self.accumulation, self.plants = accumulation, plants
        self.index = 0
        self.run = Run()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.down(nn.functional.gelu(self.up(x)))
        return self.head(self.norm(x + hidden))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = nn.functional.mse_loss(self(x).float(), y.float())
        self.run.losses.append(loss.item())
        self.run.samples.append(len(x))
        window, place = divmod(self.index, self.accumulation)
        if self.plants and window == LOSS_WINDOW and place == self.accumulation // 2:
            loss = loss * torch.inf
        self.index += 1
        return loss

    def on_after_backward(self) -> None:
        window, place = divmod(self.index - 1, self.accumulation)
        if self.plants and window == GRADIENT_WINDOW and place == self.accumulation - 1:
            gradients = [p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in self.parameters()]
            next(g for g in gradients if g is not None and g.numel()).view(-1)[0] = torch.inf

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Unfused without accumulation, fused with it."""
        if self.accumulation == 1:
            return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.5)
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-3, fused=True)

    def on_train_end(self) -> None:
        wrapped = self.trainer.strategy.model
        if isinstance(wrapped, FullyShardedDataParallel):
            with FullyShardedDataParallel.summon_full_params(wrapped):
                self.run.weights = [p.detach().float().clone() for p in self.parameters()]
            return
        whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in self.parameters()]
        self.run.weights = [p.detach().float().clone() for p in whole]


class ParallelNet(Net):
    def configure_model(self) -> None:
        mesh = self.device_mesh
        if isinstance(self.up.weight, DTensor):
            return
        if mesh["tensor_parallel"].size() > 1:
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(self, mesh["tensor_parallel"], plan)
        if mesh["data_parallel"].size() > 1:
            for layer in (self.up, self.down, self.norm, self.head):
                fully_shard(layer, mesh=mesh["data_parallel"])


class Outcomes(Callback):
    def on_after_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any, outcome: Any) -> None:
        pl_module.run.scales.append(outcome.loss_scale)
        pl_module.run.stepped.append(outcome.stepped)
        pl_module.run.norms.append(outcome.grad_norm)


def batches(accumulation: int) -> list[tuple[Tensor, Tensor]]:
    """Micro-batches of several sizes."""
    generator = torch.Generator().manual_seed(3)
    sizes = [SAMPLES[i % len(SAMPLES)] for i in range(NUM_WINDOWS * accumulation)]
    xs = [torch.randn(size, WIDTH, generator=generator) for size in sizes]
    return [(x, x[:, :1] * x[:, 1:2] + x.sum(1, keepdim=True)) for x in xs]


def share(batch: tuple[Tensor, Tensor], rank: int, ranks: int, *, even: bool) -> tuple[Tensor, ...]:
    """A rank's rows; the first rank has one more and the last one less if they are not to be even."""
    sizes = [len(batch[0]) // ranks] * ranks
    if not even and ranks > 1:
        sizes[0] += 1
        sizes[-1] -= 1
    return tuple(tensor.split(sizes)[rank] for tensor in batch)


def train(cell: Cell, layout: Layout | None = None, rank: int = 0) -> Run | str:
    """One run, or the message of a refusal."""
    ranks, data_ranks = (layout.ranks, layout.data_ranks) if layout is not None else (1, 1)
    strategy = layout.make() if layout is not None else "auto"
    kind = ParallelNet if isinstance(strategy, ModelParallelStrategy) else Net
    module = kind(cell.accumulation, plants=rank == ranks - 1)
    data_rank = rank // (ranks // data_ranks)
    data = [share(batch, data_rank, data_ranks, even=cell.accumulation == 1) for batch in batches(cell.accumulation)]
    scheduler = [AccumulationScheduler({0: cell.accumulation})] if cell.accumulation > 1 else []
    try:
        trainer = quiet_trainer(
            devices=ranks,
            strategy=strategy,
            plugins=[PRECISIONS[cell.precision]()],
            callbacks=[Outcomes(), *scheduler],
            **CLIPPING[cell.clipping],
        )
        trainer.fit(module, loader(data))
    except (MisconfigurationException, ValueError) as error:
        return str(error)
    return module.run


@cache
def single(cell: Cell) -> Run:
    """One process that sees all data."""
    run = train(cell)
    assert isinstance(run, Run), run
    return run


def distributed(strategy: str, cells: list[Cell]) -> Iterator[tuple[Cell, list[Run | str]]]:
    """All cells in one set of processes, one run after the other; for each cell what every rank has."""
    layout = STRATEGIES[strategy]
    results = run_ranks(lambda rank: [train(cell, layout, rank) for cell in cells], layout.ranks, 600)
    yield from zip(cells, map(list, zip(*results, strict=True)), strict=True)
