"""Learning rates as multiples of each parameter group's own ``initial_lr``, the name that torch's schedulers use."""

from torch import Tensor
from torch.optim import Optimizer

__all__ = ["initial_rates", "set_rates"]


def initial_rates(optimizer: Optimizer) -> list[float]:
    """Each group's ``initial_lr``, made from its rate where there is none; numbers, since reading a tensor waits."""
    for group in optimizer.param_groups:
        if not isinstance(group.get("initial_lr"), float):
            group["initial_lr"] = float(group.get("initial_lr", group["lr"]))
    return [group["initial_lr"] for group in optimizer.param_groups]


def set_rates(optimizer: Optimizer, factor: float) -> None:
    """Every group's rate becomes its ``initial_lr`` times ``factor``; a rate that is a tensor stays that tensor.

    Example:
        >>> import torch
        >>> sgd = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.5)
        >>> for factor in (0.5, 0.25):
        ...     set_rates(sgd, factor)
        >>> sgd.param_groups[0]["lr"], sgd.param_groups[0]["initial_lr"]
        (0.125, 0.5)
    """
    for group, initial in zip(optimizer.param_groups, initial_rates(optimizer), strict=True):
        rate = initial * factor
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
