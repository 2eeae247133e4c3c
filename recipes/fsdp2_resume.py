"""Stop an FSDP2 run and resume it with another number of ranks.

When: weights, gradients and moments do not fit on one device, and the number of machines changes over time. Each start
trains 10 more optimizer steps from the latest complete checkpoint, on any number of ranks; as long as the number of
samples per step stays the same, so does the run, up to rounding.

    python recipes/fsdp2_resume.py --devices 2           # two processes, on any CPU
    python recipes/fsdp2_resume.py --devices 1           # continues from there
    torchrun --nproc-per-node=8 recipes/fsdp2_resume.py --devices 8 --full

Expected output from the second start on (numbers vary):

    resumes from step=10.ckpt, world size 1
    steps 10 to 20, validation loss 3.8911

Remove runs/fsdp2_resume to start over. The folder of a checkpoint holds the shards of all ranks;
`lightning_mp.checkpoints.consolidate_checkpoint` turns it into a single file.
"""

import argparse
from pathlib import Path

import lightning.pytorch as pl

from lightning_mp import AtomicCheckpoints, AutocastPrecision, FSDP2Strategy
from lightning_mp.checkpoints import latest_checkpoint
from lightning_mp.language_model import HeldOutBatches, LanguageModel, TextBatches, load_standard_library

GLOBAL_BATCH, STEPS = 8, 10
FOLDER = Path("runs/fsdp2_resume")


class Data(pl.LightningDataModule):
    """This rank's part of every batch. The loader is stateful, so a resumed run continues with the next batch."""

    def __init__(self, block_tokens: int):
        super().__init__()
        self.block_tokens = block_tokens
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
        return TextBatches(self.text.train, **self.part())

    def val_dataloader(self):
        return HeldOutBatches(self.text.validation, max_batches=2, **self.part())


def main(devices: int, full: bool) -> None:
    pl.seed_everything(0, verbose=False)
    layers, heads, width, block_tokens = (32, 32, 4096, 2048) if full else (2, 2, 32, 64)
    checkpoint = latest_checkpoint(FOLDER)
    first = int(checkpoint.stem.partition("=")[2]) if checkpoint else 0
    trainer = pl.Trainer(
        accelerator="gpu" if full else "cpu",
        devices=devices,
        strategy=FSDP2Strategy(),  # finds the blocks of the model by itself
        plugins=[AutocastPrecision("bf16-mixed")],
        callbacks=[
            AtomicCheckpoints(),  # a run killed during a write keeps its last checkpoint intact
            pl.callbacks.ModelCheckpoint(FOLDER, "{step}", every_n_train_steps=STEPS, save_top_k=-1),
        ],
        gradient_clip_val=1.0,
        max_steps=first + STEPS,
        val_check_interval=STEPS,
        use_distributed_sampler=False,
        logger=False,
        enable_model_summary=False,
        enable_progress_bar=full,
    )
    with trainer.init_module(empty_init=full):  # no rank holds the whole model
        module = LanguageModel(
            layers=layers, heads=heads, width=width, block_tokens=block_tokens, learning_rate=1e-2, total_steps=100
        )
    data = Data(block_tokens)
    trainer.fit(module, datamodule=data, ckpt_path=checkpoint)
    loss = trainer.callback_metrics["val/loss"]
    if trainer.is_global_zero:
        where = f"resumes from {checkpoint.name}" if checkpoint else "starts from scratch"
        print(f"{where}, world size {trainer.world_size}")
        print(f"steps {first} to {trainer.global_step}, validation loss {loss:.4f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=1, help="ranks; 8 sequences of a batch are divided among them")
    parser.add_argument("--full", action="store_true", help="7 billion parameters, on GPUs")
    main(**vars(parser.parse_args()))
