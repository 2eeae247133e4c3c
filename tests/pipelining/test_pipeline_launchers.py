"""A pipeline started as users start it: by the script itself, by torchrun, by spawn and fork."""

import json
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.full, pytest.mark.timeout(240)]

SCRIPT = """
import json
import sys

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_mp import AutocastPrecision, PipelineParallelStrategy
from lightning_mp.pipelining import pipelined_loss


class Module(pl.LightningModule):
    pipeline_layers = ("layers.*",)

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
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
        with open(f"rank{self.global_rank}.json", "w") as file:
            json.dump(self.losses, file)


if __name__ == "__main__":
    start = sys.argv[1]
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
    trainer.fit(Module(), DataLoader(data, batch_size=8))
"""

TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


def losses(folder, launcher, start):
    folder.mkdir()
    script = folder / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, *launcher, str(script), start]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(path.read_text()) for path in sorted(folder.glob("rank*.json"))]


@pytest.fixture(scope="module")
def wanted(tmp_path_factory):
    [alone] = losses(tmp_path_factory.mktemp("one") / "run", [], "ddp")
    return alone


@pytest.mark.parametrize(
    ("launcher", "start"), [([], "mp_pipeline"), (TORCHRUN, "mp_pipeline"), ([], "spawn"), ([], "fork")]
)
def test_a_pipeline_trains_however_it_is_started(launcher, start, tmp_path, wanted):
    first, second = losses(tmp_path / "two", launcher, start)
    assert first == second
    assert first == pytest.approx(wanted, rel=1e-2)
