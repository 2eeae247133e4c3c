"""The part of the seams that is about one module: what is called in its place, and where it finds its weights."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

#: (owner, private name, why it is needed), beside those of :mod:`lightning_mp.core.private_api`.
PRIVATE_NAMES: tuple[tuple[object, str, str], ...] = (
    (torch.nn.Module, "_compiled_call_impl", "is asked before a module's own call"),
    (torch.nn.Module, "_call_impl", "that call"),
    (torch.nn.Identity(), "_parameters", "where modules find their weights; made by their constructor"),
    (torch.nn.RNNBase, "_init_flat_weights", "makes the list in which recurrent layers find their weights, too"),
    (Tensor, "_backward_hooks", "hooks of parameters, shared with the leaves that DDP reduces"),
    (Tensor, "_post_accumulate_grad_hooks", "hooks that cannot be shared"),
)


class InterceptedCall:
    """Is called in the place of a module's own call, until :meth:`remove`; subclasses define ``__call__``.

    ``Module.__call__`` asks for a compiled call first, and finds this. torch.compile never traces it, and copies and
    pickles of the module leave it out.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module
        below = vars(module).get("_compiled_call_impl")
        #: What ``module.compile()`` has made of the call, if it was called.
        self.compiled_below: Callable[..., Any] | None = getattr(below, "compiled_below", below)
        self._below = below
        #: The call that it replaces.
        self.call: Callable[..., Any] = below if below is not None else module._call_impl
        vars(module)["_compiled_call_impl"] = self

    def remove(self) -> None:
        """Puts back what was there, unless the module was compiled since."""
        if vars(self.module).get("_compiled_call_impl") is self:
            del self.module._compiled_call_impl
            if self._below is not None:
                vars(self.module)["_compiled_call_impl"] = self._below


def holders_of_weights(module: torch.nn.Module) -> list[Any]:
    """The dictionary in which a module finds its own weights, and the list that recurrent layers have beside it."""
    flat = vars(module).get("_flat_weights")
    return [module._parameters, flat] if flat else [module._parameters]


def places_of_weights(module: torch.nn.Module) -> list[tuple[Any, Any, torch.nn.Parameter]]:
    """Where a module finds its own weights: one of :func:`holders_of_weights`, the key in it, and the weight."""
    return [
        (held, key, weight)
        for held in holders_of_weights(module)
        for key, weight in (held.items() if isinstance(held, dict) else enumerate(held))
        if isinstance(weight, torch.nn.Parameter)
    ]


def move_gradients(sources: Sequence[Tensor], targets: Sequence[Tensor], *, hooks: bool = True) -> None:
    """Gives tensors the gradients of others, which have none afterwards, and shares their hooks.

    Raises:
        RuntimeError: if there are hooks of a kind that cannot be shared.
    """
    for source, target in zip(sources, targets, strict=True):
        target.grad, source.grad = source.grad, None
        if hooks:
            target._backward_hooks = source._backward_hooks
            if source._post_accumulate_grad_hooks:
                raise RuntimeError(
                    "MasterWeightsPrecision under DDP: hooks of register_post_accumulate_grad_hook would see gradients"
                    " that are not averaged over ranks. Use on_before_optimizer_step, FSDP2Strategy or"
                    " AutocastPrecision."
                )


def set_grad_dtype(parameter: Tensor, dtype: torch.dtype) -> None:
    """Lets a parameter have gradients of a dtype, and casts the one that it has."""
    gradient, parameter.grad = parameter.grad, None
    parameter.grad_dtype = dtype
    parameter.grad = None if gradient is None else gradient.to(dtype)
