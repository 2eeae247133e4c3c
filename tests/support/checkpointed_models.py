"""Blocks with norm and dropout that note their runs and gradients, for tests of activation checkpointing."""

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from small_models import WIDTH, loader, quiet_trainer, regression_batches
from torch import Tensor, nn

from lightning_mp.callbacks.activation_checkpointing import ActivationCheckpointing


class DropBlock(nn.Module):
    """Norm, with running statistics or without, dropout, and notes of its runs."""

    def __init__(self, norm: type[nn.Module] = nn.BatchNorm1d) -> None:
        super().__init__()
        self.norm = norm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.3)
        self.runs: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        up = self.up(self.norm(x))
        self.runs.append(up.dtype)
        return x + self.drop(self.down(nn.functional.gelu(up)))


class Stack(pl.LightningModule):
    """Blocks that are made where ``built_in`` says."""

    norm: type[nn.Module] = nn.BatchNorm1d

    def __init__(self, built_in: str = "init", num_blocks: int = 4) -> None:
        super().__init__()
        self.num_blocks = num_blocks
        self.gradients: list[list[Tensor]] = []
        if built_in == "init":
            self.build()
        self.built_in = built_in

    def build(self) -> None:
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(DropBlock(self.norm) for _ in range(self.num_blocks))
        self.head = nn.Linear(WIDTH, 1)

    def setup(self, stage: str) -> None:
        if self.built_in == "setup":
            self.build()

    def on_train_start(self) -> None:
        torch.manual_seed(1)  # building has drawn numbers

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        for block in self.blocks:
            x = block(x)
        return nn.functional.mse_loss(self.head(x).float(), y.float())

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.gradients.append([p.grad.clone() for p in self.parameters() if p.grad is not None])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class LateStack(Stack):
    def configure_model(self) -> None:
        if self.built_in == "configure_model":
            self.build()


def fit(module: Any, *callbacks: Callback, batches: Any = None, **arguments: Any) -> Any:
    torch.manual_seed(1)
    trainer = quiet_trainer(callbacks=list(callbacks), **arguments)
    trainer.fit(module, batches if batches is not None else loader(regression_batches(4)))
    return module


def assert_same(module: Any, reference: Any) -> None:
    """Gradients of every step, weights, buffers and names, to the last bit."""
    assert list(module.state_dict()) == list(reference.state_dict())
    for ours, theirs in zip(module.state_dict().values(), reference.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs)
    assert len(module.gradients) == len(reference.gradients) > 0
    for step, other in zip(module.gradients, reference.gradients, strict=True):
        assert all(map(torch.equal, step, other))


def taken(*modules: Any, **arguments: Any) -> ActivationCheckpointing:
    return ActivationCheckpointing(list(modules) if len(modules) > 1 else modules[0], **arguments)
