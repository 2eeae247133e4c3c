"""Operations of one training step of any module, counted on the meta device: nothing is computed.

What counts and what does not is in :mod:`lightning_mp.ground.flops.flop_tally`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_mp.ground.core import private_sharding_api
from lightning_mp.ground.flops.flop_tally import FlopCount, FlopTally
from lightning_mp.ground.flops.grouped_products import GroupedProducts, backward_in_modes
from lightning_mp.ground.flops.meta_masks import MasksWithoutNumbers
from lightning_mp.ground.modules.stand_ins import batch_with, module_with, run_forward, sum_of_outputs

StepFunction = Callable[[nn.Module, Any], Any]


def count_flops(module: nn.Module, batch: Any, step: StepFunction | None = None) -> FlopCount:
    """Counts the operations of one training step of any module; nothing is computed and no memory is used.

    The module is copied to the meta device, where tensors have shapes and no numbers. Grouped-query attention, gated
    MLPs, frozen weights (no product for their gradients) and activation checkpoints come out right because they run as
    they are. Inputs that need a gradient get one, and its operations count. The module itself does not change.
    """
    if any(
        isinstance(parameter, DTensor) or private_sharding_api.is_flat_shard(parameter)
        for parameter in module.parameters()
    ):
        raise ValueError("count_flops() was given a module with sharded parameters. Count before it is sharded.")
    run = step if step is not None else run_forward
    copy, batch = module_with(module, _on_meta), batch_with(batch, _on_meta)
    try:
        with torch.device("meta"), MasksWithoutNumbers(), GroupedProducts(), torch.enable_grad(), FlopTally() as tally:
            loss = sum_of_outputs(run(copy, batch))
            if loss is not None:
                backward_in_modes(loss)
    except (NotImplementedError, RuntimeError) as error:
        if "meta" not in str(error).lower():
            raise
        raise ValueError(
            "count_flops() could not run the step on the meta device, where tensors have no data"
            f" ({_first_line(error)}). Count it as it runs: with"
            " lightning_mp.ground.flops.flop_tally.FlopTally() as tally: (forward and backward), then tally.count."
        ) from error
    if loss is None:
        raise ValueError(
            "count_flops() found nothing to differentiate: no output of the step has a gradient. Pass step=, a"
            " function from module and batch to the loss."
        )
    return tally.count


def _on_meta(tensor: Tensor) -> Tensor:
    return tensor.detach().to("meta")


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0].partition(". ")[0]
