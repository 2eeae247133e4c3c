"""A module and its batch with other tensors in place of the original ones, to run a step without data or memory."""

import copyreg
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from itertools import chain
from typing import Any

import torch
from lightning.fabric.utilities.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from lightning_mp.ground.core.nested_tensors import tensors_in


def module_with(module: nn.Module, stand_in: Callable[[Tensor], Tensor]) -> nn.Module:
    """A copy of a module that holds stand-ins; parameters remain parameters, and tied ones remain tied.

    Values are not copied: each tensor's stand-in is created before the copy.

    >>> copy = module_with(nn.Linear(3, 2), lambda tensor: tensor.detach().to("meta"))
    >>> copy.weight.device.type, type(copy.weight).__name__
    ('meta', 'Parameter')
    """
    memo: dict[int, Any] = {}
    for part in module.modules():
        own = chain(part.parameters(recurse=False), part.buffers(recurse=False), tensors_in(list(vars(part).values())))
        for tensor in own:
            if id(tensor) in memo:
                continue
            if isinstance(tensor, nn.Parameter):
                memo[id(tensor)] = nn.Parameter(stand_in(tensor), requires_grad=tensor.requires_grad)
            elif isinstance(tensor, Tensor):
                memo[id(tensor)] = stand_in(tensor)
    with _StandInCopies(stand_in), _seeded_generators():
        return deepcopy(module, memo)


@contextmanager
def _seeded_generators() -> Iterator[None]:
    """Copies a ``torch.Generator`` by its seed, for the CPU: a stand-in of its state would not be a state."""
    before = copyreg.dispatch_table.get(torch.Generator)
    copyreg.pickle(torch.Generator, lambda generator: (_generator, (generator.initial_seed(),)))
    try:
        yield
    finally:
        del copyreg.dispatch_table[torch.Generator]
        if before is not None:
            copyreg.dispatch_table[torch.Generator] = before


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class _StandInCopies(TorchFunctionMode):
    """Also copies tensors outside of modules as stand-ins: a network in saved hyperparameters, for instance."""

    def __init__(self, stand_in: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._stand_in = stand_in

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__deepcopy__:
            tensor, memo = args
            return memo.setdefault(id(tensor), self._stand_in(tensor).requires_grad_(tensor.requires_grad))
        if func is Tensor.clone:  # how a parameter copies itself
            return self._stand_in(args[0])
        return func(*args, **(kwargs or {}))


def batch_with(batch: Any, stand_in: Callable[[Tensor], Tensor]) -> Any:
    """A batch with a stand-in for each of its tensors, found in the way in which Lightning moves a batch to a device.

    The stand-in of a tensor that needs a gradient needs one, too.

    >>> import torch
    >>> batch_with({"x": torch.zeros(2), "names": ("a",)}, lambda tensor: tensor + 1)
    {'x': tensor([1., 1.]), 'names': ('a',)}
    """
    return apply_to_collection(batch, Tensor, lambda t: stand_in(t).requires_grad_(t.requires_grad))


def run_forward(module: nn.Module, batch: Any) -> Any:
    """The module's result for a batch, or its attribute ``loss``.

    A tensor is passed as it is, a list or tuple as positional and a mapping as keyword arguments.
    """
    if isinstance(batch, Mapping):
        output = module(**batch)
    elif isinstance(batch, Sequence):
        output = module(*batch)
    else:
        output = module(batch)
    loss = getattr(output, "loss", None)
    return output if loss is None else loss


def sum_of_outputs(output: Any) -> Tensor | None:
    """One number that depends on all outputs that have a gradient; None if there are none."""
    leaves = [leaf for leaf in tensors_in(output) if leaf.requires_grad]
    if len(leaves) == 1 and leaves[0].ndim == 0:
        return leaves[0]
    sums = [leaf if leaf.ndim == 0 else leaf.sum() for leaf in leaves]
    total: Tensor | None = None
    for value in sums:
        total = value.float() if total is None else total + value.float()
    return total
