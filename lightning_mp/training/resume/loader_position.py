"""The position of an ordinary ``DataLoader``, and how it continues from there without loading what came before."""

import hashlib
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from lightning.fabric.utilities.data import sized_len
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)
from typing_extensions import override

from lightning_mp.ground.core import private_resume_api
from lightning_mp.ground.core.patches import Patches
from lightning_mp.ground.core.saved_state import COUNT, FLAG, MAPPING, Schema, checked_state, or_none
from lightning_mp.training.resume.random_numbers import RANDOM_STATE, captured, restore

_CPU = torch.device("cpu")
_END = object()
_GENERATORS = Schema(
    "a list of states of generators",
    lambda value: isinstance(value, list) and all(isinstance(state, Tensor) for state in value),
)
_KINDS = {
    "batches": COUNT,
    "iteration": COUNT,
    "start": or_none(RANDOM_STATE),
    "generators_at_start": _GENERATORS,
    "generators": _GENERATORS,
    "last": or_none(Schema("a hash", lambda value: isinstance(value, str))),
    "split": or_none(MAPPING),
    "is_over": FLAG,
    "loader": MAPPING,
}
# These draw all numbers of an epoch at the first index, or from their own generator.
_REPEATABLE = (DistributedSampler, RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler)
_LOOKED_AT = 16


class LoaderPosition:
    """Gives a map-style ``DataLoader`` a ``state_dict`` and ``load_state_dict`` for the time of a run.

    The order of an epoch is what its sampler makes of the random state in which its first index is drawn. That
    state is kept when the epoch begins. To continue, it is put back, the sampler draws the indices of the
    batches that are done, and the global random numbers are put back to where they were. No sample is loaded for it.
    The indices of the last batch are compared with those that were saved.

    Worker processes draw random numbers too. To continue there without loading again what they had loaded, each batch
    has a seed, which depends on the state at the epoch's beginning, the batch's number and the data rank. It is set
    when the indices arrive in a worker, so augmentation does not depend on the number of workers.
    """

    def __init__(
        self,
        loader: "DataLoader[Any]",
        patches: Patches,
        data_rank: int = 0,
        num_data_ranks: int = 1,
        when_unrepeatable: Callable[[str], None] = lambda reason: None,
    ) -> None:
        self._loader, self._data_rank, self._num_data_ranks = loader, data_rank, num_data_ranks
        self._when_unrepeatable = when_unrepeatable
        self.sampler = private_resume_api.index_sampler(loader)
        self._iterator: Any = None
        self._iteration = 0
        self._start: dict[str, Any] | None = None
        self._generators_at_start: list[Tensor] = []
        self._key = b""
        # Batches before the first one of the present iterator, and the indices that were handed out last.
        self._skipped = 0
        self._last_hash: str | None = None
        self._handed_out: deque[tuple[int, Any]] = deque(maxlen=2 + (loader.prefetch_factor or 0) * loader.num_workers)
        # What the next iterator continues from. While one is being made, indices are drawn once or twice.
        self._resume: Mapping[str, Any] | None = None
        self._is_being_made = False
        #: Called when an iterator that continues was made, to put random numbers back for what is fetched ahead.
        self.when_made: Callable[[], None] = lambda: None

        def get_iterator() -> Any:
            continues = self._resume is not None
            self._is_being_made = True
            try:
                self._iterator = get_iterator_patch.original()
            finally:
                self._is_being_made, self._resume = False, None
            if continues:
                self.when_made()
            return self._iterator

        get_iterator_patch = patches.replace(loader, "_get_iterator", get_iterator)
        patches.replace(loader, "state_dict", self.state_dict)
        patches.replace(loader, "load_state_dict", self.load_state_dict)
        patches.at_end(private_resume_api.replace_index_sampler(loader, _RecordedIndices(self)))
        patches.at_end(self._forget)  # workers end with their iterator

    # -- state ---------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain values."""
        yielded = private_resume_api.batches_yielded(self._iterator) if self._iterator is not None else 0
        batches = self._skipped + yielded
        last = next((indices for number, indices in self._handed_out if number == batches - 1), None)
        return {
            "batches": batches,
            "iteration": self._iteration,
            "start": self._start,
            "generators_at_start": list(self._generators_at_start),
            "generators": [generator.get_state() for generator in self._generators()],
            "last": _hash(last) if last is not None else self._last_hash if not yielded else None,
            "split": _split(_inner(self.sampler)),
            "is_over": False,
            "loader": self._description(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Has the next iterator, and no other, continue from a state."""
        saved = checked_state(state, _KINDS, "a training loader")
        for name, own in self._description().items():
            other = saved["loader"].get(name)
            if other != own:
                raise ValueError(
                    f"ExactResume cannot continue in the data: {name} was {other} in the checkpoint's run and is {own}"
                    " now. Resume with the same loader, or without ExactResume()."
                )
        self._take_split(saved["split"])
        self._resume, self._iteration = saved, saved["iteration"]
        if saved["start"] is not None:
            self._skipped, self._start, self._last_hash = saved["batches"], saved["start"], saved["last"]
            self._generators_at_start = saved["generators_at_start"]

    def _forget(self) -> None:
        self._iterator = None

    def restore_generators(self, state: Mapping[str, Any]) -> None:
        """Restores the loader's own generators to their state at the time of the saved position."""
        for generator, saved in zip(self._generators(), state["generators"], strict=True):
            generator.set_state(saved)

    def _description(self) -> dict[str, Any]:
        """What must be the same to continue."""
        loader = self._loader
        batch_size = loader.batch_size if loader.batch_size is not None else getattr(self.sampler, "batch_size", None)
        # The state of a generator depends on how many batches are fetched ahead.
        workers = loader.num_workers if self._generators() else min(loader.num_workers, 1)
        return {
            "the dataset's length": sized_len(loader.dataset),
            "batch size times ranks": batch_size * self._num_data_ranks if isinstance(batch_size, int) else None,
            "num_workers" if self._generators() else "the number of workers (0, or any)": workers,
            "the number of generators": len(self._generators()),
        }

    def _take_split(self, saved: Mapping[str, Any] | None) -> None:
        """Has samples in the order of the checkpoint's run, also where only one of the two runs splits them."""
        sampler = _inner(self.sampler)
        own = _split(sampler)
        was_split, is_split = (split is not None and split["seed"] is not None for split in (saved, own))
        if was_split != is_split and not all(split is not None and split["is_plain"] for split in (saved, own)):
            raise ValueError(
                "ExactResume cannot continue in the data on another number of ranks: a sampler of your own orders"
                f" samples ({_sampler_name(self.sampler)} now), which is split over ranks in another order. Resume on"
                " as many ranks."
            )
        if not was_split:
            return
        assert saved is not None
        if not is_split:
            sampler = DistributedSampler(self._loader.dataset, 1, 0, shuffle=saved["is_shuffled"])
            sampler.set_epoch(saved["epoch"])
            self.sampler = _like(self.sampler, sampler)
        sampler.seed = saved["seed"]  # Lightning takes that of `seed_everything`, which may be another one

    def _sampler_of(self, resume: Mapping[str, Any]) -> Any:
        """For the rest of an epoch that began on one rank: this rank's share of that order."""
        own, was = _inner(self.sampler), resume["split"]
        if not isinstance(own, DistributedSampler) or was is None or was["seed"] is not None:
            return self.sampler
        dataset: Any = self._loader.dataset
        order: Any = range(len(dataset))
        if was["is_shuffled"]:
            order = list(RandomSampler(dataset, generator=self._loader.generator))
        share: DistributedSampler[Any] = DistributedSampler(
            order, own.num_replicas, own.rank, shuffle=False, drop_last=own.drop_last
        )
        return _like(self.sampler, [order[place] for place in share])

    def _generators(self) -> list[torch.Generator]:
        """Those of the loader, its sampler and nested samplers."""
        found: dict[int, torch.Generator] = {}
        holder: Any = self._loader
        for holder in (self._loader, self.sampler, getattr(self.sampler, "sampler", None)):
            generator = getattr(holder, "generator", None)
            if isinstance(generator, torch.Generator) and generator is not torch.default_generator:
                found[id(generator)] = generator
        return list(found.values())

    # -- indices -------------------------------------------------------------------------------------------------------

    def indices(self) -> Iterator[Any]:
        """Those of an iterator that is being created or, with persistent workers, reset."""
        resume = self._resume
        if not self._is_being_made:
            self._resume = None
        if resume is None:
            self._skipped, self._start, self._last_hash = 0, None, None
        return self._indices_from(resume)

    def _indices_from(self, resume: Mapping[str, Any] | None) -> Iterator[Any]:
        self._handed_out.clear()
        if resume is not None and resume["is_over"]:
            return
        if resume is None or resume["start"] is None:
            self._iteration += 1
            self._start = captured(_CPU)
            self._generators_at_start = [generator.get_state() for generator in self._generators()]
            rest = iter(self.sampler)
        else:
            rest = self._replayed(resume)
        self._key = self._key_of_iteration()
        seeds, looks = self._loader.num_workers > 0, not _is_repeatable(self.sampler)
        for number, indices in enumerate(self._watched(rest) if looks else rest, start=self._skipped):
            self._handed_out.append((number, indices))
            yield _ForAWorker(indices, self._seed(number)) if seeds else indices

    def _replayed(self, resume: Mapping[str, Any]) -> Iterator[Any]:
        """The sampler's iterator behind the batches that are done; global random numbers stay as they are."""
        now = captured(_CPU)
        restore(resume["start"], _CPU)
        for generator, saved in zip(self._generators(), resume["generators_at_start"], strict=True):
            generator.set_state(saved)
        rest: Iterator[Any] = iter(self._sampler_of(resume))
        last: Any = None
        for number in range(resume["batches"]):
            last = next(rest, _END)
            self._handed_out.append((number, last))
        if not resume["batches"]:
            # Most samplers draw the order with the first index.
            first = next(rest, _END)
            rest = rest if first is _END else chain([first], rest)
        restore(now, _CPU)
        if resume["batches"] and resume["last"] is not None and (last is _END or _hash(last) != resume["last"]):
            raise ValueError(
                f"ExactResume cannot continue in the data: batch {resume['batches']} of this epoch has other indices"
                f" than before, as {_sampler_name(self.sampler)} does not repeat its order. Resume with the same"
                " dataset and sampler, and draw its numbers from a generator."
            )
        return rest

    def _watched(self, rest: Iterator[Any]) -> Iterator[Any]:
        """Notices a sampler that draws from global random numbers in between, where a model draws too."""
        number = 0
        while True:
            before = captured(_CPU) if 0 < number < _LOOKED_AT else None
            indices = next(rest, _END)
            if before is not None and not _equal(before, captured(_CPU)):
                self._when_unrepeatable(
                    f"{_sampler_name(self.sampler)} draws from global random numbers in the middle of an epoch. Draw"
                    " all of them in its __iter__ before the first index, or from a generator"
                )
                number = _LOOKED_AT
            number += 1
            if indices is _END:
                return
            yield indices

    def _key_of_iteration(self) -> bytes:
        assert self._start is not None
        states = (self._start["torch"], self._start["python"], *self._generators_at_start)
        digest = hashlib.blake2b(repr((self._iteration, self._data_rank)).encode(), digest_size=16)
        for state in states:
            digest.update(state.numpy().tobytes())
        return digest.digest()

    def _seed(self, number: int) -> int:
        digest = hashlib.blake2b(self._key + number.to_bytes(8, "little"), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1


class StreamPosition:
    """Gives a ``DataLoader`` the state of its iterable dataset, which it loads in this process."""

    def __init__(self, loader: "DataLoader[Any]", patches: Patches) -> None:
        self._dataset: Any = loader.dataset
        self._resume: Mapping[str, Any] | None = None
        self.when_made: Callable[[], None] = lambda: None

        def get_iterator() -> Any:
            resume, self._resume = self._resume, None
            if resume is None:
                return get_iterator_patch.original()
            self._dataset.load_state_dict(resume["dataset"])
            if resume["is_over"]:
                return iter(())
            iterator = get_iterator_patch.original()
            self.when_made()
            return iterator

        get_iterator_patch = patches.replace(loader, "_get_iterator", get_iterator)
        patches.replace(loader, "state_dict", self.state_dict)
        patches.replace(loader, "load_state_dict", self.load_state_dict)

    def state_dict(self) -> dict[str, Any]:
        """The dataset's."""
        return {"dataset": self._dataset.state_dict(), "is_over": False}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Has the next iterator, and no other, continue from a state."""
        self._resume = checked_state(state, {"dataset": MAPPING, "is_over": FLAG}, "a training dataset")

    def restore_generators(self, state: Mapping[str, Any]) -> None:
        """A stream has none that are known."""


def why_unsupported(loader: object) -> str:
    """Why neither of the two can record where a loader without a state is; empty if one can."""
    if not isinstance(loader, DataLoader):
        return f"{type(loader).__name__} is no DataLoader and has no state_dict"
    if type(loader).__iter__ is not DataLoader.__iter__:
        return f"{type(loader).__name__} has an __iter__ that is not DataLoader's, and no state_dict"
    if not loader.in_order:
        return "with DataLoader(in_order=False) the order depends on the speed of the workers"
    if not isinstance(loader.dataset, IterableDataset):
        return ""
    name = type(loader.dataset).__name__
    if not (hasattr(loader.dataset, "state_dict") and hasattr(loader.dataset, "load_state_dict")):
        return f"the iterable dataset {name} has no state_dict"
    if loader.num_workers:
        return f"the state_dict of the iterable dataset {name} is in the worker processes (StatefulDataLoader reads it)"
    return ""


class _RecordedIndices(Sampler[Any]):
    """In the place of a loader's sampler, for which it answers."""

    def __init__(self, position: LoaderPosition) -> None:
        self._position = position

    @override
    def __iter__(self) -> Iterator[Any]:
        return self._position.indices()

    def __len__(self) -> int:
        return len(self._position.sampler)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_position" not in vars(self):
            raise AttributeError(name)
        return getattr(self._position.sampler, name)


class _ForAWorker:
    """Indices on their way to a worker process, which become plain ones there when the seed is set."""

    def __init__(self, indices: Any, seed: int) -> None:
        self._indices, self._seed = indices, seed

    @override
    def __reduce__(self) -> tuple[Callable[[Any, int], Any], tuple[Any, int]]:
        return _arrived, (self._indices, self._seed)


def _arrived(indices: Any, seed: int) -> Any:
    if get_worker_info() is not None:
        import numpy as np

        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed([seed & 0xFFFFFFFF, seed >> 32])
    return indices


def _hash(indices: Any) -> str:
    return hashlib.blake2b(repr(indices).encode(), digest_size=16).hexdigest()


def _inner(sampler: Any) -> Any:
    """What orders samples, in a batch sampler perhaps."""
    return sampler.sampler if isinstance(sampler, BatchSampler) else sampler


def _like(sampler: Any, inner: Any) -> Any:
    return BatchSampler(inner, sampler.batch_size, sampler.drop_last) if isinstance(sampler, BatchSampler) else inner


def _split(sampler: Any) -> dict[str, Any] | None:
    """How samples are ordered, if that can be done on another number of ranks; with a seed if they are split now."""
    if isinstance(sampler, DistributedSampler):
        is_plain = type(sampler) is DistributedSampler
        return {"seed": sampler.seed, "epoch": sampler.epoch, "is_shuffled": sampler.shuffle, "is_plain": is_plain}
    is_shuffled = type(sampler) is RandomSampler
    if is_shuffled and (sampler.replacement or sampler.num_samples != len(sampler.data_source)):
        return None
    if is_shuffled or type(sampler) is SequentialSampler:
        return {"seed": None, "epoch": 0, "is_shuffled": is_shuffled, "is_plain": True}
    return None


def _sampler_name(sampler: Any) -> str:
    return type(_inner(sampler)).__name__


def _is_repeatable(sampler: Any) -> bool:
    return type(_inner(sampler) if type(sampler) is BatchSampler else sampler) in _REPEATABLE


def _equal(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    states = [(state["torch"], state["python"], state["numpy"]["state"]["key"]) for state in (first, second)]
    positions = [state["numpy"]["state"]["pos"] for state in (first, second)]
    return positions[0] == positions[1] and all(torch.equal(a, b) for a, b in zip(*states, strict=True))
