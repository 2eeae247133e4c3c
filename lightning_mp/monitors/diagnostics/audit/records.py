"""What a precision audit saw: one record per module and per kind of operation, ready for JSON."""

import json
from dataclasses import asdict, dataclass
from typing import Any, Literal

Kind = Literal["matmul", "softmax", "norm", "loss", "cast", "other"]
"""What an operation is. "norm" leaves batch norm out, whose kernels compute in fp32 whatever their input."""

Phase = Literal["forward", "backward", "recompute"]
"""When it ran. "recompute" is what an activation checkpoint recomputes in backward."""

LOW = ("bf16", "fp16")
"""What autocast casts to."""


@dataclass(frozen=True)
class OperationRecord:
    """Like calls of one operation in one module."""

    module: str  # name of the module that called it; "" for the step around the model, as the loss often is
    operation: str  # as torch's dispatcher has it, without "_" and "native_" in front: `F.linear` is "addmm"
    kind: Kind  # what it is
    phase: Phase  # when it ran
    # the dtype it computed in, after every cast: of the factors of a product, the wider one of input and output of
    # other operations
    compute: str
    inputs: tuple[str, ...]  # dtypes of its tensors, in order
    outputs: tuple[str, ...]  # dtypes of its results
    autocast: str  # "cpu bf16", "off", or "?" where that cannot be told, and in backward, which follows its forward
    # of a product in the forward, by name: rows, inner, columns; in_channels, out_channels; head_dim
    sizes: tuple[tuple[str, int], ...]
    device_type: str  # where it ran
    calls: int = 1  # how often


@dataclass(frozen=True)
class ModuleRecord:
    """One module; dtypes in the order in which they were first seen."""

    name: str  # its first name in the model, without what wrappers add; "" is the model
    class_name: str  # of its class
    weights: tuple[str, ...]  # dtypes of its own parameters while it ran
    inputs: tuple[str, ...]  # dtypes of the tensors it was called with
    outputs: tuple[str, ...]  # dtypes of the tensors it returned
    output_gradients: tuple[str, ...]  # dtypes of the gradients that arrived at those
    weight_gradients: tuple[str, ...]  # dtypes of its parameters' gradients after backward
    autocast: str  # what it ran under, as in `OperationRecord`
    # how often it was called, recomputing included; 0 in compiled code and where another module uses its weights
    calls: int


@dataclass(frozen=True)
class AuditReport:
    """What an audit recorded in one forward and backward.

    Example:
        >>> report = AuditReport((), (), compiled=False, unseen=())
        >>> report.to_json(indent=None)
        '{"modules": [], "operations": [], "compiled": false, "unseen": []}'
    """

    modules: tuple[ModuleRecord, ...]  #: every module, parents first.
    #: every operation that computes, in the order of its first call; views and sizes are left out.
    operations: tuple[OperationRecord, ...]
    compiled: bool  #: whether compiled code ran: what the compiler fused into its own kernels is not in ``operations``.
    unseen: tuple[str, ...]  #: modules whose weights got gradients although no call of them was seen.

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists, strings and numbers."""
        report = asdict(self)
        for operation in report["operations"]:
            operation["sizes"] = dict(operation["sizes"])
        listed: dict[str, Any] = _with_lists(report)
        return listed

    def to_json(self, indent: int | None = 2) -> str:
        """The same as JSON."""
        return json.dumps(self.to_dict(), indent=indent)

    def of_module(self, name: str) -> tuple[OperationRecord, ...]:
        """The operations that a module called itself."""
        return tuple(record for record in self.operations if record.module == name)


def _with_lists(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _with_lists(item) for key, item in value.items()}
    return [_with_lists(item) for item in value] if isinstance(value, list | tuple) else value
