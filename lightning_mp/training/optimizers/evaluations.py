"""Which optimizers evaluate the loss themselves."""

import inspect

from torch.optim import LBFGS, Optimizer


def evaluates_its_closure_once(kind: type[Optimizer]) -> bool:
    """Whether an optimizer's ``step`` is known to call its closure once, before anything else, or takes none.

    So do all of torch's but LBFGS, torchao's, lion-pytorch's, and :class:`~lightning_mp.JointOptimizer`. They need no
    closure: it has run already. Any other ``step`` may do anything.

    >>> import torch
    >>> evaluates_its_closure_once(torch.optim.AdamW), evaluates_its_closure_once(torch.optim.LBFGS)
    (True, False)
    """
    package = kind.step.__module__.split(".")
    packages = ["torch", "optim"], ["torchao", "optim"], ["lion_pytorch", "lion_pytorch"]
    known = package[:2] in packages or package[0] == "lightning_mp"
    if known and not issubclass(kind, LBFGS):
        return True
    parameters = inspect.signature(kind.step).parameters
    return "closure" not in parameters and not any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def requires_closure(optimizer: Optimizer) -> bool:
    """Whether an optimizer is known to evaluate the loss itself: LBFGS, and a ``step`` that must be given a closure."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return isinstance(optimizer, LBFGS) or (closure is not None and closure.default is inspect.Parameter.empty)
