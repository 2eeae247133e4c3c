"""An unfinished window in a checkpoint."""

from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar, Self

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch import Tensor, nn

from lightning_mp.ground.core.ranks import sum_over_ranks_, world_size
from lightning_mp.ground.core.saved_state import AMOUNT, COUNT, POSITIVE, Schema, checked_state, listed_of, tensor_like
from lightning_mp.ground.core.trainer_ranks import is_pipelined
from lightning_mp.training.accumulation.windows import Window
from lightning_mp.training.gradients.bucketed_all_reduce import reduce_gradients_
from lightning_mp.training.tokens.counter import LARGEST, NUM_TOTALS, AccumulationTotals


@dataclass(frozen=True)
class PartialAccumulation:
    """The first micro-batches of a window."""

    key: ClassVar[str] = "lightning_mp_partial_window"

    planned: int  # micro-batches that the window was to have
    position: int  # those that are done
    num_ranks: int  # ranks that have made the gradients
    loss_scale: float  # by which they are multiplied
    # what they add up to over all ranks, as `lightning_mp.training.tokens.counter.AccumulationTotals.tensor` has it
    totals: list[float]
    # by parameter name, as they are (scaled, not yet normalised), their mean over all ranks
    gradients: dict[str, Tensor]

    @classmethod
    def of(cls, trainer: "pl.Trainer", pl_module: "pl.LightningModule", window: Window) -> dict[str, Any]:
        """Gathers it, for a checkpoint; call it on all ranks.

        On one process gradients are saved to the bit. On several the window's gradient is the mean over ranks anyway,
        so that every rank may continue from the mean; the sum is then the same up to rounding. A rank that has not
        used a parameter yet adds nothing to it.
        """
        assert window.totals is not None
        totals, gradients = sum_over_ranks_(window.totals.tensor(pl_module.device)).tolist(), mean_over_ranks(pl_module)
        ranks, scale = world_size(), _loss_scale(trainer)
        return {cls.key: asdict(cls(window.planned, window.position, ranks, scale, totals, gradients))}

    @classmethod
    def load(cls, checkpoint: dict[str, Any], trainer: "pl.Trainer", module: nn.Module) -> Self | None:
        """Reads it from a checkpoint; None if that was written at the end of a window."""
        saved = checkpoint.get(cls.key)
        if saved is None:
            return None
        kinds = {
            "planned": POSITIVE,
            "position": COUNT,
            "num_ranks": POSITIVE,
            "loss_scale": POSITIVE,
            "totals": listed_of(AMOUNT, NUM_TOTALS),
            "gradients": Schema("a mapping", lambda value: isinstance(value, dict)),
        }
        partial = cls(**checked_state(saved, kinds, "an open accumulation window"))
        reason = why_gradients_are_elsewhere(trainer)
        if reason:
            raise ValueError(
                f"This checkpoint holds the gradient of the first {partial.position} of {partial.planned}"
                f" micro-batches of a window, which cannot be restored here: {reason} Resume with the strategy and"
                " plugin that wrote it, or from a checkpoint at the end of a window."
            )
        parameters = dict(module.named_parameters())
        unknown = sorted(partial.gradients.keys() - parameters.keys())
        if unknown:
            raise ValueError(
                f"The checkpoint holds partial gradients of parameters that the model does not have:"
                f" {', '.join(unknown)}. Resume with the same model, or from a checkpoint that was written at the end"
                " of a window."
            )
        shapes = {name: tensor_like(parameters[name].shape) for name in partial.gradients}
        checked_state(partial.gradients, shapes, "partial gradients")
        return partial

    def resized(self, micro_batches: float) -> "PartialAccumulation":
        """The same window, if the micro-batches to come are that many times as large as those before it.

        Example:
            >>> half = PartialAccumulation(planned=4, position=2, num_ranks=1, loss_scale=1.0, totals=[], gradients={})
            >>> half.resized(2.0).planned, half.resized(0.5).planned
            (3, 6)
        """
        left = max(1, round((self.planned - self.position) / micro_batches))
        planned = self.position + left
        # Lightning divides each loss by the planned length; those that are over were divided by another one.
        share = self.planned / planned
        return replace(self, planned=planned, gradients={n: g * share for n, g in self.gradients.items()})

    def restore_gradients(self, trainer: "pl.Trainer", module: nn.Module) -> None:
        """Puts the gradients back: on other ranks, or at another loss scale, as much as they are worth there."""
        share = self.num_ranks / world_size() * _loss_scale(trainer) / self.loss_scale
        parameters = dict(module.named_parameters())
        for name, gradient in self.gradients.items():
            parameter = parameters[name]
            dtype = parameter.grad_dtype or gradient.dtype  # of masters 16 bit
            parameter.grad = torch.empty_like(parameter, dtype=dtype).copy_(
                gradient if share == 1 else gradient * share
            )

    def totals_of_rank(self, *, is_global_zero: bool, same_layout: bool) -> AccumulationTotals:
        """The totals that a rank continues from: rank 0 from all of them, so that their sum stays the same."""
        totals = list(self.totals)
        totals[LARGEST] *= same_layout
        return AccumulationTotals(self.position, tuple(totals if is_global_zero else [0.0] * len(totals)))


def mean_over_ranks(module: nn.Module) -> dict[str, Tensor]:
    """The gradients of a module by name: copies of their mean over all ranks. Call it on all ranks.

    Ranks agree first which parameters have a gradient on any of them; where a rank has none, it adds zeros.
    """
    parameters = dict(module.named_parameters())
    if world_size() == 1:
        return {name: p.grad.detach().clone() for name, p in parameters.items() if p.grad is not None}
    device = next(iter(parameters.values())).device
    used = torch.tensor([float(p.grad is not None) for p in parameters.values()], device=device)
    somewhere = (sum_over_ranks_(used) > 0).tolist()
    means = {
        name: torch.zeros_like(p) if p.grad is None else p.grad.detach().to_dense().clone()
        for (name, p), is_used in zip(parameters.items(), somewhere, strict=True)
        if is_used
    }
    everybody = dist.group.WORLD
    assert everybody is not None
    reduce_gradients_(list(means.values()), everybody, mean=True)
    return means


def why_gradients_are_elsewhere(trainer: "pl.Trainer") -> str:
    """Why the gradients of an open window are not whole in ``parameter.grad``; empty if they are."""
    if isinstance(trainer.strategy, FSDPStrategy | ModelParallelStrategy):
        return f"{type(trainer.strategy).__name__} keeps the unsharded gradients of an open window inside of it."
    if is_pipelined(trainer):
        return f"{type(trainer.strategy).__name__} has only those of its own stage on each rank."
    if getattr(trainer.precision_plugin, "fp32_gradients", False):
        plugin = type(trainer.precision_plugin).__name__
        return f"{plugin}(fp32_gradients=True) keeps the gradients of an open window in separate buffers."
    return ""


def _loss_scale(trainer: "pl.Trainer") -> float:
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    return float(scaler.get_scale()) if scaler is not None and scaler.is_enabled() else 1.0
