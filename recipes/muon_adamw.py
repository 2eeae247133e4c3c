"""Muon for hidden matrices and AdamW for the rest, in bf16 with fp32 master weights.

When: a transformer is trained from scratch. Muon orthogonalises each update of a hidden matrix; embeddings, the output
layer, norms and biases stay with AdamW. Lightning's automatic optimization accepts a single optimizer; JointOptimizer
combines the two into one, with their groups, state, schedule and checkpoints. Under FSDP2, each matrix is
orthogonalised on one rank.

    python recipes/muon_adamw.py                              # any CPU, a few seconds
    python recipes/muon_adamw.py --strategy fsdp2 --devices 2  # or ddp
    python recipes/muon_adamw.py --split auto                  # queries, keys and values apart
    python recipes/muon_adamw.py --optimizer adamw             # AdamW alone, for comparison
    torchrun --nproc-per-node=8 recipes/muon_adamw.py --strategy fsdp2 --devices 8 --full

Expected output (numbers vary):

    8 matrices for Muon, 7 other tensors for AdamW
    validation loss 2.50 nats per byte after 200 steps, 5.55 before
"""

import argparse
import math

import lightning.pytorch as pl
from lightning.pytorch.strategies import DDPStrategy
from torch.optim import AdamW, Muon
from torch.optim.lr_scheduler import LambdaLR

from lightning_mp import FSDP2Strategy, JointOptimizer, MasterWeightsPrecision, matrices_and_rest
from lightning_mp.language_model import HeldOutBatches, LanguageModel, TextBatches, load_standard_library

GLOBAL_BATCH = 16


class MuonLanguageModel(LanguageModel):
    """The small GPT, with a joint optimizer under one schedule."""

    optimizer, split, steps, rate = "muon", {}, 200, 1.0

    def configure_optimizers(self):
        (matrices, rest), rate = matrices_and_rest(self, split=self.split), self.rate
        if self.optimizer == "muon":
            if self.trainer.is_global_zero:
                count = sum(len(group["params"]) for group in matrices)
                print(f"{count} matrices for Muon, {len(rest)} other tensors for AdamW")
            optimizer = JointOptimizer([Muon(matrices, lr=0.02 * rate), AdamW(rest, lr=3e-3 * rate)], module=self)
        else:
            groups = [*({**group, "weight_decay": 0.1} for group in matrices), {"params": rest}]
            optimizer = AdamW(groups, lr=1e-2 * rate, weight_decay=0.0)
        # One schedule scales both learning rates: warm-up over 20 steps, then linearly down to zero.
        schedule = LambdaLR(optimizer, lambda step: min((step + 1) / 20, 1 - step / self.steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Data(pl.LightningDataModule):
    """This rank's part of every batch."""

    def __init__(self, block_tokens: int, seed: int):
        super().__init__()
        self.block_tokens, self.seed = block_tokens, seed
        self.text = load_standard_library()

    def part(self) -> dict[str, int]:
        sampler = self.trainer.distributed_sampler_kwargs or {"rank": 0, "num_replicas": 1}
        ranks = sampler["num_replicas"]
        return {
            "rank": sampler["rank"],
            "world_size": ranks,
            "batch_size": GLOBAL_BATCH // ranks,
            "block_tokens": self.block_tokens,
        }

    def train_dataloader(self):
        return TextBatches(self.text.train, seed=self.seed, **self.part())

    def val_dataloader(self):
        return HeldOutBatches(self.text.validation, max_batches=8, **self.part())


def main(
    strategy: str, devices: int, optimizer: str, split: str, seed: int, steps: int, rate: float, full: bool
) -> None:
    pl.seed_everything(seed, verbose=False)
    layers, heads, width, block_tokens = (12, 12, 768, 1024) if full else (2, 2, 32, 64)
    trainer = pl.Trainer(
        accelerator="gpu" if full else "cpu",
        devices=devices,
        strategy={"auto": "auto", "ddp": DDPStrategy(), "fsdp2": FSDP2Strategy()}[strategy],
        plugins=[MasterWeightsPrecision("bf16-true")],
        gradient_clip_val=1.0,
        max_epochs=-1,
        max_steps=steps,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=full,
    )
    with trainer.init_module():
        module = MuonLanguageModel(layers=layers, heads=heads, width=width, block_tokens=block_tokens)
    module.optimizer, module.steps, module.rate = optimizer, steps, rate
    module.split = "auto" if split == "auto" else {}
    trainer.fit(module, datamodule=Data(block_tokens, seed))
    loss = trainer.validate(module, datamodule=Data(block_tokens, seed), verbose=False)[0]["val/loss"]
    if trainer.is_global_zero:
        print(f"validation loss {loss:.4f} nats per byte after {steps} steps, {math.log(256):.2f} before")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", choices=["auto", "ddp", "fsdp2"], default="auto")
    parser.add_argument("--devices", type=int, default=1, help="ranks; 16 sequences of a batch are divided among them")
    parser.add_argument("--optimizer", choices=["muon", "adamw"], default="muon")
    parser.add_argument("--split", choices=["none", "auto"], default="none", help="what Muon orthogonalises apart")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rate", type=float, default=1.0, help="multiplies all learning rates")
    parser.add_argument("--full", action="store_true", help="124 million parameters, on GPUs")
    main(**vars(parser.parse_args()))
