"""Small modules that are trained with lent weights, the batches they see, and the fit that trains them."""

from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from master_loops import master_weights
from small_models import loader, quiet_trainer
from torch import Tensor, nn
from torch.nn import functional as F

GENERATOR = torch.Generator().manual_seed(0)
SEQUENCES = [(torch.randn(4, 5, 8, generator=GENERATOR), torch.randn(4, 5, 8, generator=GENERATOR)) for _ in range(6)]
FLAT = [(x[:, 0], y[:, 0]) for x, y in SEQUENCES]
TOKENS = [torch.randint(16, (4, 6), generator=GENERATOR) for _ in range(6)]

sgd: Any = partial(torch.optim.SGD, lr=0.1)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))


class Fitted(pl.LightningModule):
    """A network made by ``make_net``, with the mean squared error of its first output."""

    data: Any = SEQUENCES

    def __init__(self, make_net: Callable[[], nn.Module] = mlp, make_optimizer: Any = sgd) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net: Any = make_net()
        self.make_optimizer = make_optimizer

    def out(self, x: Tensor) -> Tensor:
        out = self.net(x)
        return out[0] if isinstance(out, tuple) else out

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.mse_loss(self.out(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return self.make_optimizer([p for p in self.parameters() if p.requires_grad])


def fit(module: pl.LightningModule, *, epochs: int = 2, plugin: Any = None, **settings: Any) -> pl.Trainer:
    trainer = quiet_trainer(plugins=[plugin or master_weights(weight_by=None)], max_epochs=epochs, **settings)
    torch.manual_seed(7)  # dropout
    trainer.fit(module, loader(list(module.data)))  # type: ignore[arg-type]
    return trainer


def same(first: list[Tensor], second: list[Tensor]) -> bool:
    return len(first) == len(second) > 0 and all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
