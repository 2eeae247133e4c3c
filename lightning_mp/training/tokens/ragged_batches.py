"""Batches that do not determine which rows are their samples: graphs, point clouds, several loaders, lists."""

from collections.abc import Mapping
from typing import Any

from lightning.fabric.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_mp.ground.core.messages import listed
from lightning_mp.ground.core.nested_tensors import named_tensors_in, tensors_in
from lightning_mp.training.tokens.batch_tokens import listed_samples


def rows_differ(batch: Any) -> bool:
    """Whether the first dimensions of the tensors in a batch differ, so that any of them may be its samples.

    Numbers and tensors without a dimension do not matter, nor does any tensor where the batch lists its samples.
    """
    rows = {tensor.shape[0] for tensor in tensors_in(batch) if tensor.ndim}
    return len(rows) > 1 and listed_samples(batch) is None


def first_list(batch: Any) -> list[Tensor]:
    """The list or tuple that the first tensor of a batch is in, if it holds nothing but tensors of one shape.

    These may be samples, which only their number would show.

    >>> import torch
    >>> len(first_list({"images": [torch.zeros(3, 8, 8)] * 4, "text": "abc"})), first_list(torch.zeros(4, 3))
    (4, [])
    """
    inside: Any = batch
    while isinstance(inside, Mapping | list | tuple):
        entries = list(inside.values()) if isinstance(inside, Mapping) else list(inside)
        if not isinstance(inside, Mapping) and all(isinstance(entry, Tensor) and entry.ndim for entry in entries):
            return entries if len({entry.shape for entry in entries}) == 1 else []
        inside = next((entry for entry in entries if next(tensors_in(entry), None) is not None), None)
    return []


class RaggedBatches:
    """Says once which rows are taken as samples, if a batch does not determine this."""

    def __init__(self, consequence: str, cure: str) -> None:
        self._text = consequence, cure
        self._has_reported = False
        self._list: tuple[int, int] | None = None

    def look(self, batch: Any) -> None:
        """Warns if this is the first such batch."""
        if self._has_reported:
            return
        if rows_differ(batch):
            self._report_rows(batch)
        elif listed_samples(batch) is None and (tensors := first_list(batch)):
            before, self._list = self._list, (len(tensors), tensors[0].shape[0])
            (length, rows), (length_before, rows_before) = self._list, before or self._list
            if length != length_before and rows == rows_before:
                self._report(
                    f"A batch is a list of {length} tensors, and one before it was of {length_before}; all tensors have"
                    f" {rows} rows. These {rows} are taken for the samples of either batch, not its tensors:"
                )

    def _report_rows(self, batch: Any) -> None:
        first_with: dict[int, str] = {}
        for path, tensor in named_tensors_in(batch):
            if tensor.ndim:
                first_with.setdefault(tensor.shape[0], path)
        rows = [f"{path} has {length}" for length, path in first_with.items()]
        self._report(
            f"Tensors in a batch have different numbers of rows: {listed(rows)}. The rows of the first tensor,"
            f" {next(iter(first_with.values()))}, are taken for the samples of the batch:"
        )

    def _report(self, what: str) -> None:
        self._has_reported = True
        rank_zero_warn(" ".join((what, *self._text)))
