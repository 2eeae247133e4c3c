"""Splits a model into stages: which parameters each stage has, and what the others know about it."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from lightning_mp.ground.core.messages import listed
from lightning_mp.ground.modules.names import named_modules
from lightning_mp.ground.modules.stage_placeholder import StageSplit, detach_stages, release
from lightning_mp.pipelining.layers import Layer
from lightning_mp.training.policy.unit_selection import tied_parameters


def parameters_of_layers(module: nn.Module, layers: Sequence[Layer]) -> list[int]:
    """Number of parameters of each layer; one that several layers share counts in each.

    >>> from lightning_mp.pipelining.layers import read_layers
    >>> class Model(nn.Module):
    ...     pipeline_layers = ("up", "down")
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.up, self.down = nn.Linear(2, 4), nn.Linear(4, 1)
    >>> model = Model()
    >>> parameters_of_layers(model, read_layers(model))
    [12, 5]
    """
    modules = dict(named_modules(module))
    return [
        sum({id(p): p.numel() for name in layer.module_names for p in modules[name].parameters()}.values())
        for layer in layers
    ]


def first_layers(
    module: nn.Module, layers: Sequence[Layer], stages: int, split_points: Sequence[str] | None
) -> tuple[int, ...]:
    """Index of the first layer of each stage: as named, or so that no stage has many more parameters than others."""
    if split_points is not None:
        return tuple(named_split_points([layer.name for layer in layers], split_points, stages))
    return tuple(balanced_split_points(parameters_of_layers(module, layers), stages))


def split_model(
    module: nn.Module,
    layers: Sequence[Layer],
    splits: Sequence[int],
    stage: int,
    *,
    materialize: Callable[[Sequence[nn.Module]], None] = lambda _: None,
) -> StageSplit:
    """Removes the layers of other stages from a whole model. Modules outside of the layers stay on every stage."""
    stages_of: dict[str, set[int]] = {}
    for index, layer in enumerate(layers):
        own = max(number for number, first in enumerate(splits) if first <= index)
        for name in layer.module_names:
            stages_of.setdefault(name, set()).add(own)
    absent = {name: sorted(stages) for name, stages in stages_of.items() if stage not in stages}
    stages_of_parameters = _stages_of_parameters(module, stages_of)
    split = StageSplit(
        stage=stage,
        first_layers=tuple(splits),
        layer_names=tuple(layer.name for layer in layers),
        layer_parameters=tuple(parameters_of_layers(module, layers)),
        state_names=tuple(module.state_dict()),
        parameter_names=tuple(name for name, _ in module.named_parameters()),
        stages_of_parameters=stages_of_parameters,
        names_of={names[0]: tuple(names) for names in tied_parameters(module) if names[0] in stages_of_parameters},
    )
    _materialize_and_release(module, stages_of, absent, materialize)
    detach_stages(module, absent, split)
    return split


def _materialize_and_release(
    module: nn.Module,
    in_layers: Iterable[str],
    absent: Collection[str],
    materialize: Callable[[Sequence[nn.Module]], None],
) -> None:
    modules = dict(named_modules(module))
    done: set[int] = set()
    for group in _sharing(modules, in_layers):
        parts = [part for name in group for part in modules[name].modules()]
        materialize(parts)
        done.update(id(part) for part in parts)
        kept = {id(t) for name in group if name not in absent for t in _tensors(modules[name])}
        for name in group:
            if name in absent:
                release(modules[name], kept)
    materialize([part for part in modules.values() if id(part) not in done])


def _sharing(modules: Mapping[str, nn.Module], names: Iterable[str]) -> list[list[str]]:
    """Modules that share a parameter together, all others by themselves, in order."""
    groups: list[tuple[list[str], set[int]]] = []
    for name in names:
        own = {id(tensor) for tensor in _tensors(modules[name])}
        joined = [group for group in groups if group[1] & own]
        groups = [group for group in groups if not group[1] & own]
        groups.append(([n for group in joined for n in group[0]] + [name], own.union(*(group[1] for group in joined))))
    return [group for group, _ in groups]


def _tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def _stages_of_parameters(module: nn.Module, stages_of: dict[str, set[int]]) -> dict[str, tuple[int, ...]]:
    """Stages of each parameter that several hold."""
    modules = dict(named_modules(module))
    of_parameter: dict[int, set[int]] = {}
    for name, stages in stages_of.items():
        for parameter in modules[name].parameters():
            of_parameter.setdefault(id(parameter), set()).update(stages)
    every = list(module.named_parameters(remove_duplicate=False))
    homeless = [name for name, parameter in every if id(parameter) not in of_parameter]
    if homeless:
        raise MisconfigurationException(
            f"{type(module).__name__}.pipeline_layers: {listed(homeless)} {'are' if len(homeless) > 1 else 'is'} in no"
            " layer, so no stage would train it. Put its module into the layer that uses it, PipelineLayer(function,"
            " *modules), or into the last layer if the loss uses it."
        )
    first_names = module.named_parameters()
    return {name: tuple(sorted(of_parameter[id(p)])) for name, p in first_names if len(of_parameter[id(p)]) > 1}


_OWNER = "PipelineParallelStrategy"


def balanced_split_points(costs: Sequence[float], stages: int) -> list[int]:
    r"""First layers of the stages, so that the most costly stage is as cheap as can be.

    .. math:: \min_{0 = c_0 < c_1 < \dots < c_s = n} \; \max_j \; \sum_{c_j \le i < c_{j+1}} \text{cost}_i

    by dynamic programming over the first layers and stages, in :math:`O(n^2 s)`. All stages wait for the slowest one.

    >>> balanced_split_points([4, 1, 1, 1, 1, 4], 3)
    [0, 1, 5]
    """
    if len(costs) < stages:
        raise ValueError(
            f"{_OWNER}: {len(costs)} layers cannot be split into {stages} stages. Use fewer stages, or return more and"
            " smaller layers from pipeline_layers."
        )
    until = [0.0]
    for cost in costs:
        until.append(until[-1] + cost)
    best = [(until[end], [0]) for end in range(len(costs) + 1)]
    for stage in range(1, stages):
        longer = list(best)
        for end in range(stage + 1, len(costs) + 1):
            longer[end] = min(
                (max(best[split][0], until[end] - until[split]), [*best[split][1], split])
                for split in range(stage, end)
            )
        best = longer
    return best[len(costs)][1]


def named_split_points(layer_names: Sequence[str], split_points: Sequence[str], stages: int) -> list[int]:
    """First layers of the stages, as they are named.

    >>> named_split_points(["embed", "blocks.0", "blocks.1", "head"], ["blocks.1"], 2)
    [0, 2]
    """
    if len(split_points) != stages - 1:
        raise ValueError(
            f"{_OWNER}(split_points={list(split_points)!r}): {stages} stages need {stages - 1} split points,"
            f" got {len(split_points)}. Name the layer that begins each stage but the first."
        )
    splits = [0]
    for name in split_points:
        found = [index for index, layer in enumerate(layer_names) if fnmatchcase(layer, name)]
        if len(found) != 1 or found[0] <= splits[-1]:
            raise ValueError(
                f"{_OWNER}(split_points=...): {name!r} "
                + (
                    f"fits {len(found)} layers, and it must be one"
                    if len(found) != 1
                    else "does not come after the split before it, or is the first layer of all"
                )
                + f". Layers in order: {listed(layer_names, most=12)}."
            )
        splits.append(found[0])
    return splits
