"""A pipeline started as users start it: by the script itself, by torchrun, by spawn and fork."""

import json
import os
import runpy
import subprocess
import sys

import pytest
from gloo import run_ranks

pytestmark = [pytest.mark.full, pytest.mark.timeout(240)]

SCRIPT = """
import json
import sys

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_mp import AutocastPrecision, PipelineParallelStrategy, pipelined_loss


class Module(pl.LightningModule):
    pipeline_layers = ("layers.*",)

    def __init__(self, start):
        super().__init__()
        torch.manual_seed(0)
        self.start = start
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
        self.losses = []

    def pipeline_loss(self, output, batch):
        return output.float().square().mean()

    def training_step(self, batch, batch_idx):
        loss = pipelined_loss(self, batch)
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def on_train_end(self):
        with open(f"{self.start}-{self.global_rank}.json", "w") as file:
            json.dump(self.losses, file)


def train(start):
    strategy = {"mp_pipeline": "mp_pipeline", "ddp": "ddp"}.get(start) or PipelineParallelStrategy(start_method=start)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1 if start == "ddp" else 2,
        strategy=strategy,
        plugins=[AutocastPrecision("bf16-mixed")],
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    data = torch.randn(32, 8, generator=torch.Generator().manual_seed(1))
    trainer.fit(Module(start), DataLoader(data, batch_size=8))


if __name__ == "__main__":
    for start in sys.argv[1:]:
        train(start)
"""

TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


@pytest.fixture(scope="module")
def wanted(tmp_path_factory):
    """One process has nothing to be launched: the script runs in a fork."""
    folder = tmp_path_factory.mktemp("one")
    (folder / "train.py").write_text(SCRIPT)

    def alone(rank):
        os.chdir(folder)
        runpy.run_path("train.py")["train"]("ddp")

    run_ranks(alone, 1)
    return json.loads((folder / "ddp-0.json").read_text())


@pytest.mark.parametrize(
    ("launcher", "starts"), [([], ["mp_pipeline"]), (TORCHRUN, ["mp_pipeline"]), ([], ["fork", "spawn"])]
)
def test_a_pipeline_trains_however_it_is_started(launcher, starts, tmp_path, wanted):
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, *launcher, "train.py", *starts]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    for start in starts:
        first, second = (json.loads((tmp_path / f"{start}-{rank}.json").read_text()) for rank in (0, 1))
        assert first == second
        assert first == pytest.approx(wanted, rel=1e-2)
