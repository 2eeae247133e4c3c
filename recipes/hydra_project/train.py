"""A Hydra project: the parts are built by `hydra.utils.instantiate`.

When: your project uses Hydra. Each part is a `_target_` in config.yaml. Keys of a schedule may be strings, as in YAML
files and overrides.

    pip install hydra-core
    cd recipes/hydra_project
    python train.py
    python train.py precision.precision=bf16-mixed precision.scaler=null accumulation.schedule.0=1

Expected output (numbers vary):

    AutocastPrecision 16-mixed, loss scale 1024
    12 optimizer steps, loss 1.75 -> 0.18
"""

import hydra
import lightning.pytorch as pl
import torch
from omegaconf import DictConfig
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Module(pl.LightningModule):
    def __init__(self, width: int, learning_rate: float):
        super().__init__()
        self.learning_rate = learning_rate
        self.net = nn.Sequential(nn.Linear(8, width), nn.GELU(), nn.Linear(width, 1))
        self.losses = []

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        loss = nn.functional.mse_loss(self.net(inputs).float(), targets)
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), self.learning_rate)


def data(batch_size: int) -> DataLoader:
    inputs = torch.randn(256, 8, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(inputs, inputs.square().mean(1, keepdim=True)), batch_size)


@hydra.main(version_base=None, config_path=".", config_name="config")
def main(config: DictConfig) -> None:
    pl.seed_everything(config.seed, verbose=False)
    plugin = hydra.utils.instantiate(config.precision)
    callbacks = [hydra.utils.instantiate(config[name]) for name in ("accumulation", "overflow")]
    trainer = pl.Trainer(plugins=[plugin], callbacks=callbacks, **config.trainer)
    module = Module(**config.model)
    trainer.fit(module, data(config.batch_size))
    scale = plugin.scaler.get_scale() if plugin.scaler is not None else 1
    print(f"{type(plugin).__name__} {plugin.precision}, loss scale {scale:.0f}")
    losses = module.losses
    print(f"{trainer.global_step} optimizer steps, loss {losses[0]:.2f} -> {losses[-1]:.2f}")


if __name__ == "__main__":
    main()
