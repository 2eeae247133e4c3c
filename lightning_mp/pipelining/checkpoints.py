"""Checkpoints of a pipeline: what one process would write, gathered from the stages, and each stage's part of it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_mp.ground.core.messages import listed
from lightning_mp.ground.core.ranks import all_gathered
from lightning_mp.ground.modules.stage_placeholder import StageSplit
from lightning_mp.training.checkpoints.single_file import refuse_other_groups, refuse_other_names


@dataclass(frozen=True)
class OptimizerParts:
    """Maps the parameters of an optimizer over the whole model to those of this stage's optimizer."""

    groups: tuple[tuple[int, ...], ...]  # for each parameter group of the whole, the numbers of its parameters
    names: tuple[str, ...]  # of all its parameters, in order
    numbers: tuple[int, ...]  # for each parameter of this stage's optimizer, in order, its number in the whole one
    # by id, every parameter of the whole model; groups that are added during the run may have any of them
    name_of: Mapping[int, str] = field(default_factory=dict)

    def own(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Of a whole optimizer's state what this stage holds."""
        saved = [tuple(group["params"]) for group in state["param_groups"]]
        refuse_other_groups([len(group) for group in saved], [len(group) for group in self.groups])
        # By place, as torch does: an optimizer's keys may be names, as FSDP1 writes them.
        key_of = dict(zip((n for group in self.groups for n in group), (k for g in saved for k in g), strict=True))
        own_place = {number: place for place, number in enumerate(self.numbers)}
        values = {
            place: state["state"][key_of[number]]
            for number, place in own_place.items()
            if key_of[number] in state["state"]
        }
        groups = [
            {**group, "params": [own_place[number] for number in numbers if number in own_place]}
            for group, numbers in zip(state["param_groups"], self.groups, strict=True)
        ]
        return {**state, "state": values, "param_groups": groups}

    def whole(self, state: Mapping[str, Any], ranks: Sequence[int], device: torch.device) -> dict[str, Any]:
        """On rank 0 the state of the whole optimizer, from those of all stages; empty elsewhere."""
        values = {
            f"{self.numbers[place]}/{name}": value for place, of in state["state"].items() for name, value in of.items()
        }
        gathered = gather_on_rank_zero(values, ranks, device)
        if dist.get_rank() != 0:
            return {}
        merged: dict[int, dict[str, Any]] = {}
        for key, value in gathered.items():
            number, _, name = key.partition("/")
            merged.setdefault(int(number), {})[name] = value
        groups = [
            {**group, "params": list(numbers)}
            for group, numbers in zip(state["param_groups"], self.groups, strict=True)
        ]
        return {**state, "state": dict(sorted(merged.items())), "param_groups": groups}


def keep_own_parameters(optimizer: Optimizer, names: Mapping[str, nn.Parameter], own: set[int]) -> OptimizerParts:
    """Takes the parameters of other stages out of an optimizer."""
    counter = 0
    groups, numbers = [], []
    name_of = {id(parameter): name for name, parameter in names.items()}
    every = [p for group in optimizer.param_groups for p in group["params"]]
    strangers = [f"{type(optimizer).__name__}: {tuple(p.shape)}" for p in every if id(p) not in name_of]
    if strangers:
        raise MisconfigurationException(
            f"PipelineParallelStrategy: configure_optimizers gave parameters that are not part of the LightningModule"
            f" to {listed(strangers)}, so no stage would train them. Put each into a"
            " module, and that module into the layer that uses it: PipelineLayer(function, *modules)."
        )
    whole = [name_of[id(p)] for p in every]
    for group in optimizer.param_groups:
        groups.append(tuple(range(counter, counter + len(group["params"]))))
        numbers += [counter + place for place, parameter in enumerate(group["params"]) if id(parameter) in own]
        counter += len(group["params"])
        for parameter in group["params"]:
            if id(parameter) not in own:
                optimizer.state.pop(parameter, None)
        # In place: optimizers may keep the list.
        group["params"][:] = [parameter for parameter in group["params"] if id(parameter) in own]
    return OptimizerParts(tuple(groups), tuple(whole), tuple(numbers), name_of)


def gather_on_rank_zero(own: Mapping[str, Any], ranks: Sequence[int], device: torch.device) -> dict[str, Any]:
    """On rank 0, all named values of one rank per stage, tensors on the CPU; empty elsewhere.

    Call it on all ranks. Tensors are sent one by one, so that rank 0 holds no more than one on its device besides its
    own. If several stages have a name, the first one's value is used.
    """
    rank = dist.get_rank()
    plain = {name: value for name, value in own.items() if not isinstance(value, Tensor)}
    tensors = {name: (value.shape, value.dtype) for name, value in own.items() if isinstance(value, Tensor)}
    of_ranks = all_gathered((plain, tensors))
    gathered: dict[str, Any] = {}
    if rank == 0:
        gathered = {name: value.cpu() if isinstance(value, Tensor) else value for name, value in own.items()}
    known = set(own) if rank == 0 else set(of_ranks[0][0]) | set(of_ranks[0][1])
    for sender in ranks[1:]:
        plain, tensors = of_ranks[sender]
        if rank == 0:
            gathered.update({name: value for name, value in plain.items() if name not in known})
        for name, (shape, dtype) in tensors.items():
            if name in known:
                continue
            if rank == sender:
                dist.send(own[name].detach().to(device).contiguous(), dst=0)
            elif rank == 0:
                received = torch.empty(shape, dtype=dtype, device=device)
                dist.recv(received, src=sender)
                gathered[name] = received.cpu()
        known |= set(plain) | set(tensors)
    return gathered


def own_state(whole: Mapping[str, Any], module: nn.Module, split: StageSplit, *, strict: bool) -> dict[str, Any]:
    """Of a whole model's state what this stage holds."""
    if strict:
        known = set(split.state_names)
        refuse_other_names(
            type(module).__name__,
            missing=[name for name in split.state_names if name not in whole],
            unexpected=[name for name in whole if name not in known],
        )
    own = set(module.state_dict())
    return {name: value for name, value in whole.items() if name in own}


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
    """The groups of an optimizer over the whole model, with those that have been added since.

    Call it on all ranks. A stage without a parameter of a new group gets an empty one, so that all have as many.
    """
    owner = type(optimizer).__name__
    added = optimizer.param_groups[len(parts.groups) :]
    mine = [_Added([parts.name_of.get(id(p), "") for p in group["params"]], _options(group)) for group in added]
    of_ranks = all_gathered((_what_is_wrong(parts, optimizer), mine))
    wrong = next((problem for problem, _ in of_ranks if problem), "")
    if wrong:
        raise MisconfigurationException(f"PipelineParallelStrategy: {wrong}.{_CURE}")
    groups_of_ranks = [groups for _, groups in of_ranks]
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
