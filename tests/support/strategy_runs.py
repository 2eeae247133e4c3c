"""One training run per cell of strategy, precision, clipping and accumulation, and what is kept of it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import product
from typing import Any, NamedTuple

import lightning.pytorch as pl
import small_models
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from small_models import loader, quiet_trainer
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from lightning_mp import (
    AccumulationScheduler,
    AutocastPrecision,
    Float8Precision,
    LossScaler,
    MasterWeightsPrecision,
    TF32Precision,
)

# Multiples of 16, for fp8, also of the half that a rank has under tensor parallelism.
WIDTH, HIDDEN = 16, 32
NUM_WINDOWS = 6
# The loss is planted infinite on the last rank in one window; one gradient element there, after the reduction, in the
# other.
LOSS_WINDOW, GRADIENT_WINDOW = 1, 4
SAMPLES = (8, 16, 12)


def _scaler() -> LossScaler:
    return LossScaler(init_scale=1024.0, growth_interval=2)


PRECISIONS: dict[str, Callable[[], Any]] = {
    "16-mixed": lambda: AutocastPrecision("16-mixed", scaler=_scaler()),
    "bf16-mixed": lambda: AutocastPrecision("bf16-mixed"),
    "16-true": lambda: MasterWeightsPrecision("16-true", scaler=_scaler()),
    "bf16-true": lambda: MasterWeightsPrecision("bf16-true"),
    "bf16-true, remainder": lambda: MasterWeightsPrecision("bf16-true", storage="remainder"),
    # one scale per row, which does not depend on what else is in a rank's batch
    "fp8-mixed": lambda: Float8Precision("rowwise", emulate=True, skip_small=False, skip_first_and_last=False),
    "TF32": TF32Precision,
    "bf16-true, 24bit": lambda: MasterWeightsPrecision("bf16-true", storage="24bit"),
}

CLIPPING: dict[str, dict[str, Any]] = {
    "none": {},
    # Some windows are clipped by norm, some are not.
    "norm": {"gradient_clip_val": 6.5},
    "value": {"gradient_clip_val": 0.25, "gradient_clip_algorithm": "value"},
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
    """What a rank has seen of a run; a rank without the loss has no losses."""

    losses: list[float] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    stepped: list[bool] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)


class Net(pl.LightningModule):
    """Two layers that tensor parallelism splits, and a norm and a head that it leaves whole.

    The head has no bias: the errors of a single number do not average out.
    """

    def __init__(self, accumulation: int, plants: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 1, bias=False)
        self.accumulation, self.plants = accumulation, plants
        self.index = 0
        self.run = Run()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.down(nn.functional.gelu(self.up(x)))
        return self.head(self.norm(x + hidden))

    def loss(self, batch: Any) -> Tensor:
        return nn.functional.mse_loss(self(batch[0]).float(), batch[1].float())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.run.losses.append(loss.item())
        self.run.samples.append(len(batch[0]))
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
        """Unfused without accumulation, fused with it. This large an epsilon lets AdamW feel the size of gradients."""
        if self.accumulation == 1:
            return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.5)
        return torch.optim.AdamW(self.parameters(), lr=0.3, eps=1.0, fused=True)

    def on_train_end(self) -> None:
        self.run.weights = [weight.detach().float().clone() for weight in self.whole_weights()]

    def whole_weights(self) -> list[Tensor]:
        """All of them on every rank, in the order of ``parameters()`` on one process."""
        wrapped = self.trainer.strategy.model
        if isinstance(wrapped, FullyShardedDataParallel):
            with FullyShardedDataParallel.summon_full_params(wrapped):
                return [p.detach().clone() for p in self.parameters()]
        return [p.full_tensor() if isinstance(p, DTensor) else p for p in self.parameters()]


class Layout(NamedTuple):
    """A strategy or its name, the number of its processes, how many of them see different data and which, the model."""

    make: Callable[[], Strategy | str]
    ranks: int = 2
    data_ranks: int = 2
    model: type[Net] = Net
    neighbours_share_data: bool = True

    def data_rank(self, rank: int) -> int:
        return rank // (self.ranks // self.data_ranks) if self.neighbours_share_data else rank % self.data_ranks


ONE_PROCESS = Layout(lambda: "auto", 1, 1)


class Outcomes(Callback):
    def on_after_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any, outcome: Any) -> None:
        pl_module.run.scales.append(outcome.loss_scale)
        pl_module.run.stepped.append(outcome.stepped)
        pl_module.run.norms.append(outcome.grad_norm)


regression_batches = partial(small_models.regression_batches, width=WIDTH)


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


def train(cell: Cell, layout: Layout = ONE_PROCESS, rank: int = 0) -> Run | str:
    """One run, or the message of a refusal."""
    module = layout.model(cell.accumulation, plants=rank == layout.ranks - 1)
    data_rank, even = layout.data_rank(rank), cell.accumulation == 1
    data = [share(batch, data_rank, layout.data_ranks, even=even) for batch in batches(cell.accumulation)]
    scheduler = [AccumulationScheduler({0: cell.accumulation})] if cell.accumulation > 1 else []
    try:
        trainer = quiet_trainer(
            devices=layout.ranks,
            strategy=layout.make(),
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
