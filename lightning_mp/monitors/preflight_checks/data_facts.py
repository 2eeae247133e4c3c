"""One micro-batch of the data that a preflight is given, and how many there are; the data stay where they are."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy, deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.data import sized_len
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from lightning_mp.ground.modules.state import module_kept


@dataclass(frozen=True, slots=True)
class FoundData:
    """What the data are."""

    batch: Any  # one micro-batch of one rank
    loader: Any = None  # what gives the micro-batches; None where a batch was given
    batches_per_epoch: int | None = None  # of one rank; None where that is not known
    datamodule: "pl.LightningDataModule | None" = None  # a copy of the one that was given, after its `setup`
    is_limited: bool = False  # `limit_train_batches` is in that number already


def inspect_data(
    data: Any, module: "pl.LightningModule", *, data_ranks: int, shards_samples: bool, trainer: Any = None
) -> FoundData:
    """The first micro-batch, and the number of them.

    Of a map-style data set the first batch is fetched in this process, without the loader's workers, by a copy of its
    sampler. The loader's generators and samplers do not move; a data set that counts its calls does.
    """
    if data is None:
        with module_kept(module):
            data = _own_loader(module, "The module", "Pass a data module, a loader or a batch as the third argument.")
    elif isinstance(data, pl.LightningDataModule):
        # setup() writes into the object, and Lightning will call it again.
        own = copy(data)
        own.trainer = trainer if trainer is not None else own.trainer
        own.setup("fit")
        given = _own_loader(own, type(data).__name__, "Define it, or pass a loader or a batch.")
        found = inspect_data(given, module, data_ranks=data_ranks, shards_samples=shards_samples)
        return replace(found, datamodule=own)
    if isinstance(data, Mapping | list | tuple) and any(_is_loader(one) for one in _values(data)):
        look = partial(inspect_data, module=module, data_ranks=data_ranks, shards_samples=shards_samples)
        parts = [look(one) for one in _values(data)]
        batches = [one.batch for one in parts]
        lengths = [one.batches_per_epoch for one in parts if one.batches_per_epoch is not None]
        batch = dict(zip(data, batches, strict=True)) if isinstance(data, Mapping) else batches
        return FoundData(batch, data, max(lengths) if len(lengths) == len(parts) else None)
    if isinstance(data, DataLoader):
        number = sized_len(data)
        if number is not None and shards_samples and _is_sharded_by_lightning(data):
            number = -(-number // data_ranks)
        return FoundData(_first_batch(data), data, number)
    if _is_loader(data):
        return FoundData(_next(iter(data)), data, sized_len(data))
    return FoundData(data)


def _own_loader(owner: Any, name: str, otherwise: str) -> Any:
    if type(owner).train_dataloader in (pl.LightningModule.train_dataloader, pl.LightningDataModule.train_dataloader):
        raise ValueError(f"{name} has no train_dataloader. {otherwise}")
    return owner.train_dataloader()


def _values(loaders: Any) -> list[Any]:
    return list(loaders.values()) if isinstance(loaders, Mapping) else list(loaders)


def _is_loader(data: Any) -> bool:
    """Batches of other classes can be moved to a device; loaders cannot."""
    return hasattr(data, "__iter__") and not hasattr(data, "to") and not isinstance(data, Mapping | Sequence)


def _is_sharded_by_lightning(loader: "DataLoader[Any]") -> bool:
    return not isinstance(loader.sampler, DistributedSampler) and not isinstance(loader.dataset, IterableDataset)


def _first_batch(loader: "DataLoader[Any]") -> Any:
    with _generators_kept(loader):
        if isinstance(loader.dataset, IterableDataset):
            return _next(iter(loader))
        if loader.batch_sampler is None:
            return loader.collate_fn(loader.dataset[_next(iter(_copied(loader.sampler, loader.dataset)))])
        indices = _next(iter(_copied(loader.batch_sampler, loader.dataset)))
        fetch = getattr(loader.dataset, "__getitems__", None)
        samples = fetch(indices) if fetch is not None else [loader.dataset[index] for index in indices]
        return loader.collate_fn(samples)


def _copied(sampler: Any, dataset: Any) -> Any:
    """A sampler whose order is drawn in place of the given one's; what cannot be copied is used itself."""
    try:
        return deepcopy(sampler, {id(dataset): dataset})
    except Exception:
        return sampler


@contextmanager
def _generators_kept(loader: "DataLoader[Any]") -> Iterator[None]:
    owners = (loader, loader.sampler, loader.batch_sampler)
    generators = {one for owner in owners if isinstance(one := getattr(owner, "generator", None), torch.Generator)}
    states = {generator: generator.get_state() for generator in generators}
    try:
        yield
    finally:
        for generator, state in states.items():
            generator.set_state(state)


def _next(iterator: Iterator[Any]) -> Any:
    try:
        return next(iterator)
    except StopIteration:
        raise ValueError("There is no batch in the data.") from None
