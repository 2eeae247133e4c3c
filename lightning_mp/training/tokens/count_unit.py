"""Whether a user's function counts the tokens of a batch or its samples; a number that can be neither is refused."""

from collections.abc import Sized
from typing import Any, Literal

from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_mp.ground.core.nested_tensors import tensors_in
from lightning_mp.training.tokens import batch_tokens
from lightning_mp.training.tokens.ragged_batches import first_list, rows_differ

CountUnit = Literal["auto", "token", "sample"]


def samples_of(batch: Any) -> int:
    """The count of ``MFUMonitor(unit="sample")``."""
    return batch_tokens.count_samples(
        batch, "Pass MFUMonitor count= beside unit='sample', a function from a batch to its number of samples."
    )


def counted_unit(unit: CountUnit, counted: int, batch: Any, *, is_counted: bool) -> Literal["token", "sample"]:
    """What the number of a batch is one of.

    Every sample has a token at least, and no batch has more tokens than numbers; so fewer tokens than samples, or more
    than numbers, are none. ``len`` of a list ``[x, y]`` is 2 whatever the batch holds, which this finds. Where rows do
    not tell the samples (graphs, a list of images), a user who says that samples are counted is taken at their word.
    """
    if not is_counted:
        return "token"
    sizes = [tensor.shape for tensor in tensors_in(batch) if tensor.ndim]
    if not sizes:
        return "sample" if unit == "sample" else "token"
    samples, numbers = batch_tokens.count_samples(batch), max(shape.numel() for shape in sizes)
    if (counted == samples and unit != "token") or (unit == "sample" and _may_be_samples(counted, batch)):
        return "sample"
    # A batch of one dimension can be one of tokens, some of them padding.
    fewest = 1 if unit == "token" or (len(sizes[0]) == 1 and unit != "sample") else samples
    if unit == "sample" or not fewest <= counted <= numbers:
        allowed = f"{samples} samples" + ("" if unit == "sample" else f", or {fewest} to {numbers} tokens")
        raise MisconfigurationException(
            f"`count` gives {counted} for the first batch, of type {type(batch).__name__!r} with {allowed}. Count"
            " samples with count=lambda batch: len(batch[0]), tokens with their tensor's numel(). Say which they are"
            " with unit='sample' or unit='token' where the number alone is not clear."
        )
    return "token"


def _may_be_samples(counted: int, batch: Any) -> bool:
    """Whether a batch that leaves its samples open can have that many."""
    images = first_list(batch)
    if images and images[0].ndim > 2 and counted == len(images):
        return True
    rows = [tensor.shape[0] for tensor in tensors_in(batch) if tensor.ndim]
    is_len = isinstance(batch, Sized) and counted == len(batch)
    return rows_differ(batch) and counted > 0 and (counted in rows or not is_len)
