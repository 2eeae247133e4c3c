"""docs/logged_names.md lists what a run with every callback logs, and nothing else."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import TQDMProgressBar
from memory_logger import MemoryLogger
from small_models import TokenModel, loader, quiet_trainer, token_batches
from torch import Tensor

from lightning_mp import (
    AccumulationScheduler,
    AutocastPrecision,
    ChinchillaBudget,
    GradientNoiseScale,
    LossScaler,
    MFUMonitor,
    OverflowMonitor,
    OverflowPostMortem,
    UnderflowMonitor,
)
from lightning_mp.callbacks.budget_forecast import BudgetForecast

TABLE = Path(__file__).parents[2] / "docs" / "logged_names.md"


class Logs(TokenModel):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("train/loss", loss.detach())
        return loss * torch.inf if batch_idx == 9 else loss


class Bar(TQDMProgressBar):
    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def get_metrics(self, trainer: Any, pl_module: Any) -> Any:
        metrics = super().get_metrics(trainer, pl_module)
        self.names |= {name for name in metrics if name.startswith("mp/")}
        return metrics


@pytest.mark.full
@pytest.mark.filterwarnings(
    "ignore:ChinchillaBudget. the data end before the budget", "ignore:ChinchillaBudget. the run ended after"
)
@pytest.mark.filterwarnings("ignore:Optimizer step .* was skipped:RuntimeWarning")
def test_the_table_lists_what_is_logged() -> None:
    logger, bar = MemoryLogger(), Bar()
    trainer = quiet_trainer(
        plugins=[AutocastPrecision("16-mixed", scaler=LossScaler(init_scale=2.0**10))],
        callbacks=[
            OverflowMonitor(),
            OverflowPostMortem(),
            UnderflowMonitor(every_n_steps=20),
            MFUMonitor(peak_flops=1e12),
            AccumulationScheduler({0: 2}),
            ChinchillaBudget(tokens=10**6),
            BudgetForecast("train/loss", every_n_steps=80),
            GradientNoiseScale(average_steps=20),
            bar,
        ],
        logger=logger,
        log_every_n_steps=10,
        enable_progress_bar=True,
    )
    model = Logs(lambda parameters: torch.optim.SGD(parameters, lr=0.02, fused=True))
    batches = [[x, torch.ones_like(y)] for x, y in token_batches([6, 8] * 80)]
    trainer.fit(model, loader(batches))
    rows = re.findall(r"^\| `(mp/\w+)`( \*)? \|", TABLE.read_text(), re.MULTILINE)
    names = [name for name, _ in rows]
    assert sorted(names) == sorted({f"mp/{name}" for _, row in logger.ours() for name in row})
    assert {name for name, marked in rows if marked} == bar.names
