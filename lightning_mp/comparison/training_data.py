"""What a comparison trains on: a data module, a loader, a function that makes one, or a single batch."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_mp.tokens.batch_tokens import count_samples, find_labels, loss_bearing

_BATCHES_PER_EPOCH = 1000


@dataclass(frozen=True, slots=True)
class TrainingData:
    """Data in one of its forms, in the arguments that a Trainer takes.

    >>> import torch
    >>> TrainingData([torch.zeros(2, 3), torch.zeros(2)]).is_batch
    True
    """

    source: Any
    validation: Any = None

    def __post_init__(self) -> None:
        if any(isinstance(each, DataLoader) for each in _elements(self.source)):
            raise ValueError(
                f"`data` is a {type(self.source).__name__} with a DataLoader in it, and would be treated as one batch."
                " Pass CombinedLoader(...) of lightning.pytorch.utilities, or a LightningDataModule."
            )
        if self.is_batch or isinstance(self.source, pl.LightningDataModule) or callable(self.source):
            return
        if isinstance(self.source, Iterator) or not hasattr(self.source, "__iter__"):
            raise ValueError(
                f"`data` of type {type(self.source).__name__} cannot be trained on several times. Pass a"
                " LightningDataModule, a DataLoader, a function that makes one of these, or one batch."
            )

    @property
    def is_batch(self) -> bool:
        """Whether it is a single batch. Several batches in a list are one too: wrap them in a DataLoader."""
        return isinstance(self.source, Tensor | list | tuple | Mapping)

    def make(self) -> "TrainingData":
        """Calls the function, if it is one."""
        made = self.source() if callable(self.source) and not self.is_batch else self.source
        return TrainingData(made, self.validation)

    def fit_arguments(self) -> dict[str, Any]:
        """For ``trainer.fit``."""
        if isinstance(self.source, pl.LightningDataModule):
            return {"datamodule": self.source}
        if self.is_batch:
            return {"train_dataloaders": RepeatedBatch(self.source)}
        return {"train_dataloaders": self.source, "val_dataloaders": self.validation}

    def validate_arguments(self) -> dict[str, Any]:
        """For ``trainer.validate``."""
        if self.validation is not None:
            return {"dataloaders": self.validation}
        if isinstance(self.source, pl.LightningDataModule):
            return {"datamodule": self.source}
        raise ValueError("`monitor` needs data to validate on. Pass `val_data`, or a LightningDataModule as data.")


def _elements(source: Any) -> Iterable[Any]:
    if isinstance(source, Mapping):
        return source.values()
    return source if isinstance(source, list | tuple) else ()


class RepeatedBatch:
    """A loader that gives the same batch again and again."""

    def __init__(self, batch: Any) -> None:
        self._batch = batch

    def __len__(self) -> int:
        return _BATCHES_PER_EPOCH

    def __iter__(self) -> Iterator[Any]:
        return (self._batch for _ in range(_BATCHES_PER_EPOCH))


def items_in(batch: Any) -> tuple[int, str]:
    """Target tokens of a batch, or where it has none its samples; with their name.

    >>> import torch
    >>> items_in([torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.int64)]), items_in(torch.zeros(5, 3))
    ((6, 'tokens'), (5, 'samples'))
    """
    labels = find_labels(batch)
    if labels is not None:
        return int(loss_bearing(labels, shifted=False).sum()), "tokens"
    try:
        return count_samples(batch), "samples"
    except ValueError:
        return 1, "batches"
