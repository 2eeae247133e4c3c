"""A window that is not over, in a checkpoint."""

from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_mp.gradients import sum_over_ranks_
from lightning_mp.ledger import WindowTotals

__all__ = ["PartialWindow"]


@dataclass(frozen=True)
class PartialWindow:
    """The first micro-batches of a window.

    Attributes:
        planned: micro-batches that the window was to have.
        position: those that are done.
        totals: what they add up to over all ranks, as :meth:`lightning_mp.ledger.WindowTotals.tensor` has it.
        gradients: by parameter name, as they are (scaled, not yet normalised), their mean over all ranks.
    """

    key: ClassVar[str] = "lightning_mp_partial_window"

    planned: int
    position: int
    totals: list[float]
    gradients: dict[str, Tensor]

    @classmethod
    def of(cls, module: nn.Module, planned: int, position: int, totals: Tensor) -> Self:
        """Gathers it; to be called on all ranks.

        On one process gradients are saved to the bit. On several the window's gradient is the mean over ranks anyway,
        so that every rank may go on from the mean; the sum is then the same up to rounding.
        """
        num_ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        gradients = {name: p.grad.detach().clone() for name, p in module.named_parameters() if p.grad is not None}
        if num_ranks > 1:
            for gradient in gradients.values():
                sum_over_ranks_(gradient).div_(num_ranks)
        return cls(planned, position, sum_over_ranks_(totals).tolist(), gradients)

    def save(self, checkpoint: dict[str, Any]) -> None:
        """Writes it into a checkpoint."""
        checkpoint[self.key] = asdict(self)

    @classmethod
    def load(cls, checkpoint: dict[str, Any]) -> Self | None:
        """Reads it from a checkpoint; None if that was written at the end of a window."""
        saved = checkpoint.get(cls.key)
        return cls(**saved) if saved is not None else None

    def restore_gradients(self, module: nn.Module) -> None:
        """Puts the gradients back.

        Raises:
            ValueError: if the module's parameters are not those of the checkpoint.
        """
        parameters = dict(module.named_parameters())
        unknown = sorted(self.gradients.keys() - parameters.keys())
        if unknown:
            raise ValueError(
                f"The checkpoint holds partial gradients of parameters that the model does not have:"
                f" {', '.join(unknown)}. Resume with the same model, or from a checkpoint that was written at the end"
                " of a window."
            )
        for name, gradient in self.gradients.items():
            parameter = parameters[name]
            parameter.grad = torch.empty_like(parameter).copy_(gradient)

    def totals_of_rank(self, *, is_global_zero: bool) -> WindowTotals:
        """The totals that a rank goes on from: rank 0 from all of them, so that their sum stays the same."""
        return WindowTotals.of(self.position, self.totals if is_global_zero else [0.0] * len(self.totals))
