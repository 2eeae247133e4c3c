"""Train in 16 bit, validate in fp32, predict with half the weights.

When: reported metrics must not depend on the training precision, and the deployed model should take half the memory.
Training keeps fp32 weights: validation uses them unchanged, and inference rounds them once. For inference, use
Lightning's own `Trainer(precision="bf16-true")` (or "16-true"): without updates, no updates can be lost.

    python recipes/evaluation_and_inference.py           # toy size, on any CPU, a few seconds
    python recipes/evaluation_and_inference.py --full    # on a GPU

Expected output (numbers vary):

    matrix products: training torch.bfloat16, validation torch.float32, prediction torch.bfloat16
    weights: 5,392 bytes in training, 2,696 bytes in prediction
    validation loss 0.0434; 100.0% of the predicted classes match fp32
"""

import argparse

import lightning.pytorch as pl
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_mp import AutocastPrecision


class Classifier(pl.LightningModule):
    def __init__(self, width: int):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, width), nn.GELU(), nn.Linear(width, 4))
        self.dtypes = {}

    def forward(self, inputs):
        return self.net(inputs)

    def training_step(self, batch, batch_idx):
        logits = self(batch[0])
        self.dtypes["training"] = logits.dtype
        return F.cross_entropy(logits, batch[1])

    def validation_step(self, batch, batch_idx):
        logits = self(batch[0])
        self.dtypes["validation"] = logits.dtype
        self.log("loss", F.cross_entropy(logits, batch[1]))

    def predict_step(self, batch, batch_idx):
        logits = self(batch[0])
        self.dtypes["prediction"] = logits.dtype
        return logits.argmax(1)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-2, fused=True)


def weight_bytes(module: nn.Module) -> int:
    return sum(weight.nbytes for weight in module.parameters())


def main(full: bool) -> None:
    pl.seed_everything(0, verbose=False)
    width, count, epochs = (8192, 65_536, 20) if full else (64, 1024, 8)
    inputs = torch.randn(count, 16)
    data = TensorDataset(inputs, (inputs[:, :4] + inputs[:, 4:8]).argmax(1))
    train_loader, held_out = DataLoader(data, 64, shuffle=True), DataLoader(data, 256)
    settings = {
        "accelerator": "gpu" if full else "cpu",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_model_summary": False,
        "enable_progress_bar": full,
    }
    module = Classifier(width)
    trainer = pl.Trainer(
        plugins=[AutocastPrecision("bf16-mixed", eval_precision="32-true")], max_epochs=epochs, **settings
    )
    trainer.fit(module, train_loader, held_out)
    loss, trained_bytes = trainer.callback_metrics["loss"], weight_bytes(module)
    exact = torch.cat(trainer.predict(module, held_out))  # eval_precision applies to prediction too

    # This rounds the weights in place: save the trained fp32 weights first.
    half = pl.Trainer(precision="bf16-true", **settings)
    rounded = torch.cat(half.predict(module, held_out))
    print(
        "matrix products:",
        ", ".join(f"{step} {module.dtypes[step]}" for step in ("training", "validation", "prediction")),
    )
    print(f"weights: {trained_bytes:,} bytes in training, {weight_bytes(module):,} bytes in prediction")
    same = (exact == rounded).float().mean()
    print(f"validation loss {loss:.4f}; {same:.1%} of the predicted classes match fp32")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="real size, on a GPU")
    main(**vars(parser.parse_args()))
