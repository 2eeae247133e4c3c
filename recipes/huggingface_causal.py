"""A Hugging Face causal language model on texts of different lengths, averaged over tokens.

When: training or fine-tuning any `AutoModelForCausalLM`. Load the weights in fp32 (`dtype=torch.float32`): trainable
fp16 weights are refused, and trainable bf16 weights lose small updates. `from_pretrained` returns the model in eval
mode, which Lightning does not change: call `.train()`, or dropout stays off. Padding has label -100, so it is neither
trained nor counted, and a step of several micro-batches averages over its tokens, not over micro-batch means.

    pip install transformers
    python recipes/huggingface_causal.py                                  # a tiny Llama, on any CPU
    python recipes/huggingface_causal.py --model NAME --file corpus.txt   # your own, on a GPU

Expected output (numbers vary):

    LlamaForCausalLM: 5,712 parameters in torch.float32
    trained on 5,000 target tokens in 20 optimizer steps; 3,092 padded positions were left out
    loss 3.32 at first, 1.10 at the end
"""

import argparse
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedModel

from lightning_mp import AccumulationScheduler, AutocastPrecision, ChinchillaBudget

TINY = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
}


class CausalLM(pl.LightningModule):
    def __init__(self, model: PreTrainedModel, learning_rate: float):
        super().__init__()
        self.model = model
        self.learning_rate = learning_rate
        self.losses = []
        self.padded_positions = 0

    def training_step(self, batch, batch_idx):
        loss = self.model(**batch, use_cache=False).loss
        self.losses.append(loss.detach())
        self.padded_positions += int((batch["attention_mask"] == 0).sum())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), self.learning_rate, fused=True)


def counting_texts(count: int) -> list[list[int]]:
    """Texts of 5 to 30 tokens, in which each token is one more than the previous one."""
    lengths = torch.randint(5, 31, (count,)).tolist()
    starts = torch.randint(1, 32, (count,)).tolist()
    return [[1 + (start + i) % 31 for i in range(length)] for start, length in zip(starts, lengths, strict=True)]


def pad(texts: list[list[int]]) -> dict[str, torch.Tensor]:
    rows = [torch.tensor(text) for text in texts]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=0)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def main(model: str | None, file: Path | None) -> None:
    pl.seed_everything(0, verbose=False)
    if model is None:
        net = AutoModelForCausalLM.from_config(LlamaConfig(**TINY, bos_token_id=1, eos_token_id=1))
        texts, tokens = counting_texts(800), 5_000
    else:
        net = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).train()
        tokenizer = AutoTokenizer.from_pretrained(model)
        texts = tokenizer(file.read_text().split("\n\n"), truncation=True, max_length=1024)["input_ids"]
        texts, tokens = [text for text in texts if len(text) > 1], 1_000_000
    module = CausalLM(net, learning_rate=1e-2 if model is None else 2e-5)
    budget = ChinchillaBudget(tokens=tokens)
    trainer = pl.Trainer(
        accelerator="cpu" if model is None else "gpu",
        devices=1,
        plugins=[AutocastPrecision("bf16-mixed")],
        callbacks=[AccumulationScheduler({0: 2}), budget],
        gradient_clip_val=1.0,
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=model is not None,
    )
    trainer.fit(module, DataLoader(texts, batch_size=8, shuffle=True, collate_fn=pad))
    print(f"{type(net).__name__}: {net.num_parameters():,} parameters in {net.dtype}")
    print(f"trained on {budget.tokens_seen:,} target tokens in {trainer.global_step} optimizer steps;", end=" ")
    print(f"{module.padded_positions:,} padded positions were left out")
    first, last = (torch.stack(losses).mean() for losses in (module.losses[:5], module.losses[-5:]))
    print(f"loss {first:.2f} at first, {last:.2f} at the end")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="name or folder of a pretrained causal model; needs --file")
    parser.add_argument("--file", type=Path, help="a text file, paragraphs separated by blank lines")
    arguments = parser.parse_args()
    if (arguments.model is None) != (arguments.file is None):
        parser.error("give --model and --file together, or neither")
    main(**vars(arguments))
