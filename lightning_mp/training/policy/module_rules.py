"""Applies rules about modules: every covered module's ``forward`` runs in its dtype.

``module.forward`` becomes ``functools.partial(run_covered, module.forward, scope, dtype)``. torch.compile traces
through such a call without a graph break, and a deep copy of the module gets its own bound method.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_mp.ground.core import private_dispatch_api
from lightning_mp.ground.core.messages import WarnOnce
from lightning_mp.ground.modules.forward_wrapper import WrappedForwards, takes_hooks
from lightning_mp.ground.modules.names import named_modules
from lightning_mp.training.policy.rules import DTYPES, LOW, Dtype

if TYPE_CHECKING:
    from lightning_mp.training.policy.resolved import ResolvedPolicy


class PolicyScope:
    """Whether a policy is in force, and which dtype "low" is there. Outside of steps it sleeps.

    Copies of a module share its scope: they follow the same run, and sleep once that is over.
    """

    def __init__(self, device_type: str) -> None:
        self.device_type = device_type
        self.low: torch.dtype | None = None

    @contextmanager
    def active(self, low: torch.dtype | None) -> Iterator[None]:
        """The policy is in force, with this 16-bit dtype; None lets it sleep."""
        before, self.low = self.low, low
        try:
            yield
        finally:
            self.low = before

    def __deepcopy__(self, memo: dict[int, Any]) -> "PolicyScope":
        return self

    @override
    def __reduce__(self) -> tuple[type["PolicyScope"], tuple[str]]:
        return PolicyScope, (self.device_type,)  # loaded from a file it sleeps


def cast_tensors(value: Any, dtype: torch.dtype) -> Any:
    """Casts fp32 and 16-bit tensors, also inside of tuples, lists and dicts; leaves everything else alone."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.dtype in DTYPES else value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(cast_tensors(item, dtype) for item in value))
    if type(value) in (tuple, list):
        return type(value)([cast_tensors(item, dtype) for item in value])
    if type(value) is dict:
        return {key: cast_tensors(item, dtype) for key, item in value.items()}
    return value


def dtypes_to_cast(value: Any) -> set[torch.dtype]:
    """The dtypes that :func:`cast_tensors` finds to cast.

    >>> sorted(map(str, dtypes_to_cast([torch.zeros(1), (torch.zeros(1).half(), torch.zeros(1).long())])))
    ['torch.float16', 'torch.float32']
    """
    if isinstance(value, Tensor):
        return {value.dtype} & {*DTYPES}
    if isinstance(value, tuple | list):
        return {dtype for item in value for dtype in dtypes_to_cast(item)}
    return dtypes_to_cast(list(value.values())) if type(value) is dict else set()


def run_covered(forward: Callable[..., Any], scope: PolicyScope, dtype: Dtype, *args: Any, **kwargs: Any) -> Any:
    """Runs a module's forward as its rule says.

    In fp32: without autocast, 16-bit inputs cast up. In 16 bit: under autocast in that dtype.
    """
    if scope.low is None:
        return forward(*args, **kwargs)
    if dtype == torch.float32:
        with torch.autocast(scope.device_type, enabled=False):
            return forward(*cast_tensors(args, torch.float32), **cast_tensors(kwargs, torch.float32))
    wanted = scope.low if isinstance(dtype, str) else dtype
    # torch's cache of cast weights, if it is on, does not distinguish dtypes: a second one works without it.
    cached = None if wanted == scope.low else False
    with torch.autocast(scope.device_type, dtype=wanted, cache_enabled=cached):
        return forward(*args, **kwargs)


def run_within_rule(module: nn.Module, function: Callable[[], Any]) -> Any:
    """Calls a function under the autocast that the rule about a module sets, if there is one."""
    forward = vars(module).get("forward")
    while isinstance(forward, partial) and forward.args:
        if forward.func is run_covered:
            return run_covered(function, *forward.args[1:])
        forward = forward.args[0]
    return function()


def run_opaque(forward: Callable[..., Any], scope: PolicyScope, *args: Any, **kwargs: Any) -> Any:
    """Runs a module's forward as one operation: no rule reaches what it calls."""
    if scope.low is None:
        return forward(*args, **kwargs)
    with private_dispatch_api.without_function_modes():
        return forward(*args, **kwargs)


def wrap_forwards(
    model: nn.Module, policy: "ResolvedPolicy", scope: PolicyScope, opaque: Iterable[nn.Module] = ()
) -> WrappedForwards:
    """Wraps the forwards of all modules that rules cover.

    What a "low" rule covers is wrapped only if some rule requests another dtype: else it runs in that dtype anyway.
    """
    wrapped = WrappedForwards()
    for module in opaque:
        wrapped.wrap(module, run_opaque, scope)
    dtypes = {module.name: module.dtype for module in policy.modules}
    if not set(dtypes.values()) - {LOW, None}:
        return wrapped
    seen: set[int] = set()
    compiled = _inside_torchscript(model)
    warn_once = WarnOnce("PrecisionPolicy")
    for name, module in named_modules(model):
        dtype = dtypes.get(name)
        if dtype is None or id(module) in seen:
            continue
        seen.add(id(module))
        if module in compiled:
            warn_once.warn(f"module {name!r}", "a TorchScript module runs in one precision, that of the outermost one")
            continue
        wrapped.wrap(module, run_covered, scope, dtype)
    return wrapped


def _inside_torchscript(model: nn.Module) -> set[nn.Module]:
    """Modules whose forward Python never calls."""
    compiled = [module for module in model.modules() if not takes_hooks(module)]
    return {inner for module in compiled for inner in module.modules() if inner is not module}
