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


def loss_form(samples: int, whole: float, halves: Sequence[PartLoss], tolerance: float) -> LossForm | None:
    """How the loss of some samples is made of those of their halves; None if these do not show it.

    Args:
        samples: how many there are, for the message.
        whole: the loss of all of them.
        halves: what each half counts, and its loss.
        tolerance: by how much the numbers may differ, relative to their size.

    Raises:
        MisconfigurationException: if it is neither their mean by counts nor their sum.

    Example:
        >>> loss_form(4, 2.5, [PartLoss(2, 2.0), PartLoss(2, 3.0)], 1e-3)
        'mean'
        >>> loss_form(4, 5.0, [PartLoss(2, 2.0), PartLoss(2, 3.0)], 1e-3)
        'sum'
        >>> loss_form(4, 3.0, [PartLoss(2, 3.0), PartLoss(0, float("nan"))], 1e-3) is None
        True
    """
    counting = [half for half in halves if half.items > 0]
    if not counting:
        return None
    mean, total = mean_and_sum(counting)
    size = max(abs(whole), sum(abs(half.loss) for half in counting))
    is_mean, is_sum = abs(mean - whole) <= tolerance * size, abs(total - whole) <= tolerance * size
    # A half without a loss lets any mean look like a sum, and one that counts nothing is no test of a mean.
    has_loss = all(abs(half.loss) > tolerance * size for half in counting)
    if is_mean and (is_sum or len(counting) < len(halves)):
        return None
    if is_mean:
        return "mean"
    if is_sum and has_loss and len(counting) == len(halves):
        return "sum"
    losses = " and ".join(f"{half.loss:.4g} (over {half.items:g})" for half in halves)
    raise MisconfigurationException(
        f"MicroBatchOnOOM: the loss of {samples} samples is {whole:.4g}, those of their halves are {losses}: it is"
        " neither their mean nor their sum, as with a loss that compares the samples of a batch with each other, so a"
        " batch that does not fit into memory cannot be split. Use a smaller batch in the data loader,"
        " ActivationCheckpointing, or a loss that is a mean or a sum over samples."
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
