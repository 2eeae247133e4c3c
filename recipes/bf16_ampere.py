"""bf16 for a language model on Ampere and later: A100, RTX 30, L4, H100.

When: the GPU has bf16 matrix units (compute capability 8.0 or higher). bf16 has the range of fp32, so no loss scale is
needed. Gradients are accumulated to the exact mean over tokens, and the run ends exactly at its token budget.

    python recipes/bf16_ampere.py           # 20,000 parameters, on any CPU, a few seconds
    python recipes/bf16_ampere.py --full    # 124 million parameters, 100 million tokens, on a GPU

Expected output (numbers vary):

    trained on 40000 tokens of 40000 in 20 optimizer steps
    validation loss 3.16 nats per byte, 5.55 before

On a GPU with a known peak, the progress bar also shows MFU, the fraction of the peak that is used.
"""

import argparse
import math

import lightning.pytorch as pl
import torch

from lightning_mp import (
    AccumulationScheduler,
    AutocastPrecision,
    ChinchillaBudget,
    MFUMonitor,
    TokenLearningRate,
    WarmupCosine,
)
from lightning_mp.language_model import (
    HeldOutBatches,
    LanguageModel,
    TextBatches,
    config_for_parameters,
    load_standard_library,
)


def main(full: bool) -> None:
    if full and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise SystemExit("This GPU only emulates bf16: use recipes/fp16_t4.py.")
    pl.seed_everything(0, verbose=False)
    parameters, tokens, batch_size, block_tokens = (
        (124_000_000, 100_000_000, 16, 1024) if full else (20_000, 40_000, 8, 64)
    )
    config = config_for_parameters(parameters, block_tokens=block_tokens)
    module = LanguageModel(
        layers=config.layers,
        heads=config.heads,
        width=config.width,
        block_tokens=block_tokens,
        learning_rate=6e-4 if full else 1e-2,
        total_steps=None,  # TokenLearningRate sets the schedule
    )
    # Python's source code, byte by byte. Replace it with your data: batches [inputs, labels], or dicts with "labels".
    text = load_standard_library()
    data = TextBatches(text.train, batch_size=batch_size, block_tokens=block_tokens)
    held_out = HeldOutBatches(text.validation, batch_size=batch_size, block_tokens=block_tokens, max_batches=4)
    budget = ChinchillaBudget(tokens=tokens)
    trainer = pl.Trainer(
        accelerator="gpu" if full else "cpu",
        devices=1,
        plugins=[AutocastPrecision("bf16-mixed")],
        callbacks=[
            budget,
            AccumulationScheduler({0: 4}),
            TokenLearningRate(WarmupCosine(warmup=0.1)),
            *([MFUMonitor()] if full else []),  # the peak of a CPU is not known
        ],
        gradient_clip_val=1.0,
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=full,
    )
    trainer.fit(module, data, held_out)
    loss = trainer.callback_metrics["val/loss"]
    print(f"trained on {budget.tokens_seen} tokens of {tokens} in {trainer.global_step} optimizer steps")
    print(f"validation loss {loss:.2f} nats per byte, {math.log(256):.2f} before")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="real size, on a GPU")
    main(**vars(parser.parse_args()))
