"""Every way to start ranks: a script as users write it, an overflow on one of two, and nothing left behind."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = [pytest.mark.full, pytest.mark.timeout(240)]

TIMEOUT_SECONDS = 120

SCRIPT = """
import json
import sys

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from lightning_mp import AutocastPrecision, LossScaler
from lightning_mp.strategies import ReducedPrecisionDDPStrategy


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(8, 1)

    def training_step(self, batch, batch_idx):
        loss = self.layer(batch).float().square().mean()
        return loss * torch.inf if batch_idx == 2 and self.global_rank == 1 else loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def on_after_optimizer_step(self, optimizer, outcome):
        self.outcomes = [*getattr(self, "outcomes", []), [outcome.stepped, outcome.loss_scale]]

    def on_train_end(self):
        result = {"outcomes": self.outcomes, "weight": self.layer.weight.tolist()}
        with open(f"rank{self.global_rank}.json", "w") as file:
            json.dump(result, file)


if __name__ == "__main__":
    strategy = sys.argv[1]
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=ReducedPrecisionDDPStrategy("bf16", start_method="spawn") if strategy == "reduced_spawn" else strategy,
        plugins=[AutocastPrecision("16-mixed", scaler=LossScaler(init_scale=1024.0))],
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    data = torch.randn(40, 8, generator=torch.Generator().manual_seed(1))
    trainer.fit(Module(), DataLoader(data, batch_size=4))
"""

TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node=2"]


@pytest.mark.parametrize(
    ("launcher", "strategy"),
    [
        ([], "ddp"),
        ([], "ddp_spawn"),
        ([], "ddp_fork"),
        (TORCHRUN, "ddp"),
        ([], "mp_ddp_bf16_reduce"),
        ([], "reduced_spawn"),
        (TORCHRUN, "mp_ddp_bf16_reduce"),
    ],
    ids=["subprocess", "spawn", "fork", "torchrun", "reduced-subprocess", "reduced-spawn", "reduced-torchrun"],
)
def test_both_ranks_skip_the_step_and_end(launcher: list[str], strategy: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    if launcher:
        with socket.socket() as holder:
            holder.bind(("127.0.0.1", 0))
            launcher = [*launcher, "--master-addr=127.0.0.1", f"--master-port={holder.getsockname()[1]}"]
    process = subprocess.Popen(
        [sys.executable, *launcher, str(script), strategy],
        cwd=tmp_path,
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
        for pid in processes_in(process.pid):
            os.kill(pid, signal.SIGKILL)
    first, second = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1))
    assert first == second
    assert first["outcomes"] == [[True, 1024.0], [True, 1024.0], [False, 1024.0], [True, 512.0], [True, 512.0]]


def processes_in(session: int, patience_seconds: float = 5.0) -> list[int]:
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
