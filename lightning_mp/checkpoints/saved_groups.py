"""Parameter groups of a checkpoint that names their parameters, and those of the optimizer that continues from it."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch.optim import Optimizer

from lightning_mp.checkpoints.single_file import refuse_other_groups
from lightning_mp.core.messages import listed

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
    told = [
        f"{listed(sorted(names))} {'are' if len(names) > 1 else 'is'} only in {where}"
        for names, where in ((then - now, "the checkpoint's"), (now - then, "those of configure_optimizers"))
        if names
    ]
    return ", and ".join(told) or "the same parameters are divided among them in another way"


def take_options(optimizer: Optimizer, own: Sequence[Sequence[str]], saved: Sequence[Mapping[str, Any]]) -> None:
    """Gives each group of an optimizer the settings that the checkpoint has for its parameters, and leaves it others.

    Example:
        >>> import torch
        >>> sgd = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
        >>> take_options(sgd, [["weight"]], [{"params": ["weight"], "lr": 0.2}])
        >>> sgd.param_groups[0]["lr"], sgd.param_groups[0]["momentum"]
        (0.2, 0)
    """
    places = matching_groups([group["params"] for group in saved], own)
    for group, names, place in zip(optimizer.param_groups, own, places, strict=True):
        then = saved[place]
        group.update({name: value for name, value in then.items() if name not in _OF_PARAMETERS})
        if "param_names" in then:
            called = dict(zip(then["params"], then["param_names"], strict=True))
            group.setdefault("param_names", [called[name] for name in names])
