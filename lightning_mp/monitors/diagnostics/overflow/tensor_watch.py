"""Watches every tensor that modules exchange during one forward and backward."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_mp.ground.core.messages import WarnOnce
from lightning_mp.ground.core.nested_tensors import named_tensors_in, why_unreadable
from lightning_mp.ground.core.uncopied import RunHook
from lightning_mp.ground.modules.forward_wrapper import class_forward, takes_hooks
from lightning_mp.ground.modules.names import named_modules
from lightning_mp.monitors.diagnostics.overflow.observations import (
    OverflowObservation,
    Place,
    Role,
    read_observations,
    take_reading,
)

_Visit = Callable[[str, Tensor, bool], Tensor]


class TensorWatch:
    """Hooks on all submodules for the time of a ``with`` block; what they saw, in order.

    In forward each module's inputs and outputs are read. Each of them that needs a gradient continues as a view of
    itself, so that in backward the gradient that this one call sends to this one input is seen by itself, also where
    several modules share the input. Parameters are watched too. Nothing is read by the host before
    :meth:`observations`.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._handles: list[RemovableHandle] = []
        self._seen: list[tuple[Place, Tensor, tuple[int, ...], torch.dtype]] = []
        self._stack: list[tuple[str, int]] = []
        self._num_calls = 0
        self._callers: dict[str, str] = {}
        self._in_backward = False
        self._warn_once = WarnOnce("OverflowPostMortem")

    def __enter__(self) -> Self:
        # A module that is used in several places goes by its first name.
        modules = {module: name for name, module in reversed(list(named_modules(self._root)))}
        for module, name in modules.items():
            if module is self._root or not takes_hooks(module):
                continue
            before, after = self._hooks(name, module)
            self._handles.append(module.register_forward_pre_hook(RunHook(before), with_kwargs=True))
            self._handles.append(module.register_forward_hook(RunHook(after), with_kwargs=True, always_call=True))
        for module, name in modules.items():
            for parameter_name, parameter in module.named_parameters(recurse=False):
                if parameter.requires_grad:
                    place = Place("parameter_gradient", name, type(module).__name__, f"gradient of {parameter_name}")
                    self._handles.append(parameter.register_hook(self._gradient_hook(place)))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Forwards inside are recomputations by activation checkpoints: their values were seen before."""
        self._in_backward = True
        try:
            yield
        finally:
            self._in_backward = False

    def note(self, place: Place, value: Any) -> None:
        """Reads all tensors in a structure that is no module's."""
        for path, tensor in named_tensors_in(value, place.tensor):
            self._note(Place(place.role, place.module, place.module_class, path), tensor)

    def observations(self) -> list[OverflowObservation]:
        """All that was seen, in order; waits for the device."""
        return read_observations(self._seen)

    def _note(self, place: Place, tensor: Tensor) -> None:
        with torch.no_grad():
            reading = take_reading(tensor)
        if reading is not None:
            self._seen.append((place, reading, tuple(tensor.shape), tensor.dtype))

    def _gradient_hook(self, place: Place) -> Callable[[Tensor], None]:
        return lambda gradient: self._note(place, gradient)

    def _hooks(self, name: str, module: nn.Module) -> tuple[Callable[..., Any], Callable[..., Any]]:
        kind = type(module).__name__
        argument_names = _argument_names(module)

        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            enclosing = self._caller_of(name)
            self._num_calls += 1
            self._stack.append((name, self._num_calls))
            call, aliases = self._num_calls, dict[int, Tensor]()

            def at(argument: str) -> _Visit:
                def visit(path: str, tensor: Tensor, replaceable: bool) -> Tensor:
                    place = Place("input", name, kind, f"argument {argument}{path}", enclosing, call)
                    return self._pass_on(place, tensor, replaceable, aliases)

                return visit

            labels = [repr(argument_names[i]) if i < len(argument_names) else str(i) for i in range(len(args))]
            new_args = tuple(_map_tensors(value, at(label)) for label, value in zip(labels, args, strict=True))
            return new_args, {key: _map_tensors(value, at(repr(key))) for key, value in kwargs.items()}

        def after(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
            call = self._leave(name)
            enclosing = self._caller_of(name)
            aliases = dict[int, Tensor]()

            def visit(path: str, tensor: Tensor, replaceable: bool) -> Tensor:
                place = Place("output", name, kind, f"output{path}", enclosing, call)
                return self._pass_on(place, tensor, replaceable, aliases)

            return _map_tensors(output, visit)

        return before, after

    def _caller_of(self, name: str) -> str:
        """The module that calls ``name``; a checkpoint that recomputes has no caller, so as before."""
        if not self._in_backward:
            self._callers[name] = self._stack[-1][0] if self._stack else ""
        return self._stack[-1][0] if self._stack else self._callers.get(name, "")

    def _leave(self, name: str) -> int:
        """Takes the call off the stack, with those above it that an exception ended."""
        while any(running == name for running, _ in self._stack):
            top, call = self._stack.pop()
            if top == name:
                return call
        return 0

    def _pass_on(self, place: Place, tensor: Tensor, replaceable: bool, aliases: dict[int, Tensor]) -> Tensor:
        """Reads a tensor and returns what takes its place; one tensor stays one, for modules that compare."""
        if reason := why_unreadable(tensor):
            self._warn_once.warn(f"the {place.tensor} of module {place.module!r}", reason)
            return tensor
        if not self._in_backward:
            self._note(place, tensor)
        if not (tensor.requires_grad and torch.is_grad_enabled()) or isinstance(tensor, nn.Parameter):
            return tensor
        if id(tensor) in aliases:
            return aliases[id(tensor)]
        plain = not (tensor.is_sparse or tensor.is_nested)
        alias = tensor.view_as(tensor) if replaceable and plain else tensor
        role: Role = "input_gradient" if place.role == "input" else "output_gradient"
        alias.register_hook(
            self._gradient_hook(
                Place(
                    role, place.module, place.module_class, f"gradient of {place.tensor}", place.enclosing, place.call
                )
            )
        )
        aliases[id(tensor)] = alias
        return alias


def _argument_names(module: nn.Module) -> list[str]:
    forward = class_forward(module)
    if forward is None:
        return []
    try:
        parameters = list(inspect.signature(forward).parameters.values())[1:]
    except (TypeError, ValueError):
        return []
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [parameter.name for parameter in parameters if parameter.kind in positional]


def _map_tensors(value: Any, visit: _Visit, path: str = "") -> Any:
    """Visits every tensor in nested containers; plain tuples, lists and dicts are rebuilt with the results."""
    if type(value) in (tuple, list):
        return type(value)(_map_tensors(member, visit, f"{path}[{i}]") for i, member in enumerate(value))
    if type(value) is dict:
        return {key: _map_tensors(member, visit, f"{path}[{key!r}]") for key, member in value.items()}
    if isinstance(value, Tensor):
        return visit(path, value, True)
    for inner_path, tensor in named_tensors_in(value, path):
        visit(inner_path, tensor, False)
    return value
