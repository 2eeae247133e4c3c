"""Every way in which Lightning starts ranks: a script as users write it, an overflow on one of two, nothing is left.

To start Python is what takes long, so a script fits several times, once for each strategy that can be started in its
way, and each of these runs is looked at by a test of its own. Under torchrun scripts run in test_faults_launchers.py
and test_many_nodes.py.
"""

import json
import os
import signal
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from started_python import plain_environment

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]

TIMEOUT_SECONDS = 500

SCRIPT = """
import json
import sys

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_mp import AutocastPrecision, LossScaler, PipelineParallelStrategy
from lightning_mp.pipelining import pipelined_loss


class Recorded(pl.LightningModule):
    def __init__(self, run):
        super().__init__()
        torch.manual_seed(0)
        self.run, self.seen = run, []

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def on_train_end(self):
        with open(f"{self.run}-rank{self.global_rank}.json", "w") as file:
            json.dump([self.seen, [weight.tolist() for weight in self.parameters() if not weight.is_meta]], file)


class Overflows(Recorded):
    def __init__(self, run):
        super().__init__(run)
        self.layer = nn.Linear(8, 1)

    def training_step(self, batch, batch_idx):
        loss = self.layer(batch).float().square().mean()
        return loss * torch.inf if batch_idx == 2 and self.global_rank == 1 else loss

    def on_after_optimizer_step(self, optimizer, outcome):
        self.seen.append([outcome.stepped, outcome.loss_scale])


class Pipelined(Recorded):
    pipeline_layers = ("layers.*",)

    def __init__(self, run):
        super().__init__(run)
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))

    def pipeline_loss(self, output, batch):
        return output.float().square().mean()

    def training_step(self, batch, batch_idx):
        loss = pipelined_loss(self, batch)
        self.seen.append(float(loss.detach()))
        return loss


STRATEGIES = {
    "pipeline_spawn": lambda: PipelineParallelStrategy(start_method="spawn"),
    "pipeline_fork": lambda: PipelineParallelStrategy(start_method="fork"),
    "alone": lambda: "ddp",  # on one device, which draws samples as several do
}


if __name__ == "__main__":
    for run in sys.argv[1:]:
        pipelined = "pipeline" in run or run == "alone"
        fp16 = AutocastPrecision("16-mixed", scaler=LossScaler(init_scale=1024.0))
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=1 if run == "alone" else 2,
            strategy=STRATEGIES.get(run, lambda: run)(),
            plugins=[AutocastPrecision("bf16-mixed") if pipelined else fp16],
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
        )
        data = torch.randn(40, 8, generator=torch.Generator().manual_seed(1))
        trainer.fit(Pipelined(run) if pipelined else Overflows(run), DataLoader(data, batch_size=8 if pipelined else 4))
"""

# Forks come first: a process that has computed is not forked.
LAUNCHES = {
    "subprocess": ("ddp", "mp_ddp_bf16_reduce", "mp_pipeline"),
    "multiprocessing": ("ddp_fork", "pipeline_fork", "pipeline_spawn", "alone"),
}
PIPELINED = [(name, run) for name, runs in LAUNCHES.items() for run in runs if "pipeline" in run]
REPLICATED = [(name, run) for name, runs in LAUNCHES.items() for run in runs if "ddp" in run]


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What the ranks of a run have written; a script is started when it is first asked for."""

    @cache
    def start(name: str) -> Path:
        folder = tmp_path_factory.mktemp(name)
        launch(folder, LAUNCHES[name])
        return folder

    def results(name: str, run: str) -> list[Any]:
        return [json.loads(path.read_text()) for path in sorted(start(name).glob(f"{run}-rank*.json"))]

    return results


def launch(folder: Path, runs: tuple[str, ...]) -> None:
    script = folder / "train.py"
    script.write_text(SCRIPT)
    process = subprocess.Popen(
        [sys.executable, str(script), *runs],
        cwd=folder,
        env=plain_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=TIMEOUT_SECONDS)
        assert process.returncode == 0, output
        assert not processes_in(process.pid)
    finally:
        for pid in processes_in(process.pid, patience_seconds=0):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(("name", "run"), REPLICATED)
def test_both_ranks_skip_the_step_and_end(name: str, run: str, launched: Any) -> None:
    first, second = launched(name, run)
    assert first == second
    assert first[0] == [[True, 1024.0], [True, 1024.0], [False, 1024.0], [True, 512.0], [True, 512.0]]


@pytest.mark.parametrize(("name", "run"), PIPELINED)
def test_a_pipeline_trains_however_it_is_started(name: str, run: str, launched: Any) -> None:
    (first, _), (second, _) = launched(name, run)
    [(alone, _)] = launched("multiprocessing", "alone")
    assert first == second
    assert len(first) == 5
    assert first == pytest.approx(alone, rel=1e-2)


def processes_in(session: int, patience_seconds: float = 30.0) -> list[int]:
    """Processes of a session that have not ended by themselves, from Linux's /proc."""
    deadline = time.monotonic() + patience_seconds
    while True:
        alive = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = stat.read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[3]) == session and fields[0] != "Z":
                alive.append(int(stat.parent.name))
        if not alive or time.monotonic() > deadline:
            return alive
        time.sleep(0.05)
