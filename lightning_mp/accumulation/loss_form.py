"""Whether the loss of a batch is made of the losses of its parts: asked of numbers, not of how the loss is built."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from lightning.pytorch.utilities.exceptions import MisconfigurationException

#: The loss of a batch is the mean of its parts' losses by what they count, or their sum.
LossForm = Literal["mean", "sum"]


class PartLoss(NamedTuple):
    """The loss of a part of a batch."""

    items: float  # what it is a mean over
    loss: float  # of no use if it counts nothing
    is_mean: bool = False  # its graph shows a mean over these


def loss_form(whole: float, halves: Sequence[PartLoss], tolerance: float) -> LossForm | Literal["neither"] | None:
    """How the loss of some samples is made of those of their halves; None if these do not show it.

    Args:
        whole: the loss of all of them.
        halves: what each half counts, and its loss.
        tolerance: by how much the numbers may differ, relative to their size.

    Example:
        >>> loss_form(2.5, [PartLoss(2, 2.0), PartLoss(2, 3.0)], 1e-3)
        'mean'
        >>> loss_form(5.0, [PartLoss(2, 2.0), PartLoss(2, 3.0)], 1e-3)
        'sum'
        >>> loss_form(1.0, [PartLoss(2, 2.0), PartLoss(2, 3.0)], 1e-3)
        'neither'
        >>> loss_form(3.0, [PartLoss(2, 3.0), PartLoss(0, float("nan"))], 1e-3) is None
        True
    """
    counting = [half for half in halves if half.items > 0]
    if not counting:
        return None
    mean, total = mean_and_sum(counting)
    size = max(abs(whole), sum(abs(half.loss) for half in counting))
    is_mean, is_sum = abs(mean - whole) <= tolerance * size, abs(total - whole) <= tolerance * size
    if is_mean:
        # A half that counts nothing is no test of a mean.
        return None if is_sum or len(counting) < len(halves) else "mean"
    # Nor is one without a loss a test of a sum: any mean looks like one then.
    has_losses = all(abs(half.loss) > tolerance * size for half in counting)
    return "sum" if is_sum and has_losses and len(counting) == len(halves) else "neither"


def not_additive(samples: int, whole: float, halves: Sequence[PartLoss]) -> MisconfigurationException:
    """The refusal of a loss that is neither the mean nor the sum of its parts' losses."""
    losses = " and ".join(f"{half.loss:.4g} (over {half.items:g})" for half in halves)
    return MisconfigurationException(
        f"MicroBatchOnOOM: the loss of {samples} samples is {whole:.4g}, those of their halves are {losses}: it is"
        " neither their mean nor their sum, so the batch cannot be split. Use a smaller batch, or"
        " ActivationCheckpointing."
    )


def likelier_form(whole: float, halves: Sequence[PartLoss]) -> LossForm:
    """The nearer one, where random numbers make both inexact.

    >>> likelier_form(2.4, [PartLoss(2, 2.0), PartLoss(2, 3.0)]), likelier_form(4.6, [PartLoss(2, 2), PartLoss(2, 3)])
    ('mean', 'sum')
    """
    counting = [half for half in halves if half.items > 0]
    if len(counting) < 2:
        return "mean"
    mean, total = mean_and_sum(counting)
    return "sum" if abs(total - whole) < abs(mean - whole) else "mean"


def mean_and_sum(halves: Sequence[PartLoss]) -> tuple[float, float]:
    """The mean of losses by their counts, and their sum."""
    count = sum(half.items for half in halves)
    return sum(half.items * half.loss for half in halves) / count, sum(half.loss for half in halves)
