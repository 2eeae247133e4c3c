"""A checkpoint of another optimizer is refused before anything of it is taken."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch.optim import Optimizer

# What schedulers add to parameter groups; another scheduler makes no other optimizer.
_OF_SCHEDULERS = ("initial_", "max_", "min_", "base_", "swa_")


def refuse_other_optimizers(
    states: Sequence[Mapping[str, Any]], optimizers: Sequence[Optimizer], *, counts_parameters: bool
) -> None:
    """Compares a checkpoint's optimizer states with the optimizers that are to take them.

    Lightning pairs them by their order and leaves the rest out. torch takes the settings of any other optimizer, and
    fails in the next step; it compares numbers of parameters, when weights and loss scale have been replaced.

    >>> import torch
    >>> weight = torch.nn.Parameter(torch.ones(1))
    >>> adam, sgd = torch.optim.Adam([weight]), torch.optim.SGD([weight], lr=0.1)
    >>> refuse_other_optimizers([sgd.state_dict()], [sgd], counts_parameters=True)
    >>> refuse_other_optimizers([sgd.state_dict()], [adam], counts_parameters=True)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ValueError: Optimizer 0 of the checkpoint is not this Adam: ...
    """
    if len(states) != len(optimizers):
        raise _refusal(f"The checkpoint holds {len(states)} optimizers and the module has {len(optimizers)}.")
    for index, (state, optimizer) in enumerate(zip(states, optimizers, strict=True)):
        difference = _difference(state.get("param_groups") or [], optimizer, counts_parameters=counts_parameters)
        if difference:
            name = type(optimizer).__name__
            raise _refusal(f"Optimizer {index} of the checkpoint is not this {name}: {difference}.")


def _difference(saved: Sequence[Mapping[str, Any]], optimizer: Optimizer, *, counts_parameters: bool) -> str:
    groups = optimizer.param_groups
    if not saved:  # another format, for those who wrote it
        return ""
    if len(saved) != len(groups):
        return f"it has {len(saved)} parameter groups, here are {len(groups)}"
    then, now = ([len(group["params"]) for group in some] for some in (saved, groups))
    if counts_parameters and then != now:
        return f"its groups have {then} parameters, here they have {now}"
    # torch has defaults that no group has; optimizers add to groups in their first step; heavyball has a `__class__`.
    settings = optimizer.defaults.keys() & groups[0].keys()
    lacks = sorted(key for key in settings - saved[0].keys() if not key.startswith("__"))
    others = sorted(key for key in saved[0].keys() - groups[0].keys() if not key.startswith(_OF_SCHEDULERS))
    # Newer versions of torch have more settings, and take older states.
    if lacks and others:
        return f"its settings are {', '.join(others)}, and it has no {', '.join(lacks)}"
    return ""


def _refusal(what: str) -> ValueError:
    return ValueError(
        f"{what} Resume with the optimizers that were saved, or take the weights alone:"
        " MyModule.load_from_checkpoint(path), then fit without ckpt_path."
    )
