"""LoRA: adapters in fp32 on a frozen base in 16 bit.

When: the fp32 weights and moments of the model do not fit into memory. The frozen base is in 16 bit and takes 2 bytes
per parameter, 14 GB for 7 billion; left in fp32 it would take 28 GB, under this plugin and MasterWeightsPrecision
alike. The adapters, their gradients and Adam's moments take 16 bytes per parameter, but they are few. Never train
16-bit weights: small updates would be rounded away. (The plugin refuses trainable fp16 weights and warns about
trainable bf16 weights.)

    python recipes/lora.py           # toy size, on any CPU, a few seconds
    python recipes/lora.py --full    # on a GPU

Expected output (numbers vary):

    base: 34,976 parameters in bfloat16, 69,952 bytes, frozen
    adapters: 8,192 parameters in float32, 131,072 bytes with gradients and moments
    loss on upper-case text: 4.80 -> 4.13
    the base is unchanged, bit for bit: True

The base is first trained on the source code of Python, and then adapted to the same text in upper case. Replace model
and data with your own, and name the layers to adapt.
"""

import argparse

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from lightning_mp import AutocastPrecision
from lightning_mp.language_model import HeldOutBatches, LanguageModel, TextBatches, load_standard_library


class LoRALinear(nn.Module):
    """`base(x) + up(down(x))` (Hu et al. 2021, "LoRA", https://arxiv.org/abs/2106.09685); begins as `base`."""

    def __init__(self, base: nn.Linear, rank: int):
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def add_adapters(model: nn.Module, rank: int) -> None:
    """Freezes the model in bf16 and adds an adapter to every linear layer except the head."""
    model.requires_grad_(False).bfloat16()
    linears = {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear) and name != "head"}
    for name, layer in linears.items():
        model.set_submodule(name, LoRALinear(layer, rank))


class FineTuned(LanguageModel):
    def configure_optimizers(self):
        # Only trainable parameters: an optimizer over all of them would also handle the base.
        return torch.optim.AdamW((p for p in self.parameters() if p.requires_grad), 1e-2, fused=True)


def make_trainer(full: bool, steps: int) -> pl.Trainer:
    return pl.Trainer(
        accelerator="gpu" if full else "cpu",
        devices=1,
        plugins=[AutocastPrecision("bf16-mixed")],
        gradient_clip_val=1.0,
        max_steps=steps,
        val_check_interval=steps,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=full,
    )


def upper_case(text: Tensor) -> Tensor:
    return torch.where((text >= ord("a")) & (text <= ord("z")), text - 32, text)


def main(full: bool) -> None:
    pl.seed_everything(0, verbose=False)
    layers, heads, width, block_tokens, steps = (12, 12, 768, 1024, 300) if full else (2, 2, 32, 64, 60)
    text = load_standard_library()
    sizes = {"batch_size": 8, "block_tokens": block_tokens}
    held_out = HeldOutBatches(upper_case(text.validation), max_batches=2, **sizes)
    module = FineTuned(layers=layers, heads=heads, width=width, block_tokens=block_tokens)
    make_trainer(full, steps).fit(module, TextBatches(text.train, **sizes), held_out)

    add_adapters(module.model, rank=8)
    frozen = {name: p.to("cpu", copy=True) for name, p in module.named_parameters() if not p.requires_grad}
    trainer = make_trainer(full, steps)
    [before] = trainer.validate(module, held_out, verbose=False)
    trainer.fit(module, TextBatches(upper_case(text.train), **sizes), held_out)

    adapters = [p for p in module.parameters() if p.requires_grad]
    moments = [m for p in adapters for m in trainer.optimizers[0].state[p].values() if m.shape == p.shape]
    adapter_bytes = sum(2 * p.nbytes for p in adapters) + sum(m.nbytes for m in moments)  # gradients too
    print(f"base: {sum(p.numel() for p in frozen.values()):,} parameters in bfloat16,", end=" ")
    print(f"{sum(p.nbytes for p in frozen.values()):,} bytes, frozen")
    print(f"adapters: {sum(p.numel() for p in adapters):,} parameters in float32,", end=" ")
    print(f"{adapter_bytes:,} bytes with gradients and moments")
    print(f"loss on upper-case text: {before['val/loss']:.2f} -> {trainer.callback_metrics['val/loss']:.2f}")
    now = dict(module.named_parameters())
    print("the base is unchanged, bit for bit:", all(torch.equal(now[n].cpu(), p) for n, p in frozen.items()))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="real size, on a GPU")
    main(**vars(parser.parse_args()))
