"""Watches one forward and backward: which dtype every module and every operation really used."""

import threading
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from lightning_mp.ground.core import private_dispatch_api
from lightning_mp.ground.core.nested_tensors import tensors_in
from lightning_mp.ground.core.number_formats import dtype_label
from lightning_mp.ground.core.uncopied import RunHook
from lightning_mp.ground.modules.forward_wrapper import takes_hooks
from lightning_mp.ground.modules.names import named_modules
from lightning_mp.monitors.diagnostics.audit.operations import (
    candidates,
    compute_dtype,
    identify,
    kind_of,
    product_sizes,
)
from lightning_mp.monitors.diagnostics.audit.records import LOW, AuditReport, ModuleRecord, OperationRecord, Phase
from lightning_mp.training.policy.module_rules import run_within_rule
from lightning_mp.training.policy.operations import by_autocast


@dataclass
class _Note:
    """What was seen of one module so far; dicts serve as ordered sets."""

    name: str
    module: nn.Module
    weights: dict[str, None] = field(default_factory=dict)
    inputs: dict[str, None] = field(default_factory=dict)
    outputs: dict[str, None] = field(default_factory=dict)
    output_gradients: dict[str, None] = field(default_factory=dict)
    autocast: dict[str, None] = field(default_factory=dict)
    calls: int = 0


@dataclass
class _Frame:
    """A module that is running, and what autocast was last known to be in it, by device type."""

    name: str
    autocast: dict[str, str] = field(default_factory=dict)


class PrecisionWatch:
    """While it is entered, notes the dtypes of every module and operation; afterwards nothing of it is left.

    It looks on and changes no number: operations are seen below autograd and autocast, by torch's dispatcher, with the
    dtypes they really run in, in forward and in backward, and each is put down to the module whose ``forward`` called
    it. What an optimizer does after the backward is left out.

    What ``torch.compile`` was called on (a module, its methods) is compiled as ever, once. Operations are seen as far
    as the compiled code calls torch's operations: all of them with the backends "eager" and "aot_eager", products of
    matrices with "inductor", nothing in CUDA graphs. Modules inside have no record of their calls, and their operations
    are put down to the module around, as are those of TorchScript modules. A compiled function that is no part of a
    module, and that is first called while it is watched, is compiled once more afterwards if it calls modules.

    In a reentrant activation checkpoint on a GPU, operations of the inner backward may be put down to another module.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.report: AuditReport | None = None
        self.saw_backward = False
        self._notes: dict[str, _Note] = {}
        self._seen: Counter[OperationRecord] = Counter()
        self._stack = ExitStack()
        self._frames: list[_Frame] = []
        # Which module made the nodes of the autograd graph from a position on.
        self._positions: list[int] = []
        self._makers: list[str] = []
        self._thread = 0
        self._frames_before_backward: int | None = None
        self._is_after_backward = False
        self._compiled = False

    # -- begin and end -------------------------------------------------------------------------------------------------

    def __enter__(self) -> "PrecisionWatch":
        self._thread = threading.get_ident()
        self._frames = [_Frame("")]
        wrappers, inside = _compiled_parts(self.model)
        self._compiled = bool(inside)
        noted: set[nn.Module] = set()
        try:
            for name, module in named_modules(self.model):
                if module not in noted:
                    noted.add(module)
                    self._notes[name] = _Note(name, module)
                    if takes_hooks(module) and (module in wrappers or module not in inside):
                        self._hook(wrappers.get(module, module), self._notes[name])
            self._mark()
            self._stack.enter_context(private_dispatch_api.observe_dispatch(self._on_operation))
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Takes everything away and writes the report; does nothing the second time."""
        if self.report is not None:
            return
        self._stack.close()
        self.report = self._make_report()
        self._notes.clear()
        self._frames.clear()

    def _hook(self, module: nn.Module, note: _Note) -> None:
        def before(_: nn.Module, args: Any, kwargs: Any) -> None:
            # Where a compiled function calls this module, nothing of this is traced.
            if not torch.compiler.is_compiling():
                self._on_call(note, args, kwargs)

        def after(_: nn.Module, args: Any, output: Any) -> None:
            if not torch.compiler.is_compiling():
                self._on_return(note, output)

        for handle in (
            module.register_forward_pre_hook(RunHook(before), with_kwargs=True),
            module.register_forward_hook(RunHook(after), always_call=True),
        ):
            self._stack.callback(handle.remove)

    # -- modules -------------------------------------------------------------------------------------------------------

    def _on_call(self, note: _Note, args: Any, kwargs: Any) -> None:
        own = list(note.module.parameters(recurse=False))
        given = [*tensors_in(args), *tensors_in(kwargs)]
        note.calls += 1
        note.weights |= dict.fromkeys(dtype_label(parameter.dtype) for parameter in own)
        note.inputs |= dict.fromkeys(dtype_label(tensor.dtype) for tensor in given)
        if private_dispatch_api.running_backward() is None:
            self._is_after_backward = False
            self._frames_before_backward = None
        types = {tensor.device.type for tensor in (*own, *given)} or set(self._frames[-1].autocast)
        self._frames[-1].autocast |= _autocast_labels(types)
        known = run_within_rule(note.module, lambda: _autocast_labels(types))
        note.autocast |= dict.fromkeys(known.values())
        self._frames.append(_Frame(note.name, known))
        self._mark()

    def _on_return(self, note: _Note, output: Any) -> None:
        if len(self._frames) > 1:
            self._frames.pop()
        self._mark()
        for tensor in tensors_in(output):
            note.outputs[dtype_label(tensor.dtype)] = None
            if tensor.requires_grad:
                self._stack.callback(tensor.register_hook(_noting_gradient(note)).remove)

    def _mark(self) -> None:
        """Attributes new nodes of the autograd graph to the innermost module."""
        if threading.get_ident() == self._thread:
            self._positions.append(private_dispatch_api.forward_position())
            self._makers.append(self._frames[-1].name)

    # -- operations ----------------------------------------------------------------------------------------------------

    def _on_operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        found = self._module_and_phase()
        if found is None or func.is_view:
            return
        operation = identify(func.name())
        results = list(tensors_in(result))
        compute = compute_dtype(operation, args, results) if operation is not None else None
        if operation is None or compute is None:
            return
        inputs = [*tensors_in(args), *tensors_in(kwargs)]
        if compute == torch.float64 and all(tensor.ndim == 0 for tensor in (*inputs, *results)):
            return  # a Python number on its way
        device_type = (inputs or results)[0].device.type
        module, phase = found
        record = OperationRecord(
            module=module,
            operation=operation,
            kind=kind_of(operation),
            phase=phase,
            compute=dtype_label(compute),
            inputs=tuple(dtype_label(tensor.dtype) for tensor in inputs),
            outputs=tuple(dtype_label(tensor.dtype) for tensor in results),
            autocast="?",
            sizes=product_sizes(operation, args) if phase != "backward" else (),
            device_type=device_type,
        )
        if phase != "backward":
            record = self._under_autocast(record)
        self._seen[record] += 1

    def _module_and_phase(self) -> tuple[str, Phase] | None:
        """Whose operation this is, and when it runs; None for what comes after the backward."""
        running = private_dispatch_api.running_backward()
        if running is None:
            self._is_after_backward |= self._frames_before_backward is not None
            self._frames_before_backward = None
            # Under DDP a training step runs as a call of the whole model, which has no name.
            outside = self._is_after_backward and not self._frames[-1].name
            return None if outside else (self._frames[-1].name, "forward")
        if self._frames_before_backward is None:
            self._frames_before_backward = len(self._frames)
            self.saw_backward = True
        if len(self._frames) > self._frames_before_backward:
            return self._frames[-1].name, "recompute"
        node, position = running
        self._compiled |= node.startswith("CompiledFunction")
        if position > 2**62:  # the node that stores a parameter's gradient
            return None
        index = bisect_right(self._positions, position) - 1
        return (self._makers[index] if index >= 0 else ""), "backward"

    def _under_autocast(self, record: OperationRecord) -> OperationRecord:
        known = self._frames[-1].autocast
        label = infer_autocast(record, known.get(record.device_type, "?"))
        if label != "?":
            known[record.device_type] = label  # what follows in this module is under the same
        return replace(record, autocast=label)

    # -- report --------------------------------------------------------------------------------------------------------

    def _make_report(self) -> AuditReport:
        operations = tuple(replace(record, calls=calls) for record, calls in self._seen.items())
        modules, unseen = [], []
        for note in self._notes.values():
            parameters = list(note.module.parameters(recurse=False))
            gradients = dict.fromkeys(dtype_label(p.grad.dtype) for p in parameters if p.grad is not None)
            own = [r for r in operations if r.module == note.name and r.phase == "forward"]
            modules.append(
                ModuleRecord(
                    name=note.name,
                    class_name=type(note.module).__name__,
                    weights=tuple(note.weights or dict.fromkeys(dtype_label(p.dtype) for p in parameters)),
                    inputs=tuple(note.inputs),
                    outputs=tuple(note.outputs),
                    output_gradients=tuple(note.output_gradients),
                    weight_gradients=tuple(gradients),
                    autocast=join_autocast(own, list(note.autocast)),
                    calls=note.calls,
                )
            )
            if gradients and not note.calls and note.name:
                unseen.append(note.name)
        return AuditReport(tuple(modules), operations, self._compiled, tuple(unseen))


def audit_step(model: nn.Module, step: Callable[[], Any]) -> AuditReport:
    """Runs one forward and backward and reports the dtypes of every module and operation."""
    with PrecisionWatch(model) as watch:
        step()
    assert watch.report is not None
    return watch.report


def _noting_gradient(note: _Note) -> Callable[[Tensor], None]:
    def hook(gradient: Tensor) -> None:
        if not torch.compiler.is_compiling():
            note.output_gradients[dtype_label(gradient.dtype)] = None

    return hook


def _compiled_parts(model: nn.Module) -> tuple[dict[nn.Module, nn.Module], set[nn.Module]]:
    """The wrappers of torch.compile by what they wrap, and every module that compiled code may call.

    Hooks in there would be compiled along, and their removal would have it compiled again.
    """
    wrappers, inside = {}, set()
    for module in model.modules():
        wrapped = dict(module.named_children()).get("_orig_mod")
        if wrapped is not None:
            wrappers[wrapped] = module
            inside |= set(wrapped.modules())
        elif private_dispatch_api.holds_compiled_code(module):
            inside |= set(module.modules())
    return wrappers, inside


def autocast_label(device_type: str) -> str:
    """The autocast that is on, as "cpu bf16", or "off".

    >>> with torch.autocast("cpu", torch.bfloat16):
    ...     autocast_label("cpu")
    'cpu bf16'
    >>> autocast_label("cpu")
    'off'
    """
    if not torch.amp.is_autocast_available(device_type) or not torch.is_autocast_enabled(device_type):
        return "off"
    return f"{device_type} {dtype_label(torch.get_autocast_dtype(device_type))}"


def _autocast_labels(device_types: Iterable[str]) -> dict[str, str]:
    return {device_type: autocast_label(device_type) for device_type in device_types}


def infer_autocast(record: OperationRecord, around: str) -> str:
    """What an operation of a forward ran under: "cpu bf16", "off", or "?" if it cannot be told."""
    if around in ("off", "?"):
        return around
    if record.kind == "matmul":
        # fp8 products cast by themselves, whatever autocast says.
        return "off" if record.compute == "fp32" else around
    treated = {by_autocast(name, record.device_type) for name in candidates(record.operation)}
    return "off" if treated == {"fp32"} and record.compute in LOW else around


def join_autocast(own: Sequence[OperationRecord], entered: Sequence[str]) -> str:
    """What a module ran under: as its own operations show, else what was on when it was called."""
    dtypes = list(dict.fromkeys(record.autocast for record in own if record.autocast != "?"))
    return ", ".join(dtypes or entered) or "?"
