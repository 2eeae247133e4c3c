"""The code in docs/pipeline.md runs as it stands there."""

import re
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from gloo import run_ranks
from torch.utils.data import DataLoader

from lightning_mp import PipelineParallelStrategy

PAGE = (Path(__file__).parents[2] / "docs" / "pipeline.md").read_text()


def code() -> list[str]:
    return re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def train(strategy, devices, **trainer_args):
    space = {}
    exec(code()[0], space)  # our own page
    torch.manual_seed(0)
    module = space["LanguageModel"]()
    ids = torch.randint(0, 64, (16, 13), generator=torch.Generator().manual_seed(1))
    loader = DataLoader([{"input_ids": row[:-1], "labels": row[1:]} for row in ids], batch_size=8)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **trainer_args,
    )
    trainer.fit(module, loader, loader)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return metrics, [tuple(out.shape) for out in trainer.predict(module, loader)]


@pytest.mark.full
def test_the_model_of_the_page_trains_on_two_stages_as_on_one_process():
    [wanted] = run_ranks(lambda _: train("ddp", 1), 1)
    for metrics, shapes in run_ranks(lambda _: train(PipelineParallelStrategy(), 2), 2):
        assert metrics == pytest.approx(wanted[0], rel=1e-3)
        assert shapes == wanted[1] == [(8, 12, 64)] * 2


def test_the_trainer_of_the_page_is_built():
    built = {}
    exec(code()[1].replace("pl.Trainer(", "Trainer("), {"Trainer": built.update})
    assert isinstance(built["strategy"], PipelineParallelStrategy)
    assert (built["strategy"].stages, built["strategy"].microbatches, built["devices"]) == (2, 8, 4)
