"""Names of modules as the model's author knows them, without what wrappers put in."""

import re
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from fnmatch import fnmatchcase

from torch import nn

# Components that wrappers put into the names of modules: torch.compile, FSDP1, checkpoint_wrapper.
_WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
_MOST_NEAR_MISSES = 5


def named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every module with its name, parents first, as the model's author knows it.

    What torch.compile, FSDP1 and checkpoint wrappers put into names is left out, and so are the wrappers themselves. A
    module that is used in several places comes once per name.
    """
    for name, module in model.named_modules(remove_duplicate=False):
        if not any(child in _WRAPPERS for child, _ in module.named_children()):
            yield unwrapped_name(name), module


def unwrapped_name(name: str) -> str:
    """The name of a module or a parameter without what wrappers put into it.

    >>> unwrapped_name("_orig_mod.body._fsdp_wrapped_module.weight")
    'body.weight'
    """
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def is_inside(name: str, outer: str) -> bool:
    """Whether a module or parameter is inside of another module, by their names; "" is the model, which has all inside.

    >>> is_inside("blocks.1.up", "blocks.1"), is_inside("blocks.10", "blocks.1"), is_inside("head", "")
    (True, False, True)
    """
    return name != outer and (not outer or name.startswith(f"{outer}."))


def numbers_as_stars(name: str) -> str:
    """What names that differ only in numbers have in common.

    >>> numbers_as_stars("blocks.10.fc2")
    'blocks.*.fc2'
    """
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def parameter_names(model: nn.Module) -> list[str]:
    """Names of all parameters, in the order of ``model.parameters()``, without what wrappers put into them."""
    names = {
        id(parameter): f"{owner}.{name}".lstrip(".")
        for owner, module in reversed(list(named_modules(model)))
        for name, parameter in module.named_parameters(recurse=False)
    }
    return [names.get(id(parameter), name) for name, parameter in model.named_parameters()]


def near_misses(pattern: str, candidates: Iterable[str]) -> str:
    """A sentence with the candidates that are most like a pattern; empty if none is."""
    pool = list(dict.fromkeys(name for name in candidates if name))
    inside = [name for name in pool if fnmatchcase(name, f"*{pattern}*")]
    close = get_close_matches(pattern, pool, _MOST_NEAR_MISSES, cutoff=0.5)
    # `blocks.*.up` where the names begin with `model.`: compare without the part that a glob leaves open.
    tail = re.split(r"[*?\]]", pattern)[-1].lstrip(".")
    ends = [name for name in pool if tail and name.endswith(tail)]
    found = list(dict.fromkeys([*inside, *close, *ends]))[:_MOST_NEAR_MISSES]
    return f" Near misses: {', '.join(found)}." if found else ""
