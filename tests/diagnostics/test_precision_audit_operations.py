"""What an audit makes of single operations: pure functions."""

import pytest
import torch
from torch import nn

from lightning_mp import PrecisionPolicy
from lightning_mp.ground.core.number_formats import dtype_label
from lightning_mp.monitors.diagnostics.audit.findings import find_problems
from lightning_mp.monitors.diagnostics.audit.operations import compute_dtype, identify
from lightning_mp.monitors.diagnostics.audit.records import AuditReport, ModuleRecord, OperationRecord
from lightning_mp.monitors.diagnostics.audit.requested import RequestedPrecision
from lightning_mp.monitors.diagnostics.audit.watch import infer_autocast

FP8 = dtype_label(torch.float8_e4m3fn)


def product(compute: str) -> OperationRecord:
    sizes = (("rows", 16), ("inner", 16), ("columns", 16))
    return OperationRecord("0", "scaled_mm", "matmul", "forward", compute, (), (), "?", sizes, "cpu")


@pytest.mark.parametrize(("compute", "label"), [("bf16", "cpu bf16"), (FP8, "cpu bf16"), ("fp32", "off")])
def test_only_a_product_of_fp32_numbers_tells_that_autocast_is_off(compute: str, label: str) -> None:
    """fp8 products cast by themselves."""
    assert infer_autocast(product(compute), "cpu bf16") == label


@pytest.mark.parametrize(("compute", "kinds"), [("bf16", []), (FP8, []), ("fp16", ["policy"])])
def test_a_policy_of_16_bit_is_not_against_fp8(compute: str, kinds: list[str]) -> None:
    policy = PrecisionPolicy([("class:Linear", "bf16")]).resolve(nn.Sequential(nn.Linear(16, 16)))
    module = ModuleRecord("0", "Linear", ("fp32",), (), (), (), (), "?", 1)
    report = AuditReport((module,), (product(compute),), compiled=False, unseen=())
    assert [finding.kind for finding in find_problems(report, RequestedPrecision("fp8-mixed", policy))] == kinds


@pytest.mark.parametrize(("name", "order"), [("aten::copy_", 1), ("aten::_to_copy", -1)])
def test_a_cast_computes_in_the_dtype_it_makes(name: str, order: int) -> None:
    """`copy_` is given the target first."""
    source, target = torch.ones(2), torch.ones(2, dtype=torch.bfloat16)
    given = (target, source) if order == 1 else (source,)
    assert compute_dtype(identify(name), given, [target]) == torch.bfloat16
    assert compute_dtype(identify(name), given, [source]) is None
