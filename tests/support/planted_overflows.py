"""Modules that go wrong at a known place, on the batches that say so."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import lightning.pytorch as pl
import torch
from small_models import WIDTH, adamw
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Trigger:
    """Whether the present batch is the one with the planted overflow."""

    on = False


class TimesInForward(nn.Module):
    """Multiplies by a number that fp16 cannot hold the result of."""

    def __init__(self, trigger: Trigger, factor: float) -> None:
        super().__init__()
        self.trigger, self.factor = trigger, factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor if self.trigger.on else x


class LogOfZero(nn.Module):
    def __init__(self, trigger: Trigger) -> None:
        super().__init__()
        self.trigger = trigger

    def forward(self, x: Tensor) -> Tensor:
        return x + (x * 0).float().log() if self.trigger.on else x


class RootOfZero(nn.Module):
    """Finite in forward; the derivative of a root at zero is infinite."""

    def __init__(self, trigger: Trigger) -> None:
        super().__init__()
        self.trigger = trigger

    def forward(self, x: Tensor) -> Tensor:
        return x + (x * 0).float().sqrt() if self.trigger.on else x


class _Times(torch.autograd.Function):
    """The identity; its gradient is multiplied."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.factor, None


class TimesInBackward(nn.Module):
    def __init__(self, trigger: Trigger, factor: float) -> None:
        super().__init__()
        self.trigger, self.factor = trigger, factor

    def forward(self, x: Tensor) -> Tensor:
        return _Times.apply(x, self.factor) if self.trigger.on else x


class Attention(nn.Module):
    """Causal attention with a mask of -inf, as in any language model; its scores can overflow."""

    def __init__(self, trigger: Trigger) -> None:
        super().__init__()
        self.trigger = trigger
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.softmax = nn.Softmax(dim=-1)
        self.register_buffer("mask", torch.full((64, 64), -math.inf).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.query(x) @ self.key(x).T
        if self.trigger.on:
            scores = scores * 1e3 * 1e3
        return self.softmax(scores + self.mask[: len(x), : len(x)].to(scores.dtype)) @ self.value(x)


class Block(nn.Module):
    """A place in the middle of a residual block, with its input shared by two modules."""

    def __init__(self, place: nn.Module, reentrant: bool | None = None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, WIDTH)
        self.place = place
        self.down = nn.Linear(WIDTH, WIDTH)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        if self.reentrant is None:
            return x + self.inner(x)
        return x + checkpoint(self.inner, x, use_reentrant=self.reentrant)

    def inner(self, x: Tensor) -> Tensor:
        return self.down(self.place(self.up(self.norm(x))))


class Planted(pl.LightningModule):
    """A small net with dropout, batch norm, counters and logged values; one place in it goes wrong when triggered.

    Args:
        place: makes the module at ``body.1.place``.
        planted: micro-batches, counted over the run, that trigger it.
        spoil: called at the planted micro-batches with the module and the batch, before the forward.
        spoil_loss: what becomes of the loss there.
        reentrant: checkpoint the block, in this manner.
    """

    def __init__(
        self,
        place: Callable[[Trigger], nn.Module] = TimesInForward,
        *,
        planted: Iterable[int] = (2,),
        spoil: Callable[["Planted", Any], None] | None = None,
        spoil_loss: Callable[[Tensor], Tensor] | None = None,
        reentrant: bool | None = None,
        optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = adamw,
        rank: int | None = None,
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trigger = Trigger()
        self.embedding = nn.Embedding(4, WIDTH)
        self.body = nn.Sequential(
            nn.Linear(WIDTH, WIDTH), Block(place(self.trigger), reentrant), nn.BatchNorm1d(WIDTH), nn.Dropout(0.3)
        )
        self.head = nn.Linear(WIDTH, 1)
        self.criterion = nn.MSELoss()
        self.planted, self.rank = set(planted), rank
        self.spoil, self.spoil_loss = spoil, spoil_loss
        self.make_optimizer = optimizer
        self.num_batches = 0
        self.num_calls = 0
        self.losses: list[float] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.trigger.on = self.num_batches in self.planted and self.rank in (None, self.global_rank)
        if self.trigger.on and self.spoil is not None:
            self.spoil(self, batch)
        self.num_batches += 1

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        # The batch says it, so that a replay that comes one window later sees the same.
        self.trigger.on = bool(batch[2] in self.planted) and self.rank in (None, self.global_rank)
        x = batch[0] + self.embedding(batch[0].argmax(1) % 4)
        loss = self.criterion(self.head(self.body(x)).float(), batch[1])
        if self.trigger.on and self.spoil_loss is not None:
            loss = self.spoil_loss(loss)
        self.num_calls += 1
        self.losses.append(float(loss.detach()))
        self.log(
            "loss",
            loss.detach().nan_to_num(0, 0, 0),
            on_step=True,
            on_epoch=self.trainer.world_size == 1,
            batch_size=len(x),
        )
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.make_optimizer(self.parameters())


def numbered_batches(num_batches: int, batch_size: int = 4) -> list[list[Any]]:
    """Inputs, targets, and the number of the batch."""
    generator = torch.Generator().manual_seed(1)
    xs = torch.randn(num_batches, batch_size, WIDTH, generator=generator)
    return [[x, x.square().mean(1, keepdim=True), number] for number, x in enumerate(xs)]
