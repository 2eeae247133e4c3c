"""fp8 matrix products on Hopper, Ada and later; emulated elsewhere, to see what fp8 does to the loss.

When: large linear layers (width 1,536 or more), a GPU with fp8 units (compute capability 8.9 or higher), and
`torch.compile`. Expect less than the ratio of the peaks: published end-to-end speedups over bf16 are up to 1.3x.
Without fp8 units, values are rounded to fp8 and multiplied in fp32, which shows the accuracy but not the speed.

    pip install ".[fp8]"
    python recipes/fp8_hopper.py           # toy size, on any CPU, emulated, a few seconds
    python recipes/fp8_hopper.py --full    # on a GPU, compiled

Expected output (numbers vary):

    fp8 products: emulated on this device
    7 of 9 linear layers multiply in fp8; the other 2 stay in bf16
    validation loss after 30 steps: 3.22 in fp8, 3.22 in bf16
"""

import argparse

import lightning.pytorch as pl
import torch

from lightning_mp import AutocastPrecision, Float8Precision
from lightning_mp.language_model import HeldOutBatches, LanguageModel, TextBatches, load_standard_library


def has_float8_units() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)


def train(plugin: pl.plugins.Precision, full: bool) -> float:
    """Trains and returns the validation loss."""
    pl.seed_everything(0, verbose=False)
    layers, heads, width, block_tokens, batch_size, steps = (
        (16, 32, 4096, 2048, 4, 200) if full else (2, 2, 32, 64, 8, 30)
    )
    module = LanguageModel(
        layers=layers,
        heads=heads,
        width=width,
        block_tokens=block_tokens,
        learning_rate=3e-4 if full else 1e-2,
        total_steps=steps,
        warmup_steps=steps // 10,
    )
    if full:
        for block in module.model.blocks:
            block.compile()  # fuses the rounding to fp8 with preceding operations
    trainer = pl.Trainer(
        accelerator="gpu" if full else "cpu",
        devices=1,
        plugins=[plugin],
        gradient_clip_val=1.0,
        max_steps=steps,
        val_check_interval=steps,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=full,
    )
    text, sizes = load_standard_library(), {"batch_size": batch_size, "block_tokens": block_tokens}
    trainer.fit(module, TextBatches(text.train, **sizes), HeldOutBatches(text.validation, max_batches=4, **sizes))
    return float(trainer.callback_metrics["val/loss"])


def main(full: bool) -> None:
    emulate = not has_float8_units()
    print(f"fp8 products: {'emulated on this device' if emulate else 'on the units of this device'}")
    # The first and the last linear layer stay in bf16, and layers that are too small to gain; the toy has only such.
    plugin = Float8Precision(emulate=emulate, skip_small=full)
    in_float8 = train(plugin, full)
    chosen = sum(layer.skipped_because is None for layer in plugin.layers)
    others = len(plugin.layers) - chosen
    print(f"{chosen} of {len(plugin.layers)} linear layers multiply in fp8; the other {others} stay in bf16")
    in_bf16 = train(AutocastPrecision("bf16-mixed"), full)
    print(f"validation loss after {200 if full else 30} steps: {in_float8:.2f} in fp8, {in_bf16:.2f} in bf16")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="real size, on a GPU")
    main(**vars(parser.parse_args()))
