"""A Hugging Face user's project: models from config, ragged batches as a collator or a stream brings them, a module."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from transformers import (
    DataCollatorForLanguageModeling,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    get_linear_schedule_with_warmup,
)

from lightning_mp import AutocastPrecision, LossScaler

VOCABULARY = 31  # odd: two ranks hold unequal shares
BLOCK_TOKENS = 24
PAD, IGNORED = 0, -100
PRECISIONS = ["16-mixed", "bf16-mixed"]

Batch = Mapping[str, Tensor]


SMALL_GPT2: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "n_positions": BLOCK_TOKENS,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 2,
    **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    "bos_token_id": 1,
    "eos_token_id": 1,
}
SMALL_LLAMA: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": BLOCK_TOKENS,
}


def gpt2(**changes: Any) -> GPT2LMHeadModel:
    return GPT2LMHeadModel(GPT2Config(**SMALL_GPT2 | changes))


def llama(**changes: Any) -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(**SMALL_LLAMA | changes))


def texts(count: int, seed: int = 0) -> list[list[int]]:
    """Token ids of texts from 2 to 20 tokens long; each counts on from where it starts, so a model can learn them."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, 21, (count,), generator=generator).tolist()
    starts = torch.randint(1, VOCABULARY, (count,), generator=generator).tolist()
    return [
        [1 + (start + position) % (VOCABULARY - 1) for position in range(length)]
        for start, length in zip(starts, lengths, strict=True)
    ]


def collated_by_transformers() -> "DataLoader[Any]":
    """Whole texts under a causal model: transformers' own collator makes `BatchEncoding`s, labels -100 on padding."""
    words = {"[PAD]": PAD} | {f"w{index}": index for index in range(1, VOCABULARY)}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words)), pad_token="[PAD]")
    rows = [{"input_ids": ids} for ids in texts(36)]
    return DataLoader(rows, batch_size=3, collate_fn=DataCollatorForLanguageModeling(tokenizer, mlm=False))


class InstructionStream(IterableDataset[dict[str, Any]]):
    """Streamed texts of which every second one begins with a prompt that must not be learned."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for index, ids in enumerate(texts(36, seed=1)):
            yield {"ids": ids, "prompt_tokens": len(ids) // 3 if index % 2 else 0}


def pad_by_hand(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    width = max(len(row["ids"]) for row in rows)
    batch = {
        "input_ids": torch.full((len(rows), width), PAD),
        "attention_mask": torch.zeros(len(rows), width, dtype=torch.long),
        "labels": torch.full((len(rows), width), IGNORED),
    }
    for index, row in enumerate(rows):
        ids = torch.tensor(row["ids"])
        batch["input_ids"][index, : len(ids)] = ids
        batch["attention_mask"][index, : len(ids)] = 1
        batch["labels"][index, row["prompt_tokens"] : len(ids)] = ids[row["prompt_tokens"] :]
    return batch


def streamed_dicts() -> "DataLoader[Any]":
    return DataLoader(InstructionStream(), batch_size=3, collate_fn=pad_by_hand)


PROJECTS: dict[str, tuple[Callable[[], PreTrainedModel], Callable[[], "DataLoader[Any]"]]] = {
    "gpt2": (gpt2, collated_by_transformers),
    "llama": (llama, streamed_dicts),
}


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=2e-2)


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


class LanguageModel(pl.LightningModule):
    """An ordinary LightningModule around a Hugging Face model, and notes of what it saw."""

    def __init__(
        self, model: PreTrainedModel, make_optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = adamw
    ) -> None:
        super().__init__()
        self.model = model
        self.make_optimizer = make_optimizer
        self.loss_bearing_tokens = 0
        self.batch_types: set[type] = set()
        self.losses: list[float] = []
        self.gradients: list[list[Tensor]] = []
        self.learning_rates: list[float] = []

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        output = self.model(**batch)
        self.batch_types.add(type(batch))
        self.losses.append(output.loss.item())
        # The loss itself says which positions it uses: only their logits get a gradient.
        if output.logits.requires_grad:  # MicroBatchOnOOM also runs steps without a graph
            output.logits.register_hook(self._count_positions)
        self.log("train_loss", output.loss, prog_bar=True, batch_size=len(batch["input_ids"]))
        return output.loss

    def _count_positions(self, gradient: Tensor) -> None:
        self.loss_bearing_tokens += int((gradient != 0).any(-1).sum())

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.gradients.append([p.grad.clone() for p in self.parameters() if p.grad is not None])

    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer(self.parameters())
        optimizer.register_step_pre_hook(
            lambda stepping, *_: self.learning_rates.append(stepping.param_groups[0]["lr"])
        )
        schedule = get_linear_schedule_with_warmup(optimizer, num_warmup_steps=4, num_training_steps=100)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def project(name: str) -> tuple[LanguageModel, "DataLoader[Any]"]:
    make_model, make_loader = PROJECTS[name]
    return LanguageModel(make_model()), make_loader()


def plugin(precision: str, init_scale: float = 2.0**10) -> AutocastPrecision:
    if precision == "bf16-mixed":
        return AutocastPrecision("bf16-mixed")
    return AutocastPrecision("16-mixed", scaler=LossScaler(init_scale=init_scale))


def label_tokens(batches: Iterable[Batch]) -> int:
    """Labels that a causal model can use: every one but -100 and the first of each row, which nothing predicts."""
    return sum(int((batch["labels"][:, 1:] != IGNORED).sum()) for batch in batches)


class HuggingFace(pl.LightningModule):
    def __init__(self, kind: str, dropout: float = 0.1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model: nn.Module = (
            llama(vocab_size=32, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=8)
            if kind == "llama"
            else gpt2(vocab_size=32, n_positions=8, resid_pdrop=dropout)
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(input_ids=batch[0], labels=batch[0], use_cache=False).loss
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-3, fused=True)
