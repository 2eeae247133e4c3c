"""A model that calls its norms, softmax and loss as functions, and runs of it under a policy."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from small_models import fit, sgd
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_mp import AutocastPrecision, PrecisionPolicy
from lightning_mp.ground.core import private_dispatch_api
from lightning_mp.training.policy.applied import AppliedPolicy

LOW = torch.bfloat16
WIDTH, CLASSES = 8, 5
RULES = [("head", "fp32"), *PrecisionPolicy.default().rules]


class Body(nn.Module):
    """Calls its norms and softmax as functions, as language models do; checkpointed if asked for."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 16)
        self.down = nn.Linear(16, WIDTH)
        self.gain = nn.Parameter(torch.ones(WIDTH))
        self.reentrant = reentrant

    def mix(self, x: Tensor) -> Tensor:
        x = F.layer_norm(x + self.down(F.gelu(self.up(x))), (WIDTH,), self.gain)
        return x + F.softmax(x @ x.mT, -1) @ x

    def forward(self, x: Tensor) -> Tensor:
        if self.reentrant is None:
            return self.mix(x)
        return checkpoint(self.mix, x, use_reentrant=self.reentrant)


class Classifier(pl.LightningModule):
    """Records the dtype in which each of its functional operations really ran."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.body = Body(reentrant)
        self.head = nn.Linear(WIDTH, CLASSES)
        self.dtypes: dict[str, torch.dtype] = {}
        self.losses: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(self.stem(x)))
        return logits

    def step(self, batch: Any) -> Tensor:
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits.flatten(0, 1), y.flatten())
        self.dtypes = dtypes_of_operations(x, self.stem.weight, logits, loss)
        self.losses.append(loss.detach())
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.step(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return sgd(self.parameters())


class Evaluated(Classifier):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.step(batch)


def batches(num_batches: int = 2) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        [torch.randn(2, 4, WIDTH, generator=generator), torch.randint(CLASSES, (2, 4), generator=generator)]
        for _ in range(num_batches)
    ]


def train(policy: Any, module: pl.LightningModule | None = None, **arguments: Any) -> Any:
    module = Classifier() if module is None else module
    plugin = AutocastPrecision("bf16-mixed", policy=policy)
    fit(module, batches(), plugin=plugin, **arguments)
    return module


def step_under(policy: AppliedPolicy, model: nn.Module, x: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Output and gradients of one forward and backward, as the plugin runs them."""
    model.zero_grad()
    with torch.autocast("cpu", LOW), policy.in_force(LOW), private_dispatch_api.backward_outside_autocast():
        out = model(x)
        loss = out.float().square().mean()
    with policy.in_force(LOW):
        loss.backward()
    return out.detach(), [p.grad.clone() for p in model.parameters()]


def nothing_is_left(module: nn.Module) -> bool:
    """No wrapped forward, no autocast, no mode."""
    return (
        not any("forward" in vars(part) for part in module.modules())
        and not torch.is_autocast_enabled("cpu")
        and not torch.overrides._get_current_function_mode_stack()
    )


def failing(kind: type[pl.LightningModule], where: str, watched: Callable[[Any], tuple[Tensor, nn.Module]]) -> Any:
    """A module whose runs end in an ArithmeticError: in a weight's backward, in a layer's forward or in a hook."""

    class Fails(kind):  # type: ignore[misc, valid-type]
        pass

    def fail(*_: Any, **__: Any) -> None:
        raise ArithmeticError(where)

    module = Fails()
    weight, layer = watched(module)
    if where == "backward":
        weight.register_hook(fail)
    elif where == "forward":
        layer.register_forward_hook(fail)
    else:
        setattr(Fails, where, fail)
    return module


def dtypes_of_operations(x: Tensor, weight: Tensor, logits: Tensor, loss: Tensor) -> dict[str, torch.dtype]:
    """What functional operations give under the precision that is active."""
    return {
        "logits": logits.dtype,
        "softmax": F.softmax(logits, -1).dtype,
        "layer_norm": F.layer_norm(logits, logits.shape[-1:]).dtype,
        "loss": loss.dtype,
        "linear": F.linear(x, weight).dtype,
    }
