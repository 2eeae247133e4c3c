"""What is not public of operations as torch runs them, and of what torch.compile makes of modules."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch._functorch import config as functorch_config
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

#: (owner, private name, why it is needed)
PRIVATE_NAMES: tuple[tuple[object, str, str], ...] = (
    (functorch_config, "backward_pass_autocast", "a compiled backward runs outside of autocast, as an eager one does"),
    (torch.utils, "_python_dispatch", "every operation as it really runs, after autocast and in backward"),
    (torch, "_subclasses", "tensors with device, dtype and autograd but no numbers, for estimates of memory"),
    (torch, "_C", "where the next name is kept"),
    (torch._C, "_dispatch_has_kernel_for_dispatch_key", "whether this torch's autocast knows an operation"),
    (torch._C, "_dispatch_get_all_op_names", "which operations there are; the entry above raises for others"),
    (torch._C, "_current_autograd_node", "shows whether an operation runs in backward, and for which part of forward"),
    (torch.autograd, "_get_sequence_nr", "marks the parts of a forward, to recognise them in its backward"),
    (torch.autograd.graph.Node, "_sequence_nr", "the same mark of a node of the graph"),
    (torch._C, "DisableTorchFunction", "what a layer does inside is no business of rules about operations"),
    (torch._C, "DisableTorchFunctionSubclass", "calls torch for a subclass of Tensor, while modes stay on"),
    (torch.Tensor, "_make_wrapper_subclass", "a tensor of which this rank has a part only"),
    (torch.nn.Module, "_compiled_call_impl", "shows that a module was compiled in place; what calls it is asked first"),
    (torch.nn.Identity(), "_modules", "shows what torch.compile has put around a module"),
)


def autocast_knows(operation: str, device_type: str = "cuda") -> bool:
    """Whether an operation is on any list of autocast on a device type, in the torch that runs."""
    key = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA", "xpu": "AutocastXPU", "mps": "AutocastMPS"}[device_type]
    name = f"aten::{operation}"
    return name in _operation_names() and bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, key))


@cache
def _operation_names() -> frozenset[str]:
    return frozenset(torch._C._dispatch_get_all_op_names())


def backward_outside_autocast() -> AbstractContextManager[None]:
    """While this is entered, torch.compile traces backwards without autocast.

    Otherwise it traces them under the autocast that is on around the compiled function, and what ran in fp32 inside
    (``torch.autocast(enabled=False)``) gets 16-bit gradients.
    """
    patched: AbstractContextManager[None] = functorch_config.patch(backward_pass_autocast="off")
    return patched


_Observer = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], None]


class _Observing(TorchDispatchMode):
    """Runs every operation as it is and shows it; autograd and autocast are above it, compiled code stays compiled."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.observers: list[_Observer] = []

    @classmethod
    @override
    def ignore_compile_internals(cls) -> bool:
        # Without this torch.compile gives up, for the rest of the run, on functions first called inside the mode.
        return True

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for observer in tuple(self.observers):
            observer(func, args, kwargs or {}, result)
        return result


class _ObservingThread(threading.local):
    """A thread's only mode: torch leaves the last mode that was entered, and observers go in any order."""

    def __init__(self) -> None:
        self.mode = _Observing()


_observing = _ObservingThread()


@contextmanager
def observe_dispatch(observer: _Observer) -> Iterator[None]:
    """While this is entered, ``observer(operation, args, kwargs, result)`` is called after each operation of torch.

    Several may be entered in one thread, and left in any order.
    """
    mode = _observing.mode
    if not mode.observers:
        mode.__enter__()  # type: ignore[no-untyped-call]
    mode.observers.append(observer)
    try:
        yield
    finally:
        mode.observers.remove(observer)
        if not mode.observers:
            mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]


def forward_position() -> int:
    """A number that grows with each node of the autograd graph that this thread makes."""
    return torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]


def running_backward() -> tuple[str, int] | None:
    """Name of the autograd node that runs in this thread, and its :func:`forward_position`; None outside backward."""
    node = torch._C._current_autograd_node()
    return (node.name(), node._sequence_nr()) if node is not None else None


def without_function_modes() -> AbstractContextManager[None]:
    """While this is entered, no ``TorchFunctionMode`` sees calls of torch; torch.compile traces through it."""
    disabled: AbstractContextManager[None] = torch._C.DisableTorchFunction()
    return disabled


#: While an instance is entered, no ``__torch_function__`` of a subclass of ``Tensor`` is called; those of modes are.
without_function_subclasses: Callable[[], AbstractContextManager[None]] = torch._C.DisableTorchFunctionSubclass


def wrapper_tensor(
    kind: type[Tensor], size: Sequence[int], strides: Sequence[int], like: Tensor, requires_grad: bool
) -> Any:
    """A tensor of a subclass that has a size and no memory; ``like`` gives dtype and device."""
    return torch.Tensor._make_wrapper_subclass(
        kind, size, strides=strides, dtype=like.dtype, device=like.device, requires_grad=requires_grad
    )


def holds_compiled_code(module: torch.nn.Module) -> bool:
    """Whether torch.compile was called on a module, or on a method or function that it holds."""
    if compiled_call_of(module) is not None:
        return True
    own = [*vars(module).values(), *vars(type(module)).values()]
    return any(
        # how dynamo marks a function that it has wrapped; torch.compiler.disable does so, too
        hasattr(value, "_torchdynamo_orig_callable") and not getattr(value, "_torchdynamo_disable", False)
        for value in own
        if callable(value) and not isinstance(value, torch.nn.Module)
    )


def is_compiled(module: "pl.LightningModule") -> bool:
    """Whether torch.compile was called on the module or a submodule: whole, in place or as a wrapper."""
    return has_compiled_steps(module) or any(map(is_compiled_module, module.modules()))


def has_compiled_steps(module: torch.nn.Module) -> bool:
    """Whether torch.compile was called on a LightningModule, which compiles its steps."""
    return getattr(module, "_compiler_ctx", None) is not None


def is_compiled_module(module: torch.nn.Module) -> bool:
    """Whether a module was compiled in place, or is what torch.compile puts around another one."""
    return compiled_call_of(module) is not None or "_orig_mod" in module._modules


def compiled_call_of(module: torch.nn.Module) -> Callable[..., Any] | None:
    """What ``module.compile()`` has made of the module's call; None if it was not compiled in place."""
    call: Any = module._compiled_call_impl
    compiled: Callable[..., Any] | None = getattr(call, "compiled_below", call)  # below an intercepted call
    return compiled
