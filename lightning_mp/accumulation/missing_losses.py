"""Under DDP, a rank whose ``training_step`` returns None takes part in the others' backward, and adds nothing to it."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.overrides.distributed import prepare_for_backward
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lightning_mp.core.patches import Patches


def replace_missing_losses(trainer: "pl.Trainer", report: Callable[[], None]) -> None:
    """Lets a training step that returns None return a loss without items, after a call of ``report``.

    Lightning refuses None on several ranks, which would wait for each other. A sharded strategy gathers weights in
    forward, so there a rank cannot take part without one, and Lightning's refusal stays.
    """
    model = trainer.strategy.model
    if not isinstance(trainer.strategy, DDPStrategy) or not isinstance(model, DistributedDataParallel):
        return
    if trainer.world_size == 1 or model.static_graph:
        return

    def training_step(*args: Any, **kwargs: Any) -> Any:
        output = patch.original(*args, **kwargs)
        if output is not None:
            return output
        report()
        loss: Tensor = _NoLoss.apply(*[p for p in model.parameters() if p.requires_grad])  # type: ignore[no-untyped-call]
        prepare_for_backward(model, loss)
        return loss

    patch = Patches.of(trainer).replace(trainer.strategy, "training_step", training_step)


class _NoLoss(torch.autograd.Function):
    """0, with a gradient of 0 for each parameter."""

    @staticmethod
    @override
    def forward(ctx: Any, *parameters: Tensor) -> Tensor:
        ctx.save_for_backward(*parameters)
        return parameters[0].new_zeros((), dtype=torch.float32)

    @staticmethod
    @override
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.zeros_like(parameter) for parameter in ctx.saved_tensors)
