"""fp32 outputs of validation, test and predict steps whose forwards run in 16 bit."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.apply_func import apply_to_collection
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection
from typing_extensions import override

from lightning_mp.ground.core.half_dtypes import HALF_DTYPES
from lightning_mp.ground.core.patches import Patches
from lightning_mp.ground.modules.forward_wrapper import WrappedForwards, class_forward

_STEPS = ("validation_step", "test_step", "predict_step")


class Float32EvalOutputs:
    """In evaluation steps, what calls of the LightningModule and of its children return is fp32, and what steps return.

    A call from inside of another one stays as it is: 16 bit goes from layer to layer.
    """

    def __init__(self, trainer: "pl.Trainer", module: nn.Module) -> None:
        self._scope = _Scope()
        self._forwards = WrappedForwards()
        for outermost in (module, *_callable_children(module)):
            self._forwards.wrap(outermost, _run_outermost, self._scope)
        patches = Patches.of(trainer)
        for name in _STEPS:
            _cast_result(patches, trainer.strategy, name)

    @contextmanager
    def of_a_step(self, context: AbstractContextManager[None]) -> Iterator[None]:
        """For an evaluation step in a context."""
        before, self._scope.is_outermost = self._scope.is_outermost, True
        try:
            with context:
                yield
        finally:
            self._scope.is_outermost = before

    def detach(self) -> None:
        """Gives the modules their own forwards back."""
        self._forwards.undo()


class _Scope:
    """Whether the next call of a wrapped module comes from an evaluation step itself; copies of a module share it."""

    def __init__(self) -> None:
        self.is_outermost = False

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Scope":
        return self

    @override
    def __reduce__(self) -> tuple[type["_Scope"], tuple[()]]:
        return _Scope, ()


def in_float32(value: Any) -> Any:
    """Casts the 16-bit tensors of an output, in any collection.

    >>> from torch import bfloat16, zeros
    >>> in_float32({"logits": zeros(1, dtype=bfloat16), "name": "a"})
    {'logits': tensor([0.]), 'name': 'a'}
    """
    return apply_to_collection(value, Tensor, lambda tensor: tensor.float() if tensor.dtype in HALF_DTYPES else tensor)


def _run_outermost(forward: Callable[..., Any], scope: _Scope, *args: Any, **kwargs: Any) -> Any:
    if not scope.is_outermost:
        return forward(*args, **kwargs)
    scope.is_outermost = False
    try:
        output = forward(*args, **kwargs)
    finally:
        scope.is_outermost = True
    return in_float32(output)


def _cast_result(patches: Patches, strategy: object, name: str) -> None:
    def step(*args: Any, **kwargs: Any) -> Any:
        return in_float32(patch.original(*args, **kwargs))

    patch = patches.replace(strategy, name, step)


def _callable_children(module: nn.Module) -> Iterator[nn.Module]:
    """Its children, and those of containers without a forward; not metrics, which compute in their own dtype."""
    for child in module.children():
        if isinstance(child, Metric | MetricCollection):
            continue
        if class_forward(child) is not None:
            yield child
        elif isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from _callable_children(child)
