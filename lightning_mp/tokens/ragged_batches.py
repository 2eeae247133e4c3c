"""Batches whose tensors have different numbers of rows: graphs, point clouds, several loaders at once."""

from typing import Any

from lightning.fabric.utilities.rank_zero import rank_zero_warn

from lightning_mp.core.messages import listed
from lightning_mp.core.nested_tensors import named_tensors_in, tensors_in

__all__ = ["RaggedBatches", "rows_differ"]


def rows_differ(batch: Any) -> bool:
    """Whether the first dimensions of the tensors in a batch differ, so that any of them may be its samples.

    Numbers and tensors without a dimension do not matter.

    Example:
        >>> import torch
        >>> rows_differ([torch.zeros(4, 3), torch.zeros(4), torch.tensor(0.1)]), rows_differ(
        ...     {"nodes": torch.zeros(9, 3), "graphs": torch.zeros(2)}
        ... )
        (False, True)
    """
    return len({tensor.shape[0] for tensor in tensors_in(batch) if tensor.ndim}) > 1


class RaggedBatches:
    """Says once which rows are taken for samples, where a batch leaves that open.

    Args:
        consequence: what comes of it.
        cure: what to do where that is wrong.
    """

    def __init__(self, consequence: str, cure: str) -> None:
        self._text = consequence, cure
        self._has_told = False

    def look(self, batch: Any) -> None:
        """Warns if this is the first such batch."""
        if self._has_told or not rows_differ(batch):
            return
        self._has_told = True
        first_with: dict[int, str] = {}
        for path, tensor in named_tensors_in(batch):
            if tensor.ndim:
                first_with.setdefault(tensor.shape[0], path)
        rows = [f"{path} has {length}" for length, path in first_with.items()]
        consequence, cure = self._text
        rank_zero_warn(
            f"Tensors in a batch have different numbers of rows: {listed(rows)}. The rows of the first tensor,"
            f" {next(iter(first_with.values()))}, are taken for the samples of the batch: {consequence} {cure}"
        )
