"""What the pack costs the host: Python calls per micro-batch beside stock Lightning, counted and not timed."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.precision import MixedPrecision
from small_models import fused_adamw, loader, quiet_trainer
from torch import nn

from lightning_mp import (
    AccumulationScheduler,
    AutocastPrecision,
    ChinchillaBudget,
    MFUMonitor,
    OverflowMonitor,
    OverflowPostMortem,
    UnderflowMonitor,
)
from lightning_mp.callbacks.token_learning_rate import TokenLearningRate
from lightning_mp.lr_schedule.schedules import WarmupCosine

STOCK = MixedPrecision("bf16-mixed", "cpu")
WARM_UP = 5


class TwoLayers(pl.LightningModule):
    """A transformer with few operations: the pack's share of the host's work is large."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(32, 8)
        self.layers = nn.ModuleList([nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True) for _ in range(2)])
        self.head = nn.Linear(8, 32)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
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
        if batch_idx == WARM_UP:
            sys.setprofile(self._count)
        if batch_idx == self.last:
            sys.setprofile(None)

    def _count(self, frame: Any, event: str, argument: Any) -> None:
        self.calls += event in ("call", "c_call")


def calls(
    folder: Path, micro_batches: int, plugin: Any, callbacks: Sequence[Callback] = (), *, log_every_n_steps: int = 1_000
) -> float:
    """Per micro-batch."""
    counter = CountCalls(micro_batches)
    trainer = quiet_trainer(
        plugins=[plugin],
        callbacks=[*callbacks, counter],
        logger=CSVLogger(folder),
        log_every_n_steps=log_every_n_steps,
        max_steps=counter.last + 1,
        max_epochs=-1,
    )
    row = torch.arange(9) % 32
    try:
        trainer.fit(TwoLayers(), loader([[row[None, :-1], row[None, 1:]]] * (counter.last + 5)))
    finally:
        sys.setprofile(None)
    return counter.calls / micro_batches


def all_seven() -> list[Callback]:
    return [
        OverflowMonitor(),
        OverflowPostMortem(),
        UnderflowMonitor(),
        MFUMonitor(),
        AccumulationScheduler({0: 1}),
        ChinchillaBudget(tokens="1B"),
        TokenLearningRate(WarmupCosine()),
    ]


@pytest.mark.filterwarnings("ignore:max_steps=.* ends before the budget", "ignore:The run ended after")
@pytest.mark.filterwarnings("ignore:TokenLearningRate. the horizon is")
@pytest.mark.parametrize("micro_batches", [5, pytest.param(100, marks=pytest.mark.full)])
def test_the_plugin_costs_a_tenth_and_all_callbacks_a_quarter_of_stock(tmp_path: Path, micro_batches: int) -> None:
    """Between logging steps; on one at most three times as much. Among 100 is a step that is observed for underflow."""
    stock = calls(tmp_path, micro_batches, STOCK)
    assert calls(tmp_path, micro_batches, AutocastPrecision("bf16-mixed")) <= 1.10 * stock
    assert calls(tmp_path, micro_batches, AutocastPrecision("bf16-mixed"), all_seven()) <= 1.25 * stock
    on_a_logging_step = calls(
        tmp_path, micro_batches, AutocastPrecision("bf16-mixed"), all_seven(), log_every_n_steps=1
    )
    assert on_a_logging_step <= 3 * stock
