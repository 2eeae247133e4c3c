"""Modules that run out of memory when and where a test says, and plain loops with the same microbatches."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from small_models import WIDTH
from torch import Tensor, nn

Where = Literal["forward", "backward"]


def out_of_memory(*_: Any) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. (planted)")


class Limited(pl.LightningModule):
    """A net with dropout that runs out of memory with more than ``limit`` rows, from micro-batch ``first`` on.

    In "backward" the error comes when the last layer has its gradient and the first has not.
    """

    def __init__(
        self,
        limit: int = 10**9,
        where: Where = "forward",
        *,
        first: int = 0,
        dropout: float = 0.0,
        make_optimizer: Callable[..., torch.optim.Optimizer] | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Dropout(dropout), nn.Linear(16, 1)).to(dtype)
        self.limit, self.where, self.first = limit, where, first
        self.make_optimizer = make_optimizer or (lambda parameters: torch.optim.SGD(parameters, lr=1e-1))
        self.attempts: list[tuple[int, int]] = []
        self.gradients: list[list[Tensor]] = []
        self.steps = 0
        # Not in an attribute of the module itself: those are put back after a failure.
        self.notes = Notes()

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Any:
        x, y = batch
        self.steps += 1
        self.notes.rows.append((batch_idx, len(x)))
        too_large = len(x) > self.limit and batch_idx >= self.first
        middle = self.net[:3](x)
        if too_large and self.where == "forward" and torch.is_grad_enabled():
            out_of_memory()
        if too_large and middle.requires_grad:
            middle.register_hook(out_of_memory)
        loss = nn.functional.mse_loss(self.net[3](middle).to(y.dtype), y)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return {"loss": loss, "rows": x[:, 0], "double": 2 * loss}

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            self.random_state = torch.get_rng_state()

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.gradients.append([p.grad.clone() for p in self.parameters() if p.grad is not None])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.make_optimizer(self.parameters())


class Notes:
    """What really ran, failed attempts too."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, int]] = []


def microbatched_loop(
    model: Limited, batches: Sequence[Sequence[Tensor]], sizes: Sequence[Sequence[int]], window: int = 1
) -> list[list[Tensor]]:
    """Plain PyTorch: micro-batch ``i`` in microbatches of ``sizes[i]`` rows, weighed by rows; the gradients."""
    optimizer = model.configure_optimizers()
    gradients = []
    for index, ((x, y), rows) in enumerate(zip(batches, sizes, strict=True)):
        if index % window == 0:
            optimizer.zero_grad()
        for microbatch_x, microbatch_y in zip(x.split(list(rows)), y.split(list(rows)), strict=True):
            loss = nn.functional.mse_loss(model.net(microbatch_x).to(y.dtype), microbatch_y)
            (loss * (len(microbatch_x) / len(x)) / window).backward()
        if index % window == window - 1 or index + 1 == len(batches):
            gradients.append([p.grad.clone() for p in model.parameters()])
            optimizer.step()
    return gradients
