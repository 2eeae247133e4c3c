"""fp16 with a loss scale, for GPUs without bf16: T4, V100, RTX 20.

When: compute capability 7.0 or 7.5. `torch.cuda.is_bf16_supported()` returns True there, because it counts emulation;
pass `including_emulation=False`. The default wheels of torch 2.11 and later no longer support V100; the cu126 wheels
do. Make the numbers of channels and classes multiples of 8, so that the fp16 matrix units are used.

    python recipes/fp16_t4.py           # toy size, on any CPU, a few seconds
    python recipes/fp16_t4.py --full    # on a GPU

Expected output (numbers vary):

    accuracy 1.00 after 24 steps
    loss scale 65536, 0 steps skipped

A few skipped steps at the start are normal: the scale is halved until the gradients fit.
"""

import argparse

import lightning.pytorch as pl
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_mp import AutocastPrecision, OverflowMonitor

CLASSES = 8


class Classifier(pl.LightningModule):
    def __init__(self, width: int, steps: int):
        super().__init__()
        self.steps = steps
        self.net = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(2 * width, CLASSES),
        )

    def training_step(self, batch, batch_idx):
        images, classes = batch
        return F.cross_entropy(self.net(images), classes)

    def validation_step(self, batch, batch_idx):
        images, classes = batch
        self.log("accuracy", (self.net(images).argmax(1) == classes).float().mean())

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), 1e-2, fused=True)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=self.steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def gratings(count: int, size: int, seed: int) -> TensorDataset:
    """Images of stripes; the class is their direction."""
    generator = torch.Generator().manual_seed(seed)
    classes = torch.randint(CLASSES, (count,), generator=generator)
    angles = (classes * torch.pi / CLASSES).view(-1, 1, 1)
    rows, columns = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    stripes = torch.sin(1.5 * (rows * angles.sin() + columns * angles.cos()))
    return TensorDataset(stripes[:, None] + 0.3 * torch.randn(count, 3, size, size, generator=generator), classes)


def main(full: bool) -> None:
    pl.seed_everything(0, verbose=False)
    width, size, batch_size, steps = (64, 64, 256, 500) if full else (16, 12, 32, 24)
    monitor = OverflowMonitor()
    trainer = pl.Trainer(
        accelerator="gpu" if full else "cpu",
        devices=1,
        plugins=[AutocastPrecision("16-mixed")],  # includes a LossScaler
        callbacks=[monitor],
        gradient_clip_val=1.0,  # Lightning's own plugin refuses this with a fused optimizer
        max_steps=steps,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=full,
    )
    data = DataLoader(gratings(batch_size * steps, size, seed=1), batch_size)
    trainer.fit(Classifier(width, steps), data, DataLoader(gratings(256, size, seed=2), batch_size))
    print(f"accuracy {trainer.callback_metrics['accuracy']:.2f} after {steps} steps")
    print(f"loss scale {monitor.loss_scale:.0f}, {monitor.skipped_steps} steps skipped")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="real size, on a GPU")
    main(**vars(parser.parse_args()))
