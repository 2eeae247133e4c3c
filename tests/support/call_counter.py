"""Counts Python calls per micro-batch, in a Trainer and in a loop written by hand."""

import gc
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger
from small_models import fused_adamw, loader, quiet_trainer
from torch import Tensor, nn

WARM_UP = 5


class Layers(pl.LightningModule):
    """A transformer with few operations: the pack's share of the host's work is large."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(32, 8)
        self.layers = nn.ModuleList(
            [nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True) for _ in range(layers)]
        )
        self.head = nn.Linear(8, 32)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.embedding(batch[0])
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1).float(), batch[1].flatten())

    def configure_optimizers(self) -> Any:
        return fused_adamw(self.parameters())


class CountCalls(Callback):
    """Python functions and built-in ones that were called in the micro-batches after the first few."""

    def __init__(self, micro_batches: int) -> None:
        self.last, self.calls = WARM_UP + micro_batches, 0

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.at_start_of(batch_idx)

    def at_start_of(self, batch_idx: int) -> None:
        if batch_idx == WARM_UP:
            sys.setprofile(self._count)
        if batch_idx == self.last:
            sys.setprofile(None)

    def _count(self, frame: Any, event: str, argument: Any) -> None:
        self.calls += event in ("call", "c_call")


@contextmanager
def counted(counter: CountCalls) -> Iterator[CountCalls]:
    """Nothing but what runs in it is counted."""
    # finalizers of what earlier tests left behind would be counted, too
    gc.collect()
    gc.disable()
    try:
        yield counter
    finally:
        gc.enable()
        sys.setprofile(None)


def _batches(count: int) -> list[list[Tensor]]:
    row = torch.arange(9) % 32
    return [[row[None, :-1], row[None, 1:]]] * count


def calls(
    folder: Path,
    micro_batches: int,
    plugin: Any,
    callbacks: Iterable[Callback] = (),
    *,
    log_every_n_steps: int = 1_000,
    layers: int = 2,
) -> float:
    """Per micro-batch, under Lightning's Trainer."""
    with counted(CountCalls(micro_batches)) as counter:
        trainer = quiet_trainer(
            plugins=[plugin],
            callbacks=[*callbacks, counter],
            logger=CSVLogger(folder),
            log_every_n_steps=log_every_n_steps,
            max_steps=counter.last + 1,
            max_epochs=-1,
        )
        trainer.fit(Layers(layers), loader(_batches(counter.last + 5)))
    return counter.calls / micro_batches


def plain_loop_calls(micro_batches: int, *, layers: int = 2) -> float:
    """The same model and optimizer in bf16 autocast, without Lightning."""
    module = Layers(layers)
    optimizer = module.configure_optimizers()
    with counted(CountCalls(micro_batches)) as counter:
        for batch_idx, batch in enumerate(_batches(counter.last + 1)):
            counter.at_start_of(batch_idx)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = module.training_step(batch, batch_idx)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return counter.calls / micro_batches
