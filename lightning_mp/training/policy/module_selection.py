"""Which modules of a model are meant: by class, by the name of one, or by a glob over names."""

import importlib
from collections import Counter
from collections.abc import Iterable, Sequence

from torch import nn
from torchmetrics import Metric

from lightning_mp.ground.core.messages import listed
from lightning_mp.ground.modules.forward_wrapper import class_forward, takes_hooks
from lightning_mp.ground.modules.names import is_inside, named_modules, near_misses
from lightning_mp.training.policy.rules import LOW, Rule

ModulePattern = type[nn.Module] | str


def as_patterns(modules: ModulePattern | Sequence[ModulePattern], owner: str) -> tuple[ModulePattern, ...]:
    """One pattern or several, checked.

    >>> as_patterns("blocks.*", "ActivationCheckpointing")
    ('blocks.*',)
    """
    patterns = (modules,) if isinstance(modules, str | type) else modules
    readable = isinstance(patterns, Iterable) and not isinstance(patterns, nn.Module)
    found = tuple(patterns) if readable else ()
    if not found or not all(_is_pattern(pattern) for pattern in found):
        raise ValueError(
            f"{owner}(modules={modules!r}): it must be a subclass of torch.nn.Module, its name ('Block' or"
            " 'my_project.model.Block'), a glob over names of modules ('blocks.*'), or a list of these."
        )
    return found


def _is_pattern(pattern: object) -> bool:
    return bool(pattern) if isinstance(pattern, str) else isinstance(pattern, type) and issubclass(pattern, nn.Module)


def select_modules(
    model: nn.Module, patterns: Sequence[ModulePattern], owner: str, *, every: int = 1
) -> dict[str, nn.Module]:
    """The modules that patterns are about, by name, in the order of the model.

    Only what has its own forward in Python can be meant: not the model as a whole, a ``ModuleList``, a metric or a
    TorchScript module. Of modules inside of each other the outer one is taken. A module that is used in several places
    comes once. A string is a glob over names; where it matches none, it is the name of a class, short or in full.
    """
    candidates = _candidates(model)
    matches = [_matches(pattern, candidates) for pattern in patterns]
    for pattern, names in zip(patterns, matches, strict=True):
        if not names:
            raise ValueError(_nothing_fits(owner, pattern, model, candidates))
    wanted = set().union(*matches)
    outer: list[str] = []
    for name in candidates:  # what is inside of a module follows it
        if name in wanted and not (outer and is_inside(name, outer[-1])):
            outer.append(name)
    for pattern, names in zip(patterns, matches, strict=True):
        if not names & set(outer):
            around = sorted({other for other in outer for name in names if is_inside(name, other)})
            raise ValueError(
                f"{owner}: all that {_text(pattern)} matches is inside modules that another pattern matches"
                f" ({listed(around, most=12)}), so it would change nothing. Leave one of the two patterns"
                " out."
            )
    return {name: candidates[name] for name in outer[::every]}


def _candidates(model: nn.Module) -> dict[str, nn.Module]:
    found: dict[str, nn.Module] = {}
    seen: set[int] = set()
    for name, module in named_modules(model):
        if name and class_forward(module) and not isinstance(module, Metric) and id(module) not in seen:
            seen.add(id(module))
            found[name] = module
    return found


def _matches(pattern: ModulePattern, candidates: dict[str, nn.Module]) -> set[str]:
    rules = [Rule("class", pattern, LOW, _text(pattern))]  # the dtype says nothing here
    if isinstance(pattern, str):
        rules.insert(0, Rule("module", pattern, LOW, pattern))
        imported = _imported(pattern)
        if imported is not None:
            rules.append(Rule("class", imported, LOW, pattern))
    for rule in rules:
        found = {name for name, module in candidates.items() if rule.matches(name, module)}
        if found:
            return found
    return set()


def _imported(path: str) -> type[nn.Module] | None:
    """The class at an import path: ``torch.nn.Linear`` is defined elsewhere."""
    module_name, _, name = path.rpartition(".")
    if not module_name or not all(part.isidentifier() for part in path.split(".")):
        return None
    try:
        found = getattr(importlib.import_module(module_name), name, None)
    except ImportError:
        return None
    return found if isinstance(found, type) and issubclass(found, nn.Module) else None


def _text(pattern: ModulePattern) -> str:
    return repr(pattern) if isinstance(pattern, str) else f"the class {pattern.__name__}"


def _nothing_fits(owner: str, pattern: ModulePattern, model: nn.Module, candidates: dict[str, nn.Module]) -> str:
    classes = Counter(type(module).__name__ for module in candidates.values())
    text = f"{owner}: {_text(pattern)} matches no module of {type(model).__name__} that defines forward."
    if not all(map(takes_hooks, model.modules())):
        text += " TorchScript modules cannot be chosen: their forward is compiled."
    wanted = pattern if isinstance(pattern, str) else pattern.__name__
    misses = near_misses(wanted.rpartition(".")[2] or wanted, [*candidates, *classes])
    counts = listed([f"{name} ({number})" for name, number in classes.most_common()], most=12)
    names = listed(list(candidates), most=12)
    return f"{text}{misses} Names that exist: {names or 'none'}. Classes: {counts or 'none'}."
