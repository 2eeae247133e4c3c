"""What one forward and backward hold, while they are watched: exponents of activations, and gradients in 16 bit."""

from collections.abc import Callable
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle
from torchmetrics import Metric

from lightning_mp.ground.core import private_dispatch_api
from lightning_mp.ground.core.devices import sent_to
from lightning_mp.ground.core.half_dtypes import HALF_DTYPES
from lightning_mp.ground.core.messages import WarnOnce
from lightning_mp.ground.core.nested_tensors import tensors_in, why_unreadable
from lightning_mp.ground.core.uncopied import RunHook
from lightning_mp.ground.modules.forward_wrapper import takes_hooks
from lightning_mp.monitors.diagnostics.underflow.exponents import ExponentTable
from lightning_mp.training.gradients import gradient_ops


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

    A forward that an activation checkpoint runs again in backward is not counted twice. Hooks do not change values, and
    the graph only by the tensor hooks.
    """

    def __init__(
        self,
        module: nn.Module,
        activations: ExponentTable | None,
        gradients: ExponentTable | None,
        factor: Callable[[], Tensor | float | None],
        warn_once: WarnOnce,
    ) -> None:
        self._module = module
        self._activations = activations
        self._gradients = gradients
        self._factor = factor
        self._warn_once = warn_once
        self._handles: list[RemovableHandle] = []

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
            if self._activations is not None and private_dispatch_api.running_backward() is None:
                self._activations.add(name, tensor)
            if self._gradients is not None and tensor.requires_grad:
                tensor.register_hook(partial(self._on_gradient, name))

    @torch.no_grad()
    def _on_gradient(self, name: str, gradient: Tensor) -> None:
        if reason := why_unreadable(gradient):
            self._warn_once.warn(f"the gradient of the output of module {name!r}", reason)
        elif self._gradients is not None:
            self._gradients.add(name, gradient, self._factor())


#: Nodes that only change the shape of a parameter: what uses the parameter comes after them.
_SHAPE_NODES = frozenset(
    {
        *("View", "UnsafeView", "Reshape", "ReshapeAlias", "Alias", "AsStrided", "Squeeze", "Unsqueeze", "Expand"),
        *("T", "Transpose", "Permute", "Slice", "Select", "Narrow", "Split", "Unbind", "Chunk"),
    }
)


class BackwardWatch:
    """Hooks on the autograd graph of a loss for its backward, with public means of torch only.

    Under autocast an fp32 weight of a matmul is cast, and its gradient exists in 16 bit before it is cast back. A
    parameter that is used as it is (an embedding, a positional embedding that is added to fp32 values) gets its
    gradient in fp32: no loss scale makes that overflow. The affine parameters of a norm do so, too: its backward sums
    them in fp32.

    What runs in a reentrant activation checkpoint or in compiled code makes its nodes later and is not seen; the
    parameters in there are not called fp32. Several backwards (micro-batches, losses) may be watched one by one.
    """

    def __init__(self, device: torch.device, warn_once: WarnOnce) -> None:
        self._device = device
        self._warn_once = warn_once
        #: Largest magnitude of all 16-bit gradients, of shape [], inf or nan if one is not finite; None without any.
        self.largest: Tensor | None = None
        self._kept: set[int] = set()
        self._passed: set[int] = set()
        self._clear()

    def _clear(self) -> None:
        self._handles: list[RemovableHandle] = []
        self._users: dict[Node, list[Node]] = {}
        self._noted: list[Tensor] = []
        self._low_nodes: set[Node] = set()

    def attach(self, loss: Tensor) -> Self:
        """Puts hooks on all nodes that the loss was computed by."""
        if loss.grad_fn is None:
            return self
        waiting, self._users[loss.grad_fn] = [loss.grad_fn], []
        while waiting:
            node = waiting.pop()
            self._handles.append(node.register_prehook(self._hook(node)))
            for used, _ in node.next_functions:
                if used is not None:
                    if used not in self._users:
                        self._users[used] = []
                        waiting.append(used)
                    self._users[used].append(node)
        return self

    def detach(self) -> None:
        """Takes the hooks away and notes which parameters had a gradient in 16 bit; does nothing the second time."""
        for handle in self._handles:
            handle.remove()
        if self._low_nodes:
            for node in self._users:
                parameter = getattr(node, "variable", None)  # of the node that stores a gradient
                if isinstance(parameter, Tensor):
                    (self._passed if self._passes(node) else self._kept).add(id(parameter))
        if self._noted:
            before = [] if self.largest is None else [self.largest]
            self.largest = torch.stack([*before, *self._noted]).amax()
        self._clear()

    def is_kept_in_fp32(self, parameter: Tensor) -> bool:
        """Whether it certainly is: its backward was seen, and no gradient of it was in 16 bit."""
        return id(parameter) in self._kept and id(parameter) not in self._passed

    def _hook(self, node: Node) -> Callable[..., None]:
        @torch.no_grad()
        def before(gradients: tuple[Tensor | None, ...]) -> None:
            for gradient in gradients:
                if gradient is not None and gradient.dtype in HALF_DTYPES:
                    self._low_nodes.add(node)
                    self._note(gradient)

        return before

    def _note(self, gradient: Tensor) -> None:
        if reason := why_unreadable(gradient):
            self._warn_once.warn(f"a gradient of shape {tuple(gradient.shape)}", reason)
            return
        values = gradient_ops.local_shard(gradient)
        if not values.numel():
            return
        largest = torch.linalg.vector_norm(values, float("inf"), dtype=torch.float32)
        self._noted.append(sent_to(largest, self._device))

    def _passes(self, leaf: Node) -> bool:
        """Whether a gradient of this parameter may have been in 16 bit."""
        if leaf in self._low_nodes:
            return True
        waiting, seen = [*self._users[leaf]], set[Node]()
        while waiting:
            user = waiting.pop()
            if user in seen:
                continue
            seen.add(user)
            name = user.name().removesuffix("0").removesuffix("Backward")
            if issubclass(type(user), BackwardCFunction):
                return True  # a custom function: what it does inside cannot be seen
            if name in _SHAPE_NODES:
                waiting += self._users[user]
            elif user in self._low_nodes and "Norm" not in name:
                return True
        return False
