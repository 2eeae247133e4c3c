"""The problems in an audit, and what to do about them."""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from typing_extensions import override

from lightning_mp.ground.core.messages import listed
from lightning_mp.ground.modules.names import is_inside
from lightning_mp.monitors.diagnostics.audit.operations import candidates
from lightning_mp.monitors.diagnostics.audit.records import LOW, AuditReport, OperationRecord
from lightning_mp.monitors.diagnostics.audit.requested import RequestedPrecision, dtype_of
from lightning_mp.training.policy.operations import by_autocast

FindingKind = Literal[
    "not_active", "fp32_matmul", "other_format", "not_fp8", "low_precision", "policy", "tensor_cores", "fp64"
]
"""What is wrong.

"not_active": mixed precision was requested, and every product ran in fp32. "fp32_matmul": some did, unasked.
"other_format": a product ran in a 16-bit format that was not requested. "not_fp8": a layer chosen for fp8 did not
multiply in it. "low_precision": a loss, a softmax or norm that was cast explicitly, or the sums of a hand-written
norm, ran in 16 bit in a mixed run, and the policy does not say so. "policy": something ran in another
format than the policy says. "tensor_cores": a large dimension of a layer is not a multiple of 8, or of 16 in fp8.
"fp64": 64-bit numbers, which GPUs compute 2 to 64 times slower than fp32.

What torch itself decides is no finding: attention that it computes in parts, in fp32, where no fused kernel takes the
shapes (dropout on a CPU, say); softmaxes and norms that autocast leaves in 16 bit (on a CPU), whose kernels sum in
fp32; products with a vector.
"""

_K = TypeVar("_K")
# What overflows or loses digits in a hand-written norm.
_PARTS_OF_NORMS = ("pow", "mean", "sum", "var", "var_mean", "std", "linalg_vector_norm")
_TRANSLATED = {"inner": "in_features", "columns": "out_features"}
_WITH_VECTORS = ("mv", "addmv", "dot", "vdot")
# Sizes below come from the data as a rule (channels of an image, classes), and such products take little time.
_SMALLEST_DIMENSION = 64


@dataclass(frozen=True)
class AuditFinding:
    """One problem that an audit found."""

    kind: FindingKind  #: the kind of problem.
    modules: tuple[str, ...]  #: names of the modules concerned; "" is the step around the model.
    what: str  #: what was seen; this is certain.
    advice: str  #: what to do.
    likely_cause: str = ""  #: the probable cause, a guess; "" if there is none.

    @override
    def __str__(self) -> str:
        guess = f"Likely cause (a guess): {self.likely_cause} " if self.likely_cause else ""
        return f"{self.what} {guess}{self.advice}"


def find_problems(report: AuditReport, requested: RequestedPrecision) -> tuple[AuditFinding, ...]:
    """Compares what ran with what was requested."""
    forward = [record for record in report.operations if record.phase != "backward"]
    found = [*_not_active(report, requested)]
    if not found:
        seen = [row for row in forward if not _may_be_of_a_ruled_part(row, report, requested)]
        found += [*_wrong_products(seen, requested), *_against_policy(forward, requested)]
    found += _not_fp8(report, requested)
    if requested.is_mixed and not any(finding.kind == "not_active" for finding in found):
        by_hand = {row.name for row in report.modules if "norm" in row.class_name.lower()}
        found += _low_precision(forward, requested, by_hand)
    if requested.base != "fp64":
        found += _fp64(report)
    return (*found, *_missed_tensor_cores(forward, {row.name for row in report.modules if "Linear" in row.class_name}))


def _not_active(report: AuditReport, requested: RequestedPrecision) -> Iterator[AuditFinding]:
    products = [record for record in report.operations if record.kind == "matmul" and record.phase == "forward"]
    if not requested.is_mixed or not products or any(record.compute != "fp32" for record in products):
        return
    if all(requested.by_policy(record) == "fp32" for record in products):
        return
    names = _modules(products)
    yield AuditFinding(
        "not_active",
        names,
        f"Mixed precision is not active: every product ran in fp32 in a {requested.precision} run ({_places(names)}).",
        "Call the model inside training_step, in its thread, without switching autocast off.",
        "torch.autocast(enabled=False) around the model, or a training_step that calls the model in another thread or"
        " process, or on another device type than the Trainer's.",
    )


def _wrong_products(forward: Sequence[OperationRecord], requested: RequestedPrecision) -> Iterator[AuditFinding]:
    """Products in a format that neither the plugin nor the policy requests."""
    products = [row for row in forward if row.kind == "matmul" and not requested.by_policy(row)]
    if requested.base in LOW:
        in_fp32 = [row for row in products if row.compute == "fp32" and not _is_left_to_torch(row, forward)]
        for operation, rows in _grouped(in_fp32, lambda row: row.operation).items():
            yield _fp32_product(operation, rows, requested)
    others = [row for row in products if row.compute in LOW and requested.base in ("fp16", "bf16", "fp32")]
    for compute, rows in _grouped(others, lambda row: row.compute if row.compute != requested.base else None).items():
        names = _modules(rows)
        yield AuditFinding(
            "other_format",
            names,
            f"Products ran in {compute} in a {requested.precision} run: {_places(names)}.",
            "Leave the format to the precision plugin, or say in a PrecisionPolicy that it is intended.",
            "a torch.autocast of the model's own, or weights that were cast with .half() or .bfloat16().",
        )


def _may_be_of_a_ruled_part(row: OperationRecord, report: AuditReport, requested: RequestedPrecision) -> bool:
    """Whether it may be of a compiled module inside, which is not seen, and whose rule requests what it ran in."""
    if not report.compiled or requested.policy is None:
        return False
    unseen = {module.name for module in report.modules if not module.calls and is_inside(module.name, row.module)}
    return any(m.name in unseen and dtype_of(m.dtype, requested.base) == row.compute for m in requested.policy.modules)


def _fp32_product(operation: str, rows: Sequence[OperationRecord], requested: RequestedPrecision) -> AuditFinding:
    names = _modules(rows)
    what = f"{operation} ran in fp32 in a {requested.precision} run: {_places(names)}."
    device_type = rows[0].device_type
    if requested.is_mixed and all(
        by_autocast(name, device_type) is None for name in (operation, *candidates(operation))
    ):
        return AuditFinding(
            "fp32_matmul",
            names,
            f"{what} torch's autocast has no rule for this operation on {device_type}.",
            "Cast its inputs in the model, or say in a PrecisionPolicy that fp32 is intended.",
        )
    return AuditFinding(
        "fp32_matmul",
        names,
        what,
        "If it is intended, say so in a PrecisionPolicy.",
        "torch.autocast(enabled=False), a custom autograd function, or a buffer that is fp32.",
    )


def _is_left_to_torch(row: OperationRecord, forward: Sequence[OperationRecord]) -> bool:
    """Whether torch alone decided that a product runs in fp32.

    ``scaled_dot_product_attention`` without a fused kernel casts 16-bit inputs up. 16 bit does not help a product with
    a vector.
    """
    if row.operation in _WITH_VECTORS:
        return True
    own = [other for other in forward if other.module == row.module]
    casts_up = any(other.kind == "cast" and {*other.inputs} & {*LOW} and "fp32" in other.outputs for other in own)
    return casts_up and any(other.operation == "safe_softmax" for other in own)


def _not_fp8(report: AuditReport, requested: RequestedPrecision) -> Iterator[AuditFinding]:
    called = {record.name for record in report.modules if record.calls}
    in_fp8 = {record.module for record in report.operations if "fp8" in record.compute}
    missing = tuple(name for name in requested.fp8_modules if name in called and name not in in_fp8)
    if missing:
        yield AuditFinding(
            "not_fp8",
            missing,
            f"Chosen for fp8, and not multiplied in fp8: {_places(missing)}.",
            "Call the layer itself, and not an operation on its weight.",
            "a forward that uses the layer's weight itself, or a forward that was replaced.",
        )


def _against_policy(forward: Sequence[OperationRecord], requested: RequestedPrecision) -> Iterator[AuditFinding]:
    def contradiction(row: OperationRecord) -> tuple[str, str, str] | None:
        wanted = requested.by_policy(row)
        in_scope = row.kind in ("matmul", "softmax", "norm", "loss") and row.compute in (*LOW, "fp32")
        return (row.operation, row.compute, wanted) if in_scope and wanted and wanted != row.compute else None

    for (operation, compute, wanted), rows in _grouped(forward, contradiction).items():
        names = _modules(rows)
        yield AuditFinding(
            "policy",
            names,
            f"{operation} ran in {compute} though the policy says {wanted}: {_places(names)}.",
            "Rules about modules act on forward, those about operations where autocast is on.",
            "another method that is called directly, torch.autocast(enabled=False), or a scripted function.",
        )


def _low_precision(
    forward: Sequence[OperationRecord], requested: RequestedPrecision, norms: Collection[str]
) -> Iterator[AuditFinding]:
    cast_by_hand = _modules_that_cast_by_hand(forward)

    def what(row: OperationRecord) -> tuple[str, str] | None:
        by_hand = row.module in norms and row.operation in _PARTS_OF_NORMS
        of_torch = row.kind == "norm" or row.operation in ("softmax", "safe_softmax")
        if of_torch and row.autocast != "off" and row.module not in cast_by_hand:
            return None  # as autocast leaves it on this device; the kernels sum in fp32
        if (
            row.compute not in LOW
            or not (by_hand or row.kind in ("softmax", "norm", "loss"))
            or requested.by_policy(row)
        ):
            return None
        return ("the sums of a norm" if by_hand else row.operation), row.compute

    for (operation, compute), group in _grouped(forward, what).items():
        names = _modules(group)
        yield AuditFinding(
            "low_precision",
            names,
            f"{operation} ran in {compute}: {_places(names)}.",
            "Use AutocastPrecision(..., policy=PrecisionPolicy.default()), which keeps torch's norms, softmax and"
            " losses in fp32 on every device, or state in the policy that 16 bit is intended. A norm written by hand"
            " needs a rule for its module.",
        )


def _modules_that_cast_by_hand(forward: Sequence[OperationRecord]) -> set[str]:
    """Modules that cast to 16 bit and have no product that autocast would cast."""
    cast = {row.module for row in forward if row.kind == "cast" and {*row.outputs} & {*LOW}}
    return cast - {row.module for row in forward if row.kind == "matmul"}


def _fp64(report: AuditReport) -> Iterator[AuditFinding]:
    modules = [row.name for row in report.modules if "fp64" in (*row.weights, *row.inputs)]
    # torchao computes the scales of fp8 tensors in fp64, on purpose.
    in_fp8 = {row.module for row in report.operations if "fp8" in row.compute}
    operations = [row.module for row in report.operations if row.compute == "fp64" and row.module not in in_fp8]
    names = tuple(dict.fromkeys([*modules, *operations]))
    if names:
        yield AuditFinding(
            "fp64",
            names,
            f"64-bit floating-point numbers: {_places(names)}.",
            "Cast the batch with .float() in the data set, weights with module.float().",
            "NumPy, which makes them by default.",
        )


def _missed_tensor_cores(forward: Sequence[OperationRecord], linears: Collection[str]) -> Iterator[AuditFinding]:
    missed: dict[tuple[str, int, int], list[OperationRecord]] = {}
    for row in forward:
        multiple = 16 if "fp8" in row.compute else 8
        if row.kind == "matmul" and ("fp8" in row.compute or row.compute in LOW):
            for dimension, size in row.sizes:
                if size % multiple and _is_by_design(row, dimension, size, linears):
                    shown = _TRANSLATED.get(dimension, dimension) if row.module in linears else dimension
                    missed.setdefault((shown, size, multiple), []).append(row)
    for (dimension, size, multiple), rows in missed.items():
        names = _modules(rows)
        more = -(-size // multiple) * multiple
        yield AuditFinding(
            "tensor_cores",
            names,
            f"{dimension} is {size}, not a multiple of {multiple}: {_places(names)}.",
            f"GPUs multiply such sizes partly or wholly without tensor cores: make it {more}.",
        )


def _is_by_design(row: OperationRecord, dimension: str, size: int, linears: Collection[str]) -> bool:
    """Whether a size was chosen with the model, and is large enough to matter; others come with the data."""
    if dimension == "head_dim":
        return True
    of_weight = row.module in linears or row.operation.startswith(("convolution", "addmm", "linear"))
    return of_weight and dimension != "rows" and size >= _SMALLEST_DIMENSION


def _grouped(
    rows: Sequence[OperationRecord], key: Callable[[OperationRecord], "_K | None"]
) -> "dict[_K, list[OperationRecord]]":
    groups: dict[_K, list[OperationRecord]] = {}
    for row in rows:
        if (group := key(row)) is not None:
            groups.setdefault(group, []).append(row)
    return groups


def _modules(rows: Sequence[OperationRecord]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(row.module for row in rows))


def _places(names: Sequence[str]) -> str:
    return listed([name or "the step around the model" for name in names])
