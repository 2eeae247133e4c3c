"""Skipped over attempted optimizer steps."""

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric
from typing_extensions import override

from lightning_mp.ground.core.devices import sent_to


def overflow_rate(skipped: bool | Tensor) -> Tensor:
    """Share of steps that were skipped.

    Args:
        skipped: one entry per step, of any shape: bool, or a number that is nonzero for a skip, such as
            ``optimizer.found_inf``.

    Returns:
        Scalar tensor, float32; 0 without any step.

    Example:
        >>> import torch
        >>> overflow_rate(torch.tensor([False, True, False, False]))
        tensor(0.2500)
    """
    skipped_steps, attempted_steps = _count(skipped)
    return skipped_steps / max(attempted_steps, 1)


class OverflowRate(Metric):
    """Share of optimizer steps that were skipped because a gradient was not finite.

    Counts are int64 and stay on the device; nothing waits for it before ``compute``. All ranks skip together, so that
    the sums over ranks have the same ratio as those of one.

    Args:
        kwargs: arguments of ``torchmetrics.Metric``.

    Example:
        >>> metric = OverflowRate()
        >>> for skipped in (True, False, False, False):
        ...     metric.update(skipped)
        >>> metric.compute()
        tensor(0.2500)
    """

    is_differentiable = False
    higher_is_better = False
    full_state_update = False
    plot_lower_bound = 0.0
    plot_upper_bound = 1.0
    skipped_steps: Tensor
    attempted_steps: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_state("skipped_steps", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")
        self.add_state("attempted_steps", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    @override
    def update(self, skipped: bool | Tensor) -> None:
        """Counts steps.

        Args:
            skipped: one entry per step, see :func:`overflow_rate`; ``outcome.skipped`` of a ``StepOutcome``.
        """
        skipped_steps, attempted_steps = _count(skipped)
        self.skipped_steps += sent_to(skipped_steps, self.skipped_steps.device)
        self.attempted_steps += attempted_steps

    @override
    def compute(self) -> Tensor:
        """The rate so far."""
        return self.skipped_steps / self.attempted_steps.clamp(min=1)


def _count(skipped: bool | Tensor) -> tuple[Tensor, int]:
    if isinstance(skipped, Tensor):
        return (skipped.detach() != 0).sum(), skipped.numel()
    return torch.tensor(int(skipped)), 1
