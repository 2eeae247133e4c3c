"""What all ranks of a run must be given alike, compared before their first collective operation and first batch.

Where ranks differ, that operation hangs, ends the process inside of gloo or NCCL, or trains different weights; none of
these names the cause. Ranks therefore exchange texts through the store that set the process group up: a rank that takes
no part, because it has no part of this package, keeps the others waiting, and they can say so.
"""

import datetime
import itertools
import json
import re
import warnings
from collections.abc import Mapping, Sequence
from zlib import crc32

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.distributed.distributed_c10d import Store
from torch.nn.parameter import is_lazy

from lightning_mp.ground.core.messages import listed
from lightning_mp.ground.core.private_sharding_api import store_of_all_ranks
from lightning_mp.ground.core.private_trainer_api import callbacks_of
from lightning_mp.ground.core.run_state import RunState
from lightning_mp.ground.core.settings_repr import SettingsRepr
from lightning_mp.ground.core.trainer_ranks import is_pipelined

#: A rank that has not shown its settings by then is named in a warning.
WARN_AFTER = datetime.timedelta(minutes=1)
GIVE_UP_AFTER = datetime.timedelta(minutes=30)

_OF_TRAINER = (
    "accumulate_grad_batches",
    "gradient_clip_val",
    "gradient_clip_algorithm",
    "max_epochs",
    "max_steps",
    "limit_train_batches",
    "limit_val_batches",
    "val_check_interval",
    "check_val_every_n_epoch",
    "num_sanity_val_steps",
)
# Paths, addresses and the index of a device may differ.
_OF_A_RANK = re.compile(r"'[^']*[/\\][^']*'| at 0x[0-9a-f]+|(?<=cuda):\d+")

_exchanges = itertools.count()  # equal on all ranks, since all of them take part in each


class RankSettings:
    """The comparison of one run: whichever part comes first makes it."""

    @classmethod
    def compare(cls, trainer: "pl.Trainer", model: nn.Module | None = None) -> None:
        """To be called on all ranks, before anything of the run is reduced or gathered.

        Raises:
            MisconfigurationException: on all ranks, if settings differ, or parameters of ``model``.
        """
        run = RunState.of(trainer)
        if trainer.world_size == 1 or not dist.is_initialized() or run.find(cls) is not None:
            return
        run.keep(cls())
        _refuse_differences(settings_of(trainer, model))

    @staticmethod
    def compare_at_first_batch(trainer: "pl.Trainer") -> None:
        """To be called on all ranks at the start of training, where optimizers and data are known.

        Raises:
            MisconfigurationException: on all ranks, if optimizers differ in a number, or epochs in their batches.
        """
        if trainer.world_size > 1 and dist.is_initialized():
            _refuse_differences(settings_of_training(trainer))


def settings_of(trainer: "pl.Trainer", model: nn.Module | None = None) -> dict[str, list[str]]:
    """Settings by name, as texts that are equal where ranks were given the same."""
    parts = [callback for callback in callbacks_of(trainer) if isinstance(callback, SettingsRepr)]
    settings = {
        "the strategy": _texts(trainer.strategy),
        "the precision plugin": _texts(trainer.precision_plugin),
        **{f"the callback {type(part).__name__}": _texts(part) for part in parts},
        "the Trainer": [f"{name}={getattr(trainer, name, None)!r}" for name in _OF_TRAINER],
        "fit()": [f"{'a' if trainer.ckpt_path is not None else 'no'} checkpoint to resume"],
    }
    return settings if model is None else {**settings, f"the model {type(model).__name__}": [_parameters_text(model)]}


def settings_of_training(trainer: "pl.Trainer") -> dict[str, list[str]]:
    """The same for what is known at the first batch; a run that ends after some steps may end within an epoch."""
    settings = {} if trainer.max_steps > 0 else {"the data": [f"{trainer.num_training_batches} batches in an epoch"]}
    for optimizer in () if is_pipelined(trainer) else trainer.optimizers:
        texts = settings.setdefault(f"the optimizer {type(optimizer).__name__}", [])
        for number, group in enumerate(optimizer.param_groups):
            where = f" in group {number}" if len(optimizer.param_groups) > 1 else ""
            values = {key: float(v) if isinstance(v, Tensor) and v.numel() == 1 else v for key, v in group.items()}
            texts += [
                f"{key}={value}{where}" for key, value in values.items() if isinstance(value, int | float | tuple)
            ]
    return settings


def difference(settings: Sequence[Mapping[str, Sequence[str]]]) -> str:
    """What differs between the first rank and the first other one that differs from it; "" if nothing does.

    >>> difference([{"SGD": ["lr=0.1", "decay=0"]}, {"SGD": ["lr=0.2", "decay=0"]}, {}]).partition(". ")[0]
    'Ranks differ in SGD: rank 0 has lr=0.1, rank 1 has lr=0.2'
    >>> difference([{"SGD": ["lr=0.1"]}, {}]).partition(". ")[0]
    'Ranks differ in SGD: rank 0 has lr=0.1, rank 1 has none'
    """
    first = settings[0]
    for rank, other in enumerate(settings):
        for name in {**first, **other}:
            here, there = first.get(name, ["none"]), other.get(name, ["none"])
            if here != there:
                ours = ", ".join(text for text in here if text not in there) or "nothing else"
                theirs = ", ".join(text for text in there if text not in here) or "nothing else"
                return (
                    f"Ranks differ in {name}: rank 0 has {ours}, rank {rank} has {theirs}. Give all ranks the same"
                    " arguments, callbacks, model and number of batches."
                )
    return ""


def _refuse_differences(settings: Mapping[str, list[str]]) -> None:
    if verdict := exchanged(settings):
        raise MisconfigurationException(verdict)


def exchanged(settings: Mapping[str, list[str]]) -> str:
    """What differs, on all ranks: rank 0 reads what all have written, and all read what it has found."""
    store, rank = store_of_all_ranks(), dist.get_rank()
    prefix = f"lightning_mp/settings/{next(_exchanges)}"
    written = [f"{prefix}/{number}" for number in range(dist.get_world_size())]
    read = [f"{prefix}/read/{number}" for number in range(1, dist.get_world_size())]
    store.set(written[rank], json.dumps(settings))
    if rank == 0:
        _wait(store, written, written)
        found = difference([json.loads(text) for text in store.multi_get(written)])
        store.set(f"{prefix}/found", found)
        _wait(store, read, written)  # the store ends with this process, which may end by an error now
        return found
    _wait(store, [f"{prefix}/found"], written)
    found = store.get(f"{prefix}/found").decode()
    store.set(read[rank - 1], "")
    return found


def _wait(store: Store, keys: list[str], written: Sequence[str]) -> None:
    """Warns after a minute, and raises after as long as operations of a process group take at most by default."""
    try:
        store.wait(keys, WARN_AFTER)
    except dist.DistStoreError:
        missing = [str(rank) for rank, key in enumerate(written) if not store.check([key])]
        text = (
            f"Rank {dist.get_rank()} waits for rank {listed(missing)} to set up its run. A rank without the precision"
            " plugin or strategy of lightning_mp never does: give all ranks the same plugins= and strategy=."
        )
        warnings.warn(text, stacklevel=2)
        try:
            store.wait(keys, GIVE_UP_AFTER)
        except dist.DistStoreError:
            raise MisconfigurationException(text) from None


def _texts(part: object) -> list[str]:
    """The class, and the arguments where it is a part of this package."""
    settings = part.shown_settings() if isinstance(part, SettingsRepr) else ()
    return [type(part).__name__, *(_OF_A_RANK.sub("...", setting) for setting in settings)]


def _parameters_text(model: nn.Module) -> str:
    """How many parameters of which sizes, with a checksum that also has names, types and what is frozen."""
    described, values = [], 0
    for name, parameter in model.named_parameters():
        shape = None if is_lazy(parameter) else tuple(parameter.shape)
        values += 0 if shape is None else parameter.numel()
        described.append(f"{name} {shape} {parameter.dtype} {parameter.requires_grad}")
    trained = sum(parameter.requires_grad for parameter in model.parameters())
    checksum = crc32("\n".join(described).encode())
    return f"{trained} trained of {len(described)} tensors with {values:,} values (checksum {checksum:08x})"
