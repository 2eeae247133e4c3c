"""Exponents of an optimizer's gradients between backward and the step, as the loss scale makes them."""

from collections.abc import Sequence

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lightning_mp.core import private_api
from lightning_mp.diagnostics.underflow.table import ExponentTable
from lightning_mp.gradients import gradient_ops
from lightning_mp.gradients.fused_optimizers import applies_grad_scale
from lightning_mp.gradients.replication import gradient_replication
from lightning_mp.modules.names import unwrapped_name
from lightning_mp.precision.base import GradientStepPrecision

__all__ = ["count_gradients", "gradients_are_scaled", "loss_scale_of"]


def loss_scale_of(trainer: "pl.Trainer") -> Tensor | None:
    """The present loss scale on its device; None in a run without, or before the first loss was scaled."""
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    return private_api.grad_scaler_scale(scaler) if scaler is not None and scaler.is_enabled() else None


def gradients_are_scaled(trainer: "pl.Trainer", optimizer: Optimizer) -> bool:
    """Whether ``on_before_optimizer_step`` sees gradients times the loss scale.

    Stock plugins leave it to a fused optimizer to divide by it; ours show true gradients.
    """
    return applies_grad_scale(optimizer) and not isinstance(trainer.precision_plugin, GradientStepPrecision)


def count_gradients(
    trainer: "pl.Trainer", pl_module: "pl.LightningModule", optimizer: Optimizer, factor: Tensor | float | None
) -> ExponentTable:
    """Counts the gradients times ``factor``; of shards on all ranks together, each value once.

    There is a row for every trained parameter, also where it has no gradient: the table has the same shape on all
    ranks, and all of them have to call this.
    """
    whole_optimizer = getattr(trainer.strategy, "whole_optimizer", None)
    if whole_optimizer is not None:
        return _of_all_stages(whole_optimizer(optimizer), pl_module.device, factor)
    name_of = {id(p): name for name, p in pl_module.named_parameters()}
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    names = [unwrapped_name(name_of.get(id(p), f"parameter {index}")) for index, p in enumerate(parameters)]
    table = ExponentTable(names, pl_module.device)
    gradient_ops.reduce_partial_gradients_(parameters)
    for name, parameter in zip(names, parameters, strict=True):
        if parameter.grad is not None:
            table.add(name, parameter.grad, factor)
    ranks = gradient_replication(trainer)
    copies = ranks.copies([p if p.grad is None else p.grad for p in parameters], parameters)
    together = dist.get_world_size(ranks.group) if dist.is_available() and dist.is_initialized() else 1
    if ranks.holders == together and any(number < together for number in copies):
        table.sum_over_ranks_(copies, ranks.group)
    return table


def _of_all_stages(
    rows: Sequence[tuple[str, Tensor | None, int]], device: torch.device, factor: Tensor | float | None
) -> ExponentTable:
    """The same of a pipeline, whose ranks hold other parameters."""
    table = ExponentTable([unwrapped_name(name) for name, _, _ in rows], device)
    for name, parameter, _ in rows:
        if parameter is not None and parameter.grad is not None:
            table.add(unwrapped_name(name), parameter.grad, factor)
    table.sum_over_ranks_([copies for _, _, copies in rows], None)
    return table
