"""Parameter groups that are added to an optimizer during the run, each stage's part of which becomes one group."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.optim import Optimizer

from lightning_mp.core.messages import listed
from lightning_mp.pipelining.checkpoints import OptimizerParts

_CURE = (
    " Make all groups in configure_optimizers, which sees the whole model, and freeze their parameters until they are"
    " to be trained (requires_grad_(False))."
)


class _Added(NamedTuple):
    """A group as one rank has it."""

    names: list[str]
    options: dict[str, Any]


def with_added_groups(
    parts: OptimizerParts, optimizer: Optimizer, own: Iterable[nn.Parameter], order: Sequence[str]
) -> OptimizerParts:
    """What is known of the groups of an optimizer over the whole model, with those that have been added since.

    All ranks have to call it. A stage that has no parameter of a new group gets an empty one, so that all have as many.
    """
    owner = type(optimizer).__name__
    added = optimizer.param_groups[len(parts.groups) :]
    told: list[tuple[str, list[_Added]]] = [("", [])] * dist.get_world_size()
    mine = [_Added([parts.name_of.get(id(p), "") for p in group["params"]], _options(group)) for group in added]
    dist.all_gather_object(told, (_what_is_wrong(parts, optimizer), mine))
    wrong = next((problem for problem, _ in told if problem), "")
    if wrong:
        raise MisconfigurationException(f"PipelineParallelStrategy: {wrong}.{_CURE}")
    groups_of_ranks = [groups for _, groups in told]
    counts = {len(groups) for groups in groups_of_ranks}
    if len(counts - {0}) > 1:
        raise MisconfigurationException(
            f"PipelineParallelStrategy: {' or '.join(map(str, sorted(counts)))} parameter groups were added to {owner},"
            f" depending on the stage, and it is not known which of them belong together.{_CURE}"
        )
    held = {id(p) for p in own}
    with_groups = [groups for groups in groups_of_ranks if groups]
    for number, of_ranks in enumerate(zip(*with_groups, strict=True)):
        if number == len(added):
            optimizer.add_param_group({**of_ranks[0].options, "params": []})
            added = optimizer.param_groups[len(parts.groups) :]
        # In place: optimizers may keep the list.
        params = added[number]["params"]
        params[:] = [p for p in params if id(p) in held]
        names = _in_order([one.names for one in of_ranks], order)
        first = len(parts.names)
        numbers = {name: first + place for place, name in enumerate(names)}
        parts = replace(
            parts,
            groups=(*parts.groups, tuple(numbers.values())),
            names=(*parts.names, *names),
            numbers=(*parts.numbers, *(numbers[parts.name_of[id(p)]] for p in params)),
        )
    return parts


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in ("params", "param_names")}


def _what_is_wrong(parts: OptimizerParts, optimizer: Optimizer) -> str:
    owner, known = type(optimizer).__name__, len(parts.groups)
    own = set(parts.numbers)
    expected = [[parts.names[number] for number in group if number in own] for group in parts.groups]
    found = [[parts.name_of.get(id(p)) for p in group["params"]] for group in optimizer.param_groups]
    changed = [number for number, names in enumerate(expected) if found[number : number + 1] != [names]]
    if changed:
        return f"parameter group {changed[0]} of {owner} has got, or lost, parameters during the run"
    strangers = [
        f"{owner}: {tuple(p.shape)}"
        for group in optimizer.param_groups[known:]
        for p in group["params"]
        if id(p) not in parts.name_of
    ]
    if strangers:
        return f"parameters that are not part of the LightningModule were added to {listed(strangers)}"
    return ""


def _in_order(names_of_ranks: Sequence[Sequence[str]], order: Sequence[str]) -> list[str]:
    """All names: as on a rank that was given all of them, else as in the model."""
    every = {name for names in names_of_ranks for name in names}
    whole = next((names for names in names_of_ranks if len(names) == len(every)), None)
    if whole is not None:
        return list(whole)
    places = {name: place for place, name in enumerate(order)}
    return sorted(every, key=lambda name: places[name])
