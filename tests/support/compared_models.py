"""Tiny projects and planted precisions for comparisons of precisions."""

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class TinyClassifier(pl.LightningModule):
    """Pictures into two classes, with batch statistics and dropout; weights come from the global generator."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.2), nn.Flatten())
        self.head = nn.Linear(4 * 36, 2)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        pictures, classes = batch
        loss = nn.functional.cross_entropy(self.head(self.net(pictures)).float(), classes)
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        pictures, classes = batch
        self.log("val/loss", nn.functional.cross_entropy(self.head(self.net(pictures)).float(), classes))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def pictures(count: int = 20, *, seed: int = 0) -> TensorDataset:
    """Noise, brighter in the upper half in class 1."""
    generator = torch.Generator().manual_seed(seed)
    classes = torch.randint(0, 2, (count,), generator=generator)
    noise = torch.randn(count, 1, 8, 8, generator=generator)
    noise[:, :, :4] += classes.view(-1, 1, 1, 1)
    return TensorDataset(noise, classes)


class Pictures(pl.LightningDataModule):
    """Shuffled from the global generator; five batches in an epoch."""

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(pictures(), batch_size=4, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(pictures(16, seed=1), batch_size=16)


class CoarseWeights(Precision):
    """A precision that is worse for certain: after each step, weights are rounded to tenths."""

    def optimizer_step(self, optimizer: Any, model: Any, closure: Any, **kwargs: Any) -> Any:
        result = super().optimizer_step(optimizer, model, closure, **kwargs)
        with torch.no_grad():
            for weight in model.parameters():
                weight.copy_((10 * weight).round() / 10)
        return result


class ThirstyPrecision(Precision):
    """fp32 that draws random numbers of its own, as formats with other dropout kernels do."""

    def __init__(self) -> None:
        super().__init__()
        torch.rand(5)

    def convert_input(self, data: Any) -> Any:
        torch.rand(17)
        return super().convert_input(data)

    def pre_backward(self, tensor: Tensor, module: pl.LightningModule) -> Tensor:
        torch.rand(23)
        return super().pre_backward(tensor, module)
