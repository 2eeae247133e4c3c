"""Exponents of what modules put out, and of the gradients that come back to it, for as long as they are watched."""

from collections.abc import Callable
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from torchmetrics import Metric

from lightning_mp.core.messages import WarnOnce
from lightning_mp.core.nested_tensors import tensors_in, why_unreadable
from lightning_mp.core.uncopied import RunHook
from lightning_mp.diagnostics.underflow.exponents import ExponentTable
from lightning_mp.modules.forward_wrapper import takes_hooks


def leaf_modules(module: nn.Module) -> dict[str, nn.Module]:
    """The modules inside that hold no other modules, by name; metrics and TorchScript modules are left out.

    >>> from torch import nn
    >>> list(leaf_modules(nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU()))))
    ['0', '1.0']
    """
    return {
        name: inner
        for name, inner in module.named_modules()
        if name and not isinstance(inner, Metric) and takes_hooks(inner) and next(inner.children(), None) is None
    }


class ActivationWatch:
    """Forward hooks on leaf modules, and tensor hooks on their outputs.

    A forward that an activation checkpoint runs again inside of a backward is not counted twice: say so by
    ``in_backward``. Hooks do not change values, and the graph only by the tensor hooks.
    """

    def __init__(
        self,
        module: nn.Module,
        activations: ExponentTable | None,
        gradients: ExponentTable | None,
        factor: Callable[[], Tensor | float | None] = lambda: None,
        warn_once: WarnOnce | None = None,
    ) -> None:
        self._module = module
        self._activations = activations
        self._gradients = gradients
        self._factor = factor
        self._warn_once = warn_once or WarnOnce(type(self).__name__)
        self._handles: list[RemovableHandle] = []
        self.in_backward = False

    def attach(self) -> Self:
        """Starts watching."""
        for name, inner in self._module.named_modules():
            if not takes_hooks(inner):
                self._warn_once.warn(f"module {name!r}", "hooks cannot be set on TorchScript modules")
        for name, inner in leaf_modules(self._module).items():
            self._handles.append(inner.register_forward_hook(RunHook(self._after_forward, name)))
        return self

    def detach(self) -> None:
        """Takes the hooks off the modules; gradients that are still to come from seen outputs are not counted."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._activations = self._gradients = None

    def _after_forward(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        for tensor in filter(torch.is_floating_point, tensors_in(output)):
            if reason := why_unreadable(tensor):
                self._warn_once.warn(f"the output of module {name!r}", reason)
                continue
            if self._activations is not None and not self.in_backward:
                self._activations.add(name, tensor)
            if self._gradients is not None and tensor.requires_grad:
                tensor.register_hook(partial(self._on_gradient, name))

    @torch.no_grad()
    def _on_gradient(self, name: str, gradient: Tensor) -> None:
        if reason := why_unreadable(gradient):
            self._warn_once.warn(f"the gradient of the output of module {name!r}", reason)
        elif self._gradients is not None:
            self._gradients.add(name, gradient, self._factor())
