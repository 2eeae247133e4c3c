"""Master weights where CUDA has code of its own: cuDNN's flat weights, CUDA graphs, its allocator, its fused kernels.

References are loops on the same device. The CPU rehearses what does not need the device.
"""

import gc
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from master_loops import master_weights
from small_models import loader
from torch import Tensor, nn

DEVICES = ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)]
STORAGES = ["fp32", "remainder", "24bit"]
WIDTH, STEPS = 32, 4


def trainer(device: str, **arguments: Any) -> pl.Trainer:
    """One device, without files and output."""
    quiet = dict.fromkeys(("enable_checkpointing", "enable_progress_bar", "enable_model_summary", "logger"), False)
    return pl.Trainer(accelerator=device, devices=1, max_epochs=1, **quiet, **arguments)  # type: ignore[arg-type]


class Net(pl.LightningModule):
    """A model, its loss, and the fused AdamW of a hand-written loop."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body
        self.losses: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        output = self.body(batch)
        loss = (output[0] if isinstance(output, tuple) else output).float().square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3, fused=True)


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(4, 6, WIDTH, generator=generator) for _ in range(STEPS)]


def losses(body: nn.Module, device: str, plugin: Any = None) -> list[float]:
    module = Net(body)
    trainer(device, plugins=[plugin] if plugin is not None else []).fit(module, loader(batches()))
    return module.losses


BODIES = {
    "linear": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)),
    "lstm": lambda: nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True),
    "gru": lambda: nn.GRU(WIDTH, WIDTH, batch_first=True, bidirectional=True),
    "conv": lambda: nn.Sequential(nn.Conv1d(6, 8, 3), nn.BatchNorm1d(8), nn.ReLU(), nn.Conv1d(8, 6, 3)),
}


def made(body: str) -> nn.Module:
    torch.manual_seed(0)
    return BODIES[body]()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("body", BODIES)
def test_masters_train_as_32_bit_does_up_to_the_rounding_of_16(body: str, storage: str, device: str) -> None:
    """cuDNN keeps the weights of recurrent layers in one flat tensor; the gradients of a fused AdamW are 16 bit."""
    ours = losses(made(body), device, master_weights("bf16-true", storage))
    reference = losses(made(body), device)
    assert ours == pytest.approx(reference, rel=2e-2)
    assert ours[-1] < ours[0]


@pytest.mark.gpu
@pytest.mark.parametrize("storage", STORAGES)
def test_cuda_graphs_replay_what_eager_computes(storage: str) -> None:
    """A graph reads the addresses that it was recorded with: of copies of the weights, which each window makes anew."""
    body = made("linear")
    compiled = made("linear")
    compiled.compile(mode="reduce-overhead")
    eager = losses(body, "gpu", master_weights("bf16-true", storage))
    assert losses(compiled, "gpu", master_weights("bf16-true", storage)) == pytest.approx(eager, rel=1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize(("storage", "kept_bytes"), [("fp32", 4 + 8 + 2), ("remainder", 2 + 2 + 8 + 2), ("24bit", 13)])
def test_between_two_steps_the_allocator_holds_the_bytes_of_the_table(storage: str, kept_bytes: int) -> None:
    """Weight or master, moments and the last gradient; with "remainder" and "24bit" fp32 weights are given away."""

    class Held(pl.Callback):
        bytes_per_parameter = 0.0

        def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
            gc.collect()
            held = torch.cuda.memory_allocated(pl_module.device)
            self.bytes_per_parameter = held / sum(p.numel() for p in pl_module.parameters())

    module, held = Net(nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8)))), Held()
    data = loader([torch.randn(2, 1024) for _ in range(3)])
    trainer("gpu", plugins=[master_weights("bf16-true", storage)], callbacks=[held]).fit(module, data)
    assert held.bytes_per_parameter < kept_bytes + 1.5


@pytest.mark.gpu
@pytest.mark.parametrize("storage", STORAGES)
def test_fused_adamw_on_the_gpu_steps_as_on_the_cpu(storage: str) -> None:
    gpu = losses(made("linear"), "gpu", master_weights("bf16-true", storage))
    assert gpu == pytest.approx(losses(made("linear"), "cpu", master_weights("bf16-true", storage)), rel=1e-2)
