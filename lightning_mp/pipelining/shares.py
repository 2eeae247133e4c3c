"""What each microbatch of a batch weighs in its mean: by target tokens or by samples."""

from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
import torch

from lightning_mp.training.accumulation.batch_split import Microbatch
from lightning_mp.training.accumulation.controller import AccumulationController
from lightning_mp.training.tokens.loss_weighting import Weighting


def microbatch_shares(microbatches: Sequence[Microbatch], weighting: Weighting) -> list[float]:
    """The share of each microbatch in the mean of its micro-batch, by tokens or by samples; they add up to 1.

    Tokens that lie on a device are waited for. A micro-batch without a target token is shared by samples.
    """
    counts: list[Any] = [microbatch.samples for microbatch in microbatches]
    if weighting.weight_by == "token" and len(microbatches) > 1:
        items = [torch.as_tensor(weighting.measure(microbatch.batch).items) for microbatch in microbatches]
        on_host = torch.stack(items).tolist()
        counts = on_host if sum(on_host) else counts
    total = sum(counts)
    return [count / total for count in counts]


def weighting_of(trainer: "pl.Trainer", first_batch: Any, shifts: Callable[[], bool]) -> Weighting:
    """How microbatches are weighed: as the run's micro-batches are, else by tokens if there are any, or by samples."""
    controller = AccumulationController.of(trainer)
    if controller is not None and controller.weighting is not None and controller.weighting.weight_by is not None:
        return controller.weighting
    return Weighting("auto").resolved(first_batch, shifted=shifts())
