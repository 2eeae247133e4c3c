"""Under DDP, a rank whose ``training_step`` returns None takes part in the others' backward, and adds nothing to it."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.overrides.distributed import prepare_for_backward
from lightning.pytorch.strategies import DDPStrategy
from torch.nn.parallel import DistributedDataParallel

from lightning_mp.ground.core.patches import Patches


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
        # 0, with a gradient of 0 for each parameter, whatever their values are.
        sums = [p.sum(dtype=torch.float32) for p in model.parameters() if p.requires_grad]
        loss = (0.0 * torch.stack(sums).sum()).nan_to_num()
        prepare_for_backward(model, loss)
        return loss

    patch = Patches.of(trainer).replace(trainer.strategy, "training_step", training_step)
