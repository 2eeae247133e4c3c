"""What a run was asked to compute in, to compare it with what it did."""

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_mp.ground.core.number_formats import dtype_label
from lightning_mp.ground.core.precisions import format_of
from lightning_mp.monitors.diagnostics.audit.operations import candidates
from lightning_mp.monitors.diagnostics.audit.records import OperationRecord
from lightning_mp.training.policy.resolved import PolicyModule, ResolvedPolicy
from lightning_mp.training.policy.rules import LOW, Dtype


@dataclass(frozen=True)
class RequestedPrecision:
    """What was requested.

    >>> asked = RequestedPrecision("bf16-mixed")
    >>> asked.is_mixed, asked.base
    (True, 'bf16')
    """

    precision: str
    policy: ResolvedPolicy | None = None
    fp8_modules: Sequence[str] = ()

    @property
    def is_mixed(self) -> bool:
        """Whether products were to run in a narrower format than the weights have."""
        return self.precision.endswith("-mixed") and self.base in ("fp16", "bf16")

    @property
    def base(self) -> str:
        """The format of products unless stated otherwise; "" if that is not known."""
        found = format_of(self.precision) or ""
        return "bf16" if found == "fp8" else found  # of all that fp8 does not take

    def by_policy(self, record: OperationRecord) -> str:
        """The format that the policy requests in a forward operation, which decides; "" if it says nothing."""
        if self.policy is None:
            return ""
        module = next((row for row in self.policy.modules if row.name == record.module), None)
        if module is not None and dtype_of(module.dtype, self.base) == "fp32":
            return "fp32"
        requested = {
            self._by_operation(name, record.device_type) for name in _narrowed(candidates(record.operation), module)
        }
        if len(requested) == 1 and "" not in requested:
            return requested.pop()
        if requested - {""} and record.compute in requested:
            return record.compute
        return dtype_of(module.dtype, self.base) if module is not None and record.kind == "matmul" else ""

    def _by_operation(self, name: str, device_type: str) -> str:
        assert self.policy is not None
        if self.policy.leaves_to_autocast(name, device_type):
            return ""
        return dtype_of(self.policy.operation_dtype(name), self.base)


def dtype_of(dtype: Dtype | None, low: str) -> str:
    """A rule's dtype by its short name; "" for none."""
    if dtype is None:
        return ""
    return low if dtype == LOW else dtype_label(dtype)


def _narrowed(names: Sequence[str], module: PolicyModule | None) -> Sequence[str]:
    """In a module of torch.nn it is that module's operation."""
    operation = module.operation if module is not None else None
    return (operation,) if operation is not None and operation in names else names
