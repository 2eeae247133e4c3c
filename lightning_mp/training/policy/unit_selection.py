"""Which modules of a model become sharding units of FSDP2: by class, by name, by size, or found by themselves."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Literal

from torch import nn

from lightning_mp.ground.core.arguments import whole_number
from lightning_mp.ground.core.messages import listed
from lightning_mp.ground.modules.forward_wrapper import class_forward
from lightning_mp.ground.modules.names import is_inside, named_modules
from lightning_mp.training.policy.module_selection import ModulePattern, as_patterns, select_modules

Shard = ModulePattern | Sequence[ModulePattern] | set[ModulePattern] | int | Literal["auto"]
"""A class, its name, a glob over names, several of these, a least number of parameters, or "auto"."""

_OWNER = "FSDP2Strategy"


def read_shard(shard: Shard) -> tuple[ModulePattern, ...] | int | Literal["auto"]:
    """Checks the argument.

    >>> read_shard("model.blocks.*"), read_shard(1_000_000), read_shard("auto")
    (('model.blocks.*',), 1000000, 'auto')
    """
    if isinstance(shard, str) and shard == "auto":
        return "auto"
    if isinstance(shard, int) and not isinstance(shard, bool) and shard >= 1:
        return shard
    try:
        return as_patterns(shard, _OWNER)  # type: ignore[arg-type]  # it says no to what it cannot read
    except ValueError:
        raise ValueError(
            f"{_OWNER}(shard={shard!r}): it must be a subclass of torch.nn.Module, its name ('Block'), a glob over"
            " names of modules ('model.blocks.*'), a list or set of these, the smallest number of parameters of a"
            " unit, or 'auto'."
        ) from None


def read_resharding(reshard_after_forward: bool | int | None) -> bool | int | None:
    """Checks the argument.

    >>> read_resharding(True), read_resharding(4), read_resharding(None)
    (True, 4, None)
    """
    if reshard_after_forward is None or isinstance(reshard_after_forward, bool):
        return reshard_after_forward
    hint = "True, False and None are allowed as well."
    return whole_number(reshard_after_forward, "reshard_after_forward", _OWNER, unit="ranks", hint=hint)


def unit_names(model: nn.Module, shard: tuple[ModulePattern, ...] | int | Literal["auto"]) -> list[str]:
    """Names of the modules that become units besides the model itself, in the order of the model.

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2))
    >>> unit_names(model, (nn.Linear,)), unit_names(model, 40), unit_names(model, "auto")
    (['0', '1', '2'], ['0', '1'], [])
    """
    if shard == "auto":
        return repeated_blocks(model)
    if isinstance(shard, int):
        return units_by_size(model, shard)
    names = list(select_modules(model, shard, _OWNER))
    refuse_half_tied_units(model, names, "leave this module out of shard, so that the model itself holds both.")
    return names


def refuse_half_tied_units(model: nn.Module, units: Iterable[str], instead: str) -> None:
    """Refuses units that share a parameter with a module outside."""
    names_of = _names_of_parameters(model)
    for name in units:
        outside = _shared_with_outside(name, model, names_of)
        if outside is not None:
            raise ValueError(
                f"{_OWNER}: {outside[0]} and {outside[1]} are one parameter (tied weights), and the unit {name!r} would"
                f" hold only one of them. FSDP2 requires both in one unit: {instead}"
            )


def repeated_blocks(model: nn.Module) -> list[str]:
    """Children of one class in an ``nn.ModuleList`` or ``nn.ModuleDict``, at least two: a transformer's blocks.

    Of lists inside of each other the outer one counts, unless its children are lists themselves, which are never
    called. Blocks that share parameters with the rest are left out.

    >>> repeated_blocks(nn.ModuleDict({"blocks": nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])}))
    ['blocks.0', 'blocks.1']
    """
    names_of = _names_of_parameters(model)
    found: list[str] = []
    for name, module in named_modules(model):
        if not isinstance(module, nn.ModuleList | nn.ModuleDict) or any(is_inside(name, unit) for unit in found):
            continue
        classes = Counter(type(child) for child in module.children() if _is_called(child) and _has_parameters(child))
        for child_name, child in module.named_children():
            full = f"{name}.{child_name}" if name else child_name
            if classes[type(child)] > 1 and _shared_with_outside(full, model, names_of) is None:
                found.append(full)
    return found


def units_by_size(model: nn.Module, minimum_parameters: int) -> list[str]:
    """The smallest modules with a forward that hold at least n parameters, not counting those in units inside of them.

    >>> units_by_size(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8)), 60)
    ['1']
    """
    names_of = _names_of_parameters(model)
    found: list[str] = []
    taken: set[int] = set()
    sizes: dict[str, int] = {}
    for name, module in reversed(list(named_modules(model))):  # children come before their parents
        if not name:
            continue
        parameters = {id(p): p.numel() for p in module.parameters() if id(p) not in taken}
        sizes[name] = sum(parameters.values())
        if (
            sizes[name] >= minimum_parameters
            and _is_called(module)
            and _shared_with_outside(name, model, names_of) is None
        ):
            found.append(name)
            taken |= parameters.keys()
    if not found:
        largest = sorted(sizes, key=lambda name: -sizes[name])
        there_are = listed([f"{name} ({sizes[name]})" for name in largest])
        raise ValueError(
            f"{_OWNER}(shard={minimum_parameters}): no module of {type(model).__name__} has that many parameters. The"
            f" largest: {there_are or 'none'}. Give a smaller number, or 'auto'."
        )
    return found[::-1]


def tied_parameters(model: nn.Module) -> list[list[str]]:
    """Names of each parameter that has more than one."""
    return [names for names in _names_of_parameters(model).values() if len(names) > 1]


def _names_of_parameters(model: nn.Module) -> dict[int, list[str]]:
    """All names of each parameter, by its id."""
    found: dict[int, list[str]] = {}
    for module_name, module in named_modules(model):
        for name, parameter in module.named_parameters(recurse=False):
            found.setdefault(id(parameter), []).append(f"{module_name}.{name}" if module_name else name)
    return found


def _shared_with_outside(unit: str, model: nn.Module, names_of: dict[int, list[str]]) -> tuple[str, str] | None:
    """A parameter inside of a unit and its other name outside; None if there is none.

    A unit may itself be used in several places: it is gathered in each.
    """
    modules = list(named_modules(model))
    itself = dict(modules)[unit]
    places = [name for name, module in modules if module is itself]
    for names in names_of.values():
        inside = [name for name in names if any(name == place or is_inside(name, place) for place in places)]
        if inside and len(inside) < len(names):
            return inside[0], next(name for name in names if name not in inside)
    return None


def _is_called(module: nn.Module) -> bool:
    """Whether it has a forward; lists and other containers have none, and TorchScript modules take no hooks."""
    return class_forward(module) is not None


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None
