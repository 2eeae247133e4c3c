"""Folders with the shards of a run, readable by a run with any number of ranks, also before its first step."""

import copy
import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_mp.ground.core.messages import listed
from lightning_mp.training.checkpoints.single_file import (
    load_full_checkpoint,
    refuse_other_groups,
    refuse_other_names,
    refuse_other_number,
)

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

#: What a sharded checkpoint has besides the shards, as Lightning writes it.
REST = "meta.pt"

_WEIGHTS = "state_dict"


def is_sharded_checkpoint(path: Path) -> bool:
    """Whether it is a folder with shards."""
    return path.is_dir() and (path / REST).is_file()


def has_optimizer_state(path: Path) -> bool:
    """Whether a folder holds anything of what the optimizers have gathered; not before the first step, nor of SGD."""
    return any(name.startswith("optimizer_") and ".state." in name for name in saved_names(path))


@contextmanager
def without_synthetic_step(optimizer: Optimizer) -> Iterator[None]:
    """Inside, reading the state of an optimizer that has not stepped yet leaves it unchanged.

    ``torch.distributed.checkpoint.state_dict.get_optimizer_state_dict`` makes a step with zero gradients of an
    optimizer that has neither state nor gradients. Adam would count it, in the checkpoint and in the run that
    continues: pytorch/pytorch#164929, open as of torch 2.13.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    if optimizer.state or not parameters or any(p.grad is not None for p in parameters):
        yield
        return
    smallest = min(parameters, key=lambda p: p.numel())
    smallest.grad = torch.zeros_like(smallest)
    try:
        yield
    finally:
        smallest.grad = None


def load_checkpoint(
    path: Path, model: nn.Module, optimizers: list[Optimizer], *, strict: bool, weights_only: bool | None
) -> dict[str, Any]:
    """Reads a folder or a single file into a sharded model and its optimizers. Returns everything else."""
    if is_sharded_checkpoint(path):
        return load_sharded_checkpoint(path, model, optimizers, strict=strict, weights_only=weights_only)
    if path.is_dir():
        raise ValueError(
            f"{path} is a folder without {REST}, so it is not a checkpoint, or its run was killed while writing it."
            " Give the path of another; latest_checkpoint(folder) finds the last complete one."
        )
    return load_full_checkpoint(path, model, optimizers, strict=strict, weights_only=weights_only)


def load_sharded_checkpoint(
    path: Path, model: nn.Module, optimizers: list[Optimizer], *, strict: bool, weights_only: bool | None
) -> dict[str, Any]:
    """Reads this rank's part of the weights and of the optimizers' state. Returns everything that is neither.

    A parameter that no step was made of when it was written has no state there (all steps were skipped, or it took no
    part in the forward yet). It has none afterwards either, so that its first step is its first.
    """
    # Bring seventy modules of torch along, so not at the top.
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    from lightning_mp.training.checkpoints.checked_folder import CheckedReader, load_shards

    metadata = CheckedReader(path).read_metadata()
    saved = {where[1] for where in metadata.planner_data.values() if where[0] == _WEIGHTS}
    if not saved:
        raise ValueError(
            f"The folder {path} has no 'state_dict' as written by FSDP2Strategy and ModelParallelStrategy. If"
            " FSDPStrategy wrote it, convert it to a single file, which can be loaded:"
            f" python -m lightning.pytorch.utilities.consolidate_checkpoint {path}"
        )
    weights = get_model_state_dict(model)
    if strict:
        missing = [name for name in weights if name not in saved]
        refuse_other_names(type(model).__name__, missing=missing, unexpected=sorted(saved - weights.keys()))
    _refuse_other_optimizers(path, metadata, optimizers)
    weights = {name: value for name, value in weights.items() if name in saved}
    load_shards({_WEIGHTS: weights}, path, weights_only=weights_only)
    model.load_state_dict(weights, strict=strict)
    for number, optimizer in enumerate(optimizers):
        _load_optimizer(path, f"optimizer_{number}", model, optimizer, metadata, weights_only)
    rest: dict[str, Any] = torch.load(path / REST, map_location="cpu", weights_only=weights_only)
    _load_former_masters(path, rest, model, weights, metadata, weights_only)
    return rest


def _load_former_masters(
    path: Path,
    rest: Mapping[str, Any],
    model: nn.Module,
    weights: Mapping[str, Any],
    metadata: "Metadata",
    weights_only: bool | None,
) -> None:
    """Weights of older checkpoints are rounded; the numbers that were rounded lie with the optimizers."""
    from lightning_mp.training.checkpoints.checked_folder import load_shards
    from lightning_mp.training.checkpoints.former_masters import MASTER_KEY, have_been_trained, say_what_was_read

    if not have_been_trained(rest):
        return
    places = [place for place in metadata.planner_data.values() if place[-1] == MASTER_KEY and place[2] in weights]
    masters: dict[str, Any] = {}
    for optimizer, _, name, _ in places:
        room = torch.empty_like(weights[name], dtype=torch.float32)
        masters.setdefault(optimizer, {}).setdefault("state", {})[name] = {MASTER_KEY: room}
    load_shards(masters, path, weights_only=weights_only)
    found = {name: entry[MASTER_KEY] for state in masters.values() for name, entry in state["state"].items()}
    model.load_state_dict(found, strict=False)
    say_what_was_read(len(found))


def saved_names(path: Path) -> set[str]:
    """What a folder with shards holds."""
    from lightning_mp.training.checkpoints.checked_folder import CheckedReader

    return set(CheckedReader(path).read_metadata().state_dict_metadata)


def _refuse_other_optimizers(path: Path, metadata: "Metadata", optimizers: Sequence[Optimizer]) -> None:
    held = {place[0] for place in metadata.planner_data.values() if str(place[0]).startswith("optimizer_")}
    if optimizers and not held:
        raise ValueError(
            f"The checkpoint {path} contains no state of optimizers, and configure_optimizers made {len(optimizers)}."
            " It was written with save_weights_only=True or by a model without optimizers. Load its weights only."
        )
    if optimizers:
        refuse_other_number(len(held), len(optimizers), path)


def _load_optimizer(
    path: Path, key: str, model: nn.Module, optimizer: Optimizer, metadata: "Metadata", weights_only: bool | None
) -> None:
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    from lightning_mp.training.checkpoints.checked_folder import load_shards, read_values

    optimizer.zero_grad()
    with without_synthetic_step(optimizer):
        described: dict[str, Any] = dict(get_optimizer_state_dict(model, optimizer))
    own = [list(group["params"]) for group in described["param_groups"]]
    place = [key, "param_groups"]
    read = read_values(path, metadata, lambda where: list(where[:2]) == place, weights_only=weights_only)
    take_options(optimizer, own, read[key]["param_groups"])
    kept: dict[str, set[str]] = {}  # what the folder has of each parameter's state
    for where in metadata.planner_data.values():
        if list(where[:2]) == [key, "state"] and len(where) > 3:
            kept.setdefault(where[2], set()).add(where[3])
    named = zip(itertools.chain(*own), (p for group in optimizer.param_groups for p in group["params"]), strict=True)
    frozen = [p for name, p in named if not p.requires_grad and name in kept]
    # Here the step that torch makes up is wanted: by it the optimizer says how its tensors are sharded. torch leaves it
    # out where there are gradients, also of a run before. With the checkpoint's options, as momentum makes tensors.
    with _settings_kept(optimizer), _trained(frozen):
        described = dict(get_optimizer_state_dict(model, optimizer))
    whole: dict[str, Any] = described["state"]
    _refuse_another_optimizer(path, optimizer, whole, kept)
    # Of the state by parameter what is in the checkpoint; parameters of which nothing is there are left out.
    state: dict[str, Any] = {
        "state": {
            parameter: {name: value for name, value in values.items() if name in kept[parameter]}
            for parameter, values in whole.items()
            if values.keys() & kept.get(parameter, ())
        }
    }
    load_shards({key: state}, path, weights_only=weights_only)
    groups = [{**group, "params": names} for group, names in zip(optimizer.param_groups, own, strict=True)]
    optimizer.load_state_dict({**state, "param_groups": groups})


@contextmanager
def _settings_kept(optimizer: Optimizer) -> Iterator[None]:
    """Prepares for a made-up step, and undoes what it counts in the groups, as schedule-free optimizers do."""
    settings = [{name: copy.copy(v) for name, v in g.items() if name != "params"} for g in optimizer.param_groups]
    if not any(optimizer.state.values()):
        train = getattr(
            type(optimizer), "train", None
        )  # not what masters put in its place, which writes to the weights
        if callable(train):
            train(optimizer)  # else a schedule-free one refuses to step
        optimizer.state.clear()  # it may hold an empty state of each parameter now, at which torch makes up no step
    yield
    for group, before in zip(optimizer.param_groups, settings, strict=True):
        group.update(before)


@contextmanager
def _trained(parameters: list[nn.Parameter]) -> Iterator[None]:
    """Inside, they are not frozen."""
    for parameter in parameters:
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(False)


def _refuse_another_optimizer(
    path: Path, optimizer: Optimizer, state: Mapping[str, Mapping[str, Any]], kept: Mapping[str, set[str]]
) -> None:
    """One that keeps other things for a parameter than the folder has: both would be left out without a word."""
    found = kept.keys() & state.keys()
    others = [name for name in found if kept[name] - state[name].keys() and state[name].keys() - kept[name]]
    if others:
        first = min(others)
        saved_keys, own_keys = (listed(sorted(keys)) for keys in (kept[first], state[first]))
        raise ValueError(
            f"The checkpoint {path} was saved by another optimizer: for {first} it has {saved_keys}, and"
            f" {type(optimizer).__name__} keeps {own_keys}. Resume with the optimizers that saved it, or load its"
            " weights only."
        )


#: No settings: they are in the order in which the optimizer itself has its parameters.
_OF_PARAMETERS = ("params", "param_names")


def matching_groups(saved: Sequence[Sequence[str]], own: Sequence[Sequence[str]]) -> list[int]:
    """For each of the optimizer's groups the place of the saved one with the same parameters, in any order.

    Example:
        >>> matching_groups([["a", "b"], ["c"]], [["c"], ["b", "a"]])
        [1, 0]
    """
    left = [(set(names), place) for place, names in enumerate(saved)]
    places = []
    for names in own:
        found = next((entry for entry in left if entry[0] == set(names)), None)
        if found is not None:
            left.remove(found)
            places.append(found[1])
    if left or len(places) < len(own):
        sizes = ([len(names) for names in groups] for groups in (saved, own))
        refuse_other_groups(*sizes, difference=_difference(saved, own))
    return places


def _difference(saved: Sequence[Sequence[str]], own: Sequence[Sequence[str]]) -> str:
    then, now = ({name for names in groups for name in names} for groups in (saved, own))
    differences = [
        f"{listed(sorted(names))} {'are' if len(names) > 1 else 'is'} only in {where}"
        for names, where in ((then - now, "the checkpoint's"), (now - then, "those of configure_optimizers"))
        if names
    ]
    return ", and ".join(differences) or "the same parameters are divided among them in another way"


def take_options(optimizer: Optimizer, own: Sequence[Sequence[str]], saved: Sequence[Mapping[str, Any]]) -> None:
    """Gives each group of an optimizer the settings that the checkpoint has for its parameters, and keeps others."""
    places = matching_groups([group["params"] for group in saved], own)
    for group, names, place in zip(optimizer.param_groups, own, places, strict=True):
        then = saved[place]
        group.update({name: value for name, value in then.items() if name not in _OF_PARAMETERS})
        if "param_names" in then:
            called = dict(zip(then["params"], then["param_names"], strict=True))
            group.setdefault("param_names", [called[name] for name in names])
