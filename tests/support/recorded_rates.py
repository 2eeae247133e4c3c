"""A token model that notes the learning rate of every optimizer step, and the closed form to compare it with."""

from collections.abc import Iterable, Sequence
from typing import Any

import lightning.pytorch as pl
import small_models
import torch
from small_models import ResumableLoader, TokenModel, token_batches
from torch import Tensor

from lightning_mp.training.lr_schedule.schedules import TokenSchedule, WarmupCosine, WarmupStableDecay

LENGTHS = [5, 9, 4, 8, 7, 3, 9, 6, 8, 5, 7, 9, 4, 6, 5, 5]
TOTAL = sum(LENGTHS)  # 100
COSINE = WarmupCosine(warmup=0.1, final=0.1, start=0.05)
WSD = WarmupStableDecay(warmup=0.1, decay=0.3, start=0.05)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def fused(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, fused=True)


def tensor_rate(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=torch.tensor(1e-2), fused=True)


class Recording(TokenModel):
    """Notes the rates that each optimizer step used, of every group; the loss of ``overflows`` is infinite."""

    def __init__(self, optimizer: Any = adamw, overflows: Iterable[int] = (), ratio: float | None = None) -> None:
        super().__init__(optimizer)
        self.overflows, self.ratio = set(overflows), ratio
        self.seen_batches = 0
        self.rates: list[Any] = []

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.seen_batches += 1
        return loss * torch.inf if self.seen_batches - 1 in self.overflows else loss

    def configure_optimizers(self) -> Any:
        groups: Any = self.parameters()
        if self.ratio is not None:
            groups = [
                {"params": self.embedding.parameters(), "lr": 1e-2 * self.ratio},
                {"params": self.head.parameters()},
            ]
        optimizer = self.make_optimizer(groups)
        optimizer.register_step_post_hook(
            lambda stepped, *_: self.rates.append([float(group["lr"]) for group in stepped.param_groups])
        )
        return optimizer


def fit(
    module: Recording, callbacks: Sequence[pl.Callback], lengths: Sequence[int] = LENGTHS, **arguments: Any
) -> pl.Trainer:
    return small_models.fit(module, ResumableLoader(token_batches(lengths)), *callbacks, **arguments)


def expected(schedule: TokenSchedule, windows: Sequence[int], horizon: int = TOTAL, peak: float = 1e-2) -> list[float]:
    """The closed form: the schedule at the tokens before each window."""
    return [peak * schedule(sum(windows[:index]) / horizon) for index in range(len(windows))]


def first(module: Recording) -> list[float]:
    return [rates[0] for rates in module.rates]
