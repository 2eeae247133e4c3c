"""A LightningCLI project: precision, scaler and callbacks come from YAML.

When: your project uses `LightningCLI`. The Python code does not change: the parts are entries in config.yaml, and every
argument can be overridden on the command line.

    pip install ".[cli]"
    cd recipes/lightning_cli
    python train.py fit --config config.yaml
    python train.py fit --config config.yaml --trainer.max_epochs 4 --trainer.plugins.init_args.precision bf16-mixed

Expected output (numbers vary):

    AutocastPrecision 16-mixed, loss scale 1024
    32 batches in 8 + 4 optimizer steps, loss 1.75 -> 0.18
"""

import lightning.pytorch as pl
import torch
from lightning.pytorch.cli import LightningCLI
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Module(pl.LightningModule):
    def __init__(self, width: int = 32, learning_rate: float = 1e-2):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(8, width), nn.GELU(), nn.Linear(width, 1))
        self.losses = []
        self.steps = [0, 0]

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        loss = nn.functional.mse_loss(self.net(inputs).float(), targets)
        self.losses.append(float(loss.detach()))
        return loss

    def on_after_optimizer_step(self, optimizer, outcome):  # a hook of lightning_mp
        self.steps[min(self.current_epoch, 1)] += outcome.stepped

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), self.hparams.learning_rate)


class Data(pl.LightningDataModule):
    def __init__(self, batch_size: int = 16):
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self):
        inputs = torch.randn(256, 8, generator=torch.Generator().manual_seed(0))
        return DataLoader(TensorDataset(inputs, inputs.square().mean(1, keepdim=True)), self.batch_size)


if __name__ == "__main__":
    cli = LightningCLI(Module, Data, save_config_callback=None)
    plugin, losses = cli.trainer.precision_plugin, cli.model.losses
    scale = plugin.scaler.get_scale() if plugin.scaler is not None else 1
    print(f"{type(plugin).__name__} {plugin.precision}, loss scale {scale:.0f}")
    steps = " + ".join(map(str, cli.model.steps))
    print(f"{len(losses)} batches in {steps} optimizer steps, loss {losses[0]:.2f} -> {losses[-1]:.2f}")
