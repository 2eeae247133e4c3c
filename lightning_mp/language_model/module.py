"""The LightningModule around :class:`~lightning_mp.language_model.gpt.GPT`."""

import math
from contextlib import AbstractContextManager, nullcontext

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities.types import OptimizerConfig, OptimizerLRSchedulerConfig
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from typing_extensions import override

from lightning_mp.ground.core.arguments import whole_number
from lightning_mp.ground.core.trainer_ranks import is_pipelined
from lightning_mp.language_model.gpt import GPT, GPTConfig
from lightning_mp.pipelining import PipelineLayer, pipelined_loss
from lightning_mp.training.lr_schedule.schedules import WarmupCosine
from lightning_mp.training.policy.gathered_dtypes import gathered_of_masters
from lightning_mp.training.policy.sharding_units import ShardingUnit, sharding_units
from lightning_mp.training.precision.master_weights import MasterWeightsPrecision

# On a CPU, in 16 bit and at this length, the plain kernel is 2 to 3 times as fast as the fused one (torch 2.13; most
# of it in the fused kernel's backward). Longer blocks would make its score matrices large.
_PLAIN_ATTENTION_MAX_TOKENS = 256
_NAME = "LanguageModel"


class LanguageModel(pl.LightningModule):
    """Trains a GPT on batches ``[inputs, labels]``, int64 ``[batch, tokens]``; label -100 is left out of the loss.

    AdamW with weight decay on matrices only. Logs ``train/loss`` and ``val/loss`` in nats per token.

    Args:
        layers: See :class:`~lightning_mp.language_model.gpt.GPTConfig`, also for ``heads``, ``width``,
            ``block_tokens`` and ``vocab``.
        learning_rate: Peak learning rate.
        total_steps: Optimizer steps over which the rate warms up and falls along a cosine; None leaves it to
            ``TokenLearningRate``.
        warmup_steps: Of these, until the peak.
        weight_decay: Decoupled weight decay of the matrices.
        fused: Fused AdamW, where torch has it. Lightning's own plugins refuse it together with gradient clipping.

    Raises:
        ValueError: a size is not valid, or ``warmup_steps`` are not fewer than ``total_steps``.

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
        total_steps: int | None = 1000,
        warmup_steps: int = 50,
        weight_decay: float = 0.1,
        fused: bool = True,
    ) -> None:
        super().__init__()
        if total_steps is not None and not 0 <= warmup_steps < whole_number(total_steps, "total_steps", _NAME):
            raise ValueError(
                f"LanguageModel(total_steps={total_steps}, warmup_steps={warmup_steps!r}): the rate warms up within the"
                f" run. Give a warmup_steps from 0 to {total_steps - 1}, or total_steps=None and TokenLearningRate."
            )
        self.save_hyperparameters()
        self._is_pipelined = False
        self.model = GPT(GPTConfig(layers, heads, width, block_tokens, vocab))

    @override
    def forward(self, idx: Tensor) -> Tensor:
        """Token ids ``[batch, tokens]`` to logits ``[batch, tokens, vocab]``."""
        with self._attention_kernel():
            logits: Tensor = self.model(idx)
        return logits

    def loss(self, batch: list[Tensor]) -> Tensor:
        """Mean cross-entropy over the labels other than -100, in nats, in fp32."""
        if not self._is_pipelined:
            return self.pipeline_loss(self(batch[0]), batch)
        with self._attention_kernel():
            return pipelined_loss(self, batch)

    def pipeline_loss(self, logits: Tensor, batch: list[Tensor]) -> Tensor:
        """The same from logits ``[batch, tokens, vocab]``."""
        return F.cross_entropy(logits.flatten(0, 1).float(), batch[1].flatten(), ignore_index=-100)

    def pipeline_layers(self) -> list[nn.Module | PipelineLayer]:
        """What ``PipelineParallelStrategy`` cuts into stages."""
        model = self.model
        embed = PipelineLayer(lambda idx, batch: model.embed(idx), model.token_embedding, model.position_embedding)
        return [embed, *model.blocks, model.final_norm, model.head]

    @override
    def setup(self, stage: str) -> None:
        """Notes whether the strategy cuts the model into stages."""
        self._is_pipelined = is_pipelined(self.trainer)

    @override
    def configure_model(self) -> None:
        """Shards the model under Lightning's own ``ModelParallelStrategy``, which leaves that to the module."""
        mesh = self.device_mesh  # None elsewhere, and without a Trainer
        is_sharded = isinstance(self.model, FSDPModule)
        if mesh is not None and type(self.trainer.strategy) is ModelParallelStrategy and not is_sharded:
            for names, mixed_precision in self._sharding_units():
                parts = [self.get_submodule(name) for name in names]
                fully_shard(parts, mesh=mesh["data_parallel"], mp_policy=mixed_precision)

    def _sharding_units(self) -> list[ShardingUnit]:
        """The blocks and the rest, inner ones first; under masters gathered in what they are computed with."""
        names = [f"model.blocks.{number}" for number in range(len(self.model.blocks))]
        plugin = self.trainer.precision_plugin
        if not isinstance(plugin, MasterWeightsPrecision):
            return [ShardingUnit((name,), MixedPrecisionPolicy()) for name in (*names, "model")]
        gathered = gathered_of_masters(self, plugin.policy, plugin.dtype)
        return sharding_units(gathered, (*names, "model"), plugin.dtype)

    @override
    def training_step(self, batch: list[Tensor], batch_idx: int) -> dict[str, Tensor]:
        """The loss, and for recording the same undivided and its number of labels."""
        loss = self.loss(batch)
        self.log("train/loss", loss.detach(), prog_bar=True)
        return {"loss": loss, "mean_loss": loss.detach(), "tokens": (batch[1] != -100).sum()}

    @override
    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """Logs the mean over all ranks and batches, which are all of one size."""
        self.log("val/loss", self.loss(batch), prog_bar=True, sync_dist=True, batch_size=len(batch[0]))

    @override
    def configure_optimizers(self) -> OptimizerConfig | OptimizerLRSchedulerConfig:
        """AdamW, and perhaps its schedule by optimizer step."""
        options, parameters = self.hparams, list(self.named_parameters())
        groups = [  # by name, since under FSDP1 every parameter is a flat shard
            {"params": [p for name, p in parameters if "norm" not in name], "weight_decay": options["weight_decay"]},
            {"params": [p for name, p in parameters if "norm" in name], "weight_decay": 0.0},
        ]
        fused = options["fused"] and self.device.type in ("cpu", "cuda")
        optimizer = AdamW(groups, lr=options["learning_rate"], betas=(0.9, 0.95), fused=fused)
        total_steps = options["total_steps"]
        if total_steps is None:
            return {"optimizer": optimizer}
        schedule = WarmupCosine(options["warmup_steps"] / total_steps)
        scheduler = LambdaLR(optimizer, lambda step: schedule((step + 1) / total_steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def _attention_kernel(self) -> AbstractContextManager[None]:
        in_16_bit = torch.is_autocast_enabled("cpu") or next(self.parameters()).dtype != torch.float32
        is_short = self.model.config.block_tokens <= _PLAIN_ATTENTION_MAX_TOKENS
        return sdpa_kernel(SDPBackend.MATH) if self.device.type == "cpu" and in_16_bit and is_short else nullcontext()


def peak_learning_rate(parameters: int) -> float:
    """Peak learning rate for AdamW by model size, ``6e-4 * (124M / parameters) ** (1/3)``, at most 1e-2.

    Anchored at 6e-4 for 124M parameters (Brown et al. 2020, arXiv:2005.14165, table 2.1, GPT-3 Small). The exponent
    makes it 6.4e-3 at 0.1M, which ended lower there than 4e-3 and 1e-2.

    >>> round(peak_learning_rate(124_337_664), 6)
    0.0006
    """
    return min(1e-2, 6e-4 * math.cbrt(124_337_664 / parameters))
