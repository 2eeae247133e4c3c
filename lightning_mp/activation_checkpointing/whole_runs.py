"""Second runs that must not stop early.

torch ends a second run as soon as the last tensor that backward asks for is saved again. An operation's inputs are
saved before it runs, and one input of ``rrelu`` is the noise, which it fills itself. Where nothing is saved after it,
the second run would stop before the noise is filled, and backward would read uninitialised memory.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_mp.core.nested_tensors import tensors_in

__all__ = ["WholeRuns"]

_FILLS_WHAT_IT_SAVED = "RreluWithNoise"


class WholeRuns:
    """Whether second runs of a module have to run to the end; found out in its first call in training.

    Args:
        module: the module.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._needed = any(isinstance(inner, nn.RReLU) for inner in module.modules())
        self._is_known = self._needed

    def of_call(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """What to run under the checkpoint of one call, in place of the forward."""
        if self._is_known and not self._needed:
            return forward
        return partial(_run, forward, self)

    def learn(self, args: Any, output: Any) -> bool:
        """Looks for such an operation in the graph between inputs and output, once."""
        if not self._is_known:
            self._is_known = self._module.training
            ends = {id(tensor.grad_fn) for tensor in tensors_in(args)}
            self._needed = _has_node(_FILLS_WHAT_IT_SAVED, (tensor.grad_fn for tensor in tensors_in(output)), ends)
        return self._needed


def _run(forward: Callable[..., Any], runs: WholeRuns, *args: Any, **kwargs: Any) -> Any:
    output = forward(*args, **kwargs)
    if runs.learn((args, kwargs), output):
        torch.ones((), requires_grad=True).square()  # saves a tensor: the last that the second run has to come to
    return output


def _has_node(name: str, nodes: Iterable[Any], ends: set[int]) -> bool:
    waiting, seen = [node for node in nodes if node is not None], set(ends)
    while waiting:
        node = waiting.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if node.name().startswith(name):
            return True
        waiting.extend(following for following, _ in node.next_functions if following is not None)
    return False
