"""LightningModules that say how to split themselves, and short fits of them, for tests of the pipeline."""

from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_mp.language_model import GPT, GPTConfig
from lightning_mp.pipelining.api import pipelined_loss, pipelined_metrics, pipelined_output
from lightning_mp.pipelining.layers import PipelineLayer

VOCAB = 32


class PipelinedMLP(pl.LightningModule):
    """Five layers by glob, two parameter groups, mean squared error."""

    pipeline_layers: Any = ("layers.*",)

    def __init__(self, optimizer: type = torch.optim.SGD, **optimizer_args: Any) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(5))
        self.optimizer, self.optimizer_args = optimizer, optimizer_args or {"lr": 0.1, "momentum": 0.9}
        self.train_losses: list[float] = []
        self.val_losses: list[float] = []

    def pipeline_loss(self, output: torch.Tensor, batch: Any) -> torch.Tensor:
        return F.mse_loss(output.float(), batch[1].float())

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = pipelined_loss(self, batch)
        self.log("train_loss", loss)
        self.train_losses.append(float(loss.detach()))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = pipelined_loss(self, batch)
        self.log("val_loss", loss, sync_dist=True)
        self.val_losses.append(float(loss))

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return pipelined_output(self, batch)

    def configure_optimizers(self) -> Any:
        weights = [p for name, p in self.named_parameters() if name.endswith("weight")]
        biases = [p for name, p in self.named_parameters() if name.endswith("bias")]
        return self.optimizer([{"params": biases}, {"params": weights}], **self.optimizer_args)


class PipelinedGPT(PipelinedMLP):
    """The GPT of the demo: positions are added between modules, and the head is tied to the embedding."""

    def __init__(self, optimizer: type = torch.optim.SGD, **optimizer_args: Any) -> None:
        super().__init__(optimizer, **optimizer_args)
        del self.layers
        torch.manual_seed(3)
        self.model = GPT(GPTConfig(layers=3, heads=2, width=16, block_tokens=8, vocab=VOCAB))

    def pipeline_layers(self) -> list[Any]:
        model = self.model

        def embed(ids: torch.Tensor, batch: Any) -> torch.Tensor:
            return model.token_embedding(ids) + model.position_embedding.weight[: ids.shape[1]]

        first = PipelineLayer(embed, model.token_embedding, model.position_embedding)
        return [first, *model.blocks, model.final_norm, model.head]

    def pipeline_loss(self, output: torch.Tensor, batch: Any) -> Any:
        labels = batch[1]
        loss = F.cross_entropy(output.float().flatten(0, 1), labels.flatten())
        return {"loss": loss, "accuracy": (output.argmax(-1) == labels).float().sum() / (labels >= 0).sum()}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        values = pipelined_metrics(self, batch)
        self.log_dict({f"val_{name}": value for name, value in values.items()}, sync_dist=True)
        self.val_losses.append(float(values["loss"]))

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.parameters(), **self.optimizer_args)


def losses_of(module: PipelinedMLP, strategy: Any, devices: int, **arguments: Any) -> list[float]:
    """Those of the batches of a :func:`fit`, on this rank."""
    fit(module, strategy, devices, **arguments)
    return module.train_losses


def labelled(samples: int = 22, batch_size: int = 8) -> DataLoader:
    """Regression; the last batch is shorter, and its microbatches are of two sizes."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(samples, 6, generator=generator)
    return DataLoader(TensorDataset(x, x.flip(1) ** 2), batch_size=batch_size)


def token_batches(samples: int = 22, batch_size: int = 8, masked: bool = True) -> DataLoader:
    """Language modelling; rows have different numbers of labels, and the third has none."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCAB, (samples, 9), generator=generator)
    labels = ids[:, 1:].clone()
    if masked:
        for row in range(samples):
            labels[row, : row % 5] = -100
        labels[2] = -100
    return DataLoader(TensorDataset(ids[:, :-1], labels), batch_size=batch_size)


def fit(
    module: PipelinedMLP,
    strategy: Any,
    devices: int,
    *,
    plugin: Any = None,
    train: DataLoader | None = None,
    validate: DataLoader | None = None,
    **trainer_args: Any,
) -> pl.Trainer:
    """Two epochs on the CPU; data as the module wants them."""
    make = token_batches if isinstance(module, PipelinedGPT) else labelled
    arguments: dict[str, Any] = {"max_epochs": 2, "logger": False, "enable_checkpointing": False} | trainer_args
    ckpt_path = arguments.pop("ckpt_path", None)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        plugins=None if plugin is None else [plugin],
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        **arguments,
    )
    trainer.fit(
        module, make() if train is None else train, make(10) if validate is None else validate, ckpt_path=ckpt_path
    )
    return trainer
