"""Optimizers that another one wraps: SAM, Lookahead and their like step a base optimizer over their own groups."""

from torch.optim import Optimizer


def with_wrapped(optimizer: Optimizer) -> list[Optimizer]:
    """An optimizer, and those among its attributes that step the same lists of parameters, however deep.

    Example:
        >>> import torch
        >>> outer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
        >>> outer.base_optimizer = torch.optim.Adam(outer.param_groups)
        >>> outer.other = torch.optim.Adam([torch.nn.Parameter(torch.ones(1))])
        >>> [type(found).__name__ for found in with_wrapped(outer)]
        ['SGD', 'Adam']
    """
    found = [optimizer]
    lists = {id(group["params"]) for group in optimizer.param_groups}
    for outer in found:  # grows meanwhile
        for inner in vars(outer).values():
            if not isinstance(inner, Optimizer) or any(inner is known for known in found):
                continue
            if any(id(group["params"]) in lists for group in inner.param_groups):
                found.append(inner)
    return found
