"""A vision transformer in bf16: accumulation, recomputed blocks, norms and softmax in fp32.

When: you train on images or other batches without token labels. Accumulation then averages over samples, even in a
shorter last window. A policy keeps operations out of 16 bit, including functions (attention, softmax) that are not
modules.

    python recipes/vit.py           # images of 12 x 12, on any CPU, a few seconds
    python recipes/vit.py --full    # ViT-B/16 at 224 x 224, on a GPU

Expected output (numbers vary):

    4 micro-batches of 16 make a step of 64 images, 10 steps in each of 2 epochs
    recomputing saves 82% of the activations kept for backward
    accuracy 0.22 -> 1.00
"""

import argparse
import math

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_mp import AccumulationScheduler, ActivationCheckpointing, AutocastPrecision, PrecisionPolicy

CLASSES = 4


class ViT(pl.LightningModule):
    """Dosovitskiy et al. 2020, https://arxiv.org/abs/2010.11929, with mean pooling instead of a class token."""

    def __init__(self, size: int, patch: int, width: int, layers: int, heads: int, learning_rate: float):
        super().__init__()
        self.learning_rate = learning_rate
        self.patches = nn.Conv2d(3, width, patch, stride=patch)
        self.positions = nn.Parameter(0.02 * torch.randn((size // patch) ** 2, width))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden).mean(1))

    def training_step(self, batch, batch_idx):
        images, classes = batch
        return F.cross_entropy(self(images), classes)

    def validation_step(self, batch, batch_idx):
        images, classes = batch
        self.log("accuracy", (self(images).argmax(1) == classes).float().mean())

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), self.learning_rate, weight_decay=0.05, fused=True)
        # Optimizer steps, not batches; AccumulationScheduler keeps this number correct.
        steps = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, self.learning_rate, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def gratings(count: int, size: int, seed: int) -> TensorDataset:
    """Images of noisy stripes; the class is the direction of the stripes. Replace them with your own."""
    generator = torch.Generator().manual_seed(seed)
    classes = torch.randint(CLASSES, (count,), generator=generator)
    angles = (classes * torch.pi / CLASSES).view(-1, 1, 1)
    rows, columns = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    stripes = torch.sin(1.5 * (rows * angles.sin() + columns * angles.cos()))
    return TensorDataset(stripes[:, None] + torch.randn(count, 3, size, size, generator=generator), classes)


def main(full: bool) -> None:
    pl.seed_everything(0, verbose=False)
    size, patch, width, layers, heads, batch_size, target, count, epochs, learning_rate = (
        (224, 16, 768, 12, 12, 128, 1024, 10_240, 5, 1e-3) if full else (12, 4, 32, 2, 2, 16, 64, 608, 2, 5e-3)
    )
    checkpointing = ActivationCheckpointing("blocks.*")
    trainer = pl.Trainer(
        accelerator="gpu" if full else "cpu",
        devices=1,
        plugins=[AutocastPrecision("bf16-mixed", policy=PrecisionPolicy.default())],
        callbacks=[AccumulationScheduler(target_samples=target), checkpointing],
        gradient_clip_val=1.0,
        max_epochs=epochs,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=full,
    )
    module = ViT(size, patch, width, layers, heads, learning_rate)
    held_out = DataLoader(gratings(256, size, seed=2), 64)
    [before] = trainer.validate(module, held_out, verbose=False)
    trainer.fit(module, DataLoader(gratings(count, size, seed=1), batch_size, shuffle=True), held_out)
    after = trainer.callback_metrics

    micro_batches = target // batch_size
    steps_per_epoch = trainer.global_step // epochs
    assert steps_per_epoch == math.ceil(count / target)
    print(f"{micro_batches} micro-batches of {batch_size} make a step of {target} images,", end=" ")
    print(f"{steps_per_epoch} steps in each of {epochs} epochs")
    if checkpointing.report is not None:
        saved = 1 - checkpointing.report.saved_bytes / checkpointing.report.saved_bytes_without
        print(f"recomputing saves {saved:.0%} of the activations kept for backward")
    print(f"accuracy {before['accuracy']:.2f} -> {after['accuracy']:.2f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="real size, on a GPU")
    main(**vars(parser.parse_args()))
