"""The LightningModule around :class:`~lightning_mp.demo.model.GPT`."""

from contextlib import AbstractContextManager, nullcontext
from functools import partial

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from lightning_mp.demo.learning_rate import warmup_cosine
from lightning_mp.demo.model import GPT, GPTConfig

__all__ = ["LanguageModel"]

# On a CPU, in 16 bit and at this length, the plain kernel is 2 to 3 times as fast as the fused one (torch 2.13; most
# of it in the fused kernel's backward). Longer blocks would make its score matrices large.
_PLAIN_ATTENTION_MAX_TOKENS = 256


class LanguageModel(pl.LightningModule):
    """Trains a GPT on batches ``[inputs, labels]``, int64 ``[batch, tokens]``; label -100 is left out of the loss.

    AdamW with weight decay on matrices only, linear warm-up and cosine over ``total_steps`` optimizer steps. Logs
    ``train/loss`` and ``val/loss`` in nats per token.

    Args:
        layers: See :class:`~lightning_mp.demo.model.GPTConfig`.
        heads: See there.
        width: See there.
        block_tokens: See there.
        vocab: See there.
        learning_rate: Peak learning rate.
        total_steps: Optimizer steps of the run.
        warmup_steps: Steps until the peak.
        weight_decay: Decoupled weight decay of the matrices.

    Example:
        >>> LanguageModel(layers=1, heads=1, width=16).model.config.parameters
        9264
    """

    def __init__(
        self,
        *,
        layers: int,
        heads: int,
        width: int,
        block_tokens: int = 128,
        vocab: int = 256,
        learning_rate: float = 1e-3,
        total_steps: int = 1000,
        warmup_steps: int = 50,
        weight_decay: float = 0.1,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.factor = partial(warmup_cosine, warmup_steps=warmup_steps, total_steps=total_steps)
        self.model = GPT(GPTConfig(layers, heads, width, block_tokens, vocab))

    def forward(self, idx: Tensor) -> Tensor:
        """Token ids ``[batch, tokens]`` to logits ``[batch, tokens, vocab]``."""
        with self._attention_kernel():
            logits: Tensor = self.model(idx)
        return logits

    def loss(self, batch: list[Tensor]) -> Tensor:
        """Mean cross-entropy over the labels other than -100, in nats, in fp32."""
        inputs, labels = batch
        return F.cross_entropy(self(inputs).flatten(0, 1).float(), labels.flatten(), ignore_index=-100)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> dict[str, Tensor]:
        """The loss; besides, for whoever records it, the same undivided and its number of labels."""
        loss = self.loss(batch)
        self.log("train/loss", loss.detach(), prog_bar=True)
        return {"loss": loss, "mean_loss": loss.detach(), "tokens": (batch[1] != -100).sum()}

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """Logs the mean over all ranks and batches, which are all of one size."""
        self.log("val/loss", self.loss(batch), prog_bar=True, sync_dist=True, batch_size=len(batch[0]))

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        """AdamW, fused where torch has it, and its schedule by optimizer step."""
        parameters = [p for p in self.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": self.weight_decay},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ]
        fused = self.device.type in ("cpu", "cuda")
        optimizer = AdamW(groups, lr=self.learning_rate, betas=(0.9, 0.95), fused=fused)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": LambdaLR(optimizer, self.factor), "interval": "step"},
        }

    def _attention_kernel(self) -> AbstractContextManager[None]:
        on_cpu_in_16_bit = self.device.type == "cpu" and torch.is_autocast_enabled("cpu")
        if on_cpu_in_16_bit and self.model.config.block_tokens <= _PLAIN_ATTENTION_MAX_TOKENS:
            return sdpa_kernel(SDPBackend.MATH)
        return nullcontext()
