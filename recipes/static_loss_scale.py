"""A static loss scale, chosen by measurement.

When: every run must take the same steps (comparisons, a published recipe, regression tests), or the scale must not
change. `UnderflowMonitor` suggests the largest power of two that leaves one doubling of headroom. A static scale is not
lowered after an overflow: steps that overflow are skipped, and a scale that is far too high skips all of them.

    python recipes/static_loss_scale.py           # toy size, on any CPU, a few seconds
    python recipes/static_loss_scale.py --full    # on a GPU

Expected output (numbers vary):

    static scale 16: 1.2% of the gradients of activations are subnormal; suggested: 65536
    static scale 65536: 0 of 40 steps skipped, loss 1.84 -> 0.45
    static scale 1073741824: LossScaleFloorError after 21 skipped steps
"""

import argparse

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_mp import AutocastPrecision, LossScaler, OverflowMonitor, UnderflowMonitor
from lightning_mp.diagnostics import LossScaleFloorError


class Regression(pl.LightningModule):
    def __init__(self, width: int):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(16, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 1)
        )
        self.losses = []

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        loss = nn.functional.mse_loss(self.net(inputs).float(), targets)
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-2, fused=True)


def train(scaler: LossScaler, full: bool, *callbacks: pl.Callback) -> list[torch.Tensor]:
    pl.seed_everything(0, verbose=False)
    width, batch_size, steps = (2048, 4096, 400) if full else (32, 64, 40)
    inputs = torch.randn(batch_size * steps, 16)
    targets = inputs[:, :1] * inputs[:, 1:2] + inputs[:, 2:3]
    trainer = pl.Trainer(
        accelerator="gpu" if full else "cpu",
        devices=1,
        plugins=[AutocastPrecision("16-mixed", scaler=scaler)],
        callbacks=list(callbacks),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=full,
    )
    module = Regression(width)
    trainer.fit(module, DataLoader(TensorDataset(inputs, targets), batch_size))
    return module.losses


def main(full: bool) -> None:
    # 1. Measure, at a scale that does not overflow. Backward computes the gradients of activations in 16 bit.
    underflow = UnderflowMonitor("fp16", every_n_steps=10, watch=["gradients", "activation_gradients"])
    train(LossScaler.static(16.0), full, underflow)
    scale = underflow.suggested_scale
    lost = underflow.history[-1]["activation_gradients"].subnormal_fraction
    print(f"static scale 16: {lost:.1%} of the gradients of activations are subnormal; suggested: {scale:.0f}")

    # 2. Train at the suggested scale. It never changes.
    monitor = OverflowMonitor()
    losses = train(LossScaler.static(scale), full, monitor)
    first, last = torch.stack(losses[:5]).mean(), torch.stack(losses[-5:]).mean()
    print(f"static scale {scale:.0f}: {monitor.skipped_steps} of {monitor.attempted_steps} steps skipped,", end=" ")
    print(f"loss {first:.2f} -> {last:.2f}")

    # 3. A scale that is far too high skips all steps, and OverflowMonitor ends the run after 20 in a row.
    monitor = OverflowMonitor()
    try:
        train(LossScaler.static(2.0**30), full, monitor)
    except LossScaleFloorError:
        print(f"static scale {2**30}: LossScaleFloorError after {monitor.skipped_steps} skipped steps")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="real size, on a GPU")
    main(**vars(parser.parse_args()))
