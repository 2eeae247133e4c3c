"""Exponents of an optimizer's gradients between backward and the step, as the loss scale makes them."""

from collections.abc import Sequence

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lightning_mp.ground.core.ranks import world_size
from lightning_mp.ground.modules.names import unwrapped_name
from lightning_mp.monitors.diagnostics.underflow.exponents import ExponentTable
from lightning_mp.monitors.diagnostics.underflow.watch import BackwardWatch
from lightning_mp.training.gradients import gradient_ops
from lightning_mp.training.gradients.fused_optimizers import applies_grad_scale
from lightning_mp.training.gradients.replication import gradient_replication
from lightning_mp.training.optimizer_step.gradient_observers import makes_true_gradients


def gradients_are_scaled(trainer: "pl.Trainer", optimizer: Optimizer) -> bool:
    """Whether ``on_before_optimizer_step`` sees gradients times the loss scale.

    Stock plugins leave it to a fused optimizer to divide by it; those of this package show true gradients.
    """
    return applies_grad_scale(optimizer) and not makes_true_gradients(trainer.precision_plugin)


def count_gradients(
    trainer: "pl.Trainer",
    pl_module: "pl.LightningModule",
    optimizer: Optimizer,
    factor: Tensor | float | None,
    watch: BackwardWatch,
) -> ExponentTable:
    """Counts the gradients times ``factor``; shards are counted on all ranks together, each value once.

    There is a row for every trained parameter, also where it has no gradient: the table has the same shape on all
    ranks, and all of them have to call this. Rows of parameters whose gradients ``watch`` saw in fp32 only stay empty.
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
        if parameter.grad is not None and not watch.is_kept_in_fp32(parameter):
            table.add(name, parameter.grad, factor)
    ranks = gradient_replication(trainer)
    copies = ranks.copies([p if p.grad is None else p.grad for p in parameters], parameters)
    together = world_size(ranks.group)
    if ranks.ranks_per_parameter == together and any(number < together for number in copies):
        table.sum_over_ranks_(copies, ranks.group)
    return table


def kept_in_fp32(pl_module: "pl.LightningModule", watch: BackwardWatch) -> tuple[str, ...]:
    """Names of the parameters whose gradients were certainly never in 16 bit."""
    return tuple(unwrapped_name(name) for name, p in pl_module.named_parameters() if watch.is_kept_in_fp32(p))


def largest_on_any_rank(
    trainer: "pl.Trainer", watch: BackwardWatch, factor: Tensor | float | None, device: torch.device
) -> Tensor:
    """Largest magnitude of the 16-bit gradients that backward held, times ``factor``; -1 without any.

    Of shape [1], on the device; inf if one was not finite. Under DDP each rank has its own backward, so all ranks
    have to call this.
    """
    largest = torch.full((1,), -1.0, dtype=torch.float32, device=device)
    if watch.largest is not None:
        largest = watch.largest.reshape(1) * (1.0 if factor is None else factor)
        largest = largest.nan_to_num(nan=torch.inf, posinf=torch.inf)
    if world_size() > 1:
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=gradient_replication(trainer).group)
    return largest


def _of_all_stages(
    rows: Sequence[tuple[str, Tensor | None, int]], device: torch.device, factor: Tensor | float | None
) -> ExponentTable:
    """The same for a pipeline, whose ranks hold different parameters."""
    table = ExponentTable([unwrapped_name(name) for name, _, _ in rows], device)
    for name, parameter, _ in rows:
        if parameter is not None and parameter.grad is not None:
            table.add(unwrapped_name(name), parameter.grad, factor)
    table.sum_over_ranks_([copies for _, _, copies in rows], None)
    return table
