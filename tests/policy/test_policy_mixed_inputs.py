"""Inputs of two dtypes under a policy: what runs without one runs with it, and what CUDA promotes is promoted."""

from collections.abc import Callable
from contextlib import ExitStack

import pytest
import torch
from operation_calls import CALLS, Call
from small_models import Regression, fit, regression_batches, sgd
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_mp import AutocastPrecision, PrecisionPolicy
from lightning_mp.training.policy.module_rules import PolicyScope
from lightning_mp.training.policy.operation_rules import OperationRules, operation_rules
from lightning_mp.training.policy.operations import FAMILIES, PRODUCTS_WITH_A_VECTOR

ROWS = torch.arange(4)
INTO_ROW_0 = torch.zeros(4, 4, dtype=torch.int64)


# What autocast on CUDA promotes, and torch refuses otherwise.
PROMOTED_CALLS: dict[str, Call] = {
    "bilinear": lambda a, b: F.bilinear(a, b, torch.ones(2, 4, 4)),
    "cross": lambda a, b: torch.cross(a[:, :3], b[:, :3], dim=-1),
    "linalg.cross": lambda a, b: torch.linalg.cross(a[:, :3], b[:, :3]),
    "dot": lambda a, b: torch.dot(a[0], b[0]),
    "Tensor.dot": lambda a, b: a[0].dot(b[0]),
    "vdot": lambda a, b: torch.vdot(a[0], b[0]),
    "inner": torch.inner,
    "inner of vectors": lambda a, b: a[0].inner(b[0]),
    "tensordot": lambda a, b: torch.tensordot(a, b, 1),
    "index_put": lambda a, b: a.index_put((ROWS,), b),
    "scatter_add": lambda a, b: a.scatter_add(0, INTO_ROW_0, b),
}
# What torch promotes itself, or refuses on every device type.
OTHER_CALLS: dict[str, Call] = {
    "add": torch.add,
    "addcmul": lambda a, b: torch.addcmul(a, b, b),
    "atan2": torch.atan2,
    "cat": lambda a, b: torch.cat([a, b]),
    "lerp": lambda a, b: torch.lerp(a, b, 0.5),
    "scatter": lambda a, b: a.scatter(0, INTO_ROW_0, b),
    "index_add": lambda a, b: a.index_add(0, ROWS, b),
}
MIXTURES = [
    (wide, narrow) if wide_first else (narrow, wide)
    for wide, narrow in [(torch.float32, torch.bfloat16), (torch.float32, torch.float16)]
    for wide_first in (True, False)
]


def outcome(call: Call, dtypes: tuple[torch.dtype, torch.dtype], policy: PrecisionPolicy | None) -> Tensor | str:
    """What a call gives under autocast on a CPU, or what it is refused with."""
    low = next((dtype for dtype in dtypes if dtype != torch.float32), torch.bfloat16)
    a, b = (torch.linspace(0.1, 0.9, 16).view(4, 4).to(dtype) for dtype in dtypes)
    with ExitStack() as stack:
        if policy is not None:
            scope = PolicyScope("cpu")
            stack.enter_context(scope.active(low))
            stack.enter_context(OperationRules(operation_rules(policy.resolve(nn.Identity()), "cpu"), scope))
        stack.enter_context(torch.autocast("cpu", low))
        try:
            return call(a, b)
        except (RuntimeError, ValueError) as error:
            return str(error)


@pytest.mark.parametrize("dtypes", MIXTURES, ids=str)
@pytest.mark.parametrize("name", sorted(CALLS))
def test_every_operation_of_the_families_takes_inputs_of_two_dtypes(
    name: str, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    found = outcome(CALLS[name], dtypes, PrecisionPolicy.default())
    if name == "multi_dot":  # autocast on CPUs casts its list where all of it is fp32
        assert found == outcome(CALLS[name], dtypes, None)
        assert "same dtype" in str(found)
        return
    assert isinstance(found, Tensor), found
    low = next(dtype for dtype in dtypes if dtype != torch.float32)
    assert found.dtype == (low if name in FAMILIES["matmuls"] else torch.float32)


@pytest.mark.parametrize("policy", [PrecisionPolicy.default(), PrecisionPolicy({"op:matmuls": "low"})], ids=str)
@pytest.mark.parametrize("name", sorted(PROMOTED_CALLS | OTHER_CALLS))
def test_other_operations_run_with_a_policy_where_they_run_without(name: str, policy: PrecisionPolicy) -> None:
    for dtypes in [*MIXTURES, (torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16)]:
        without = outcome((PROMOTED_CALLS | OTHER_CALLS)[name], dtypes, None)
        found = outcome((PROMOTED_CALLS | OTHER_CALLS)[name], dtypes, policy)
        if isinstance(without, Tensor):
            assert isinstance(found, Tensor), found
            assert found.dtype == without.dtype
            assert torch.equal(found, without)
        elif name in PROMOTED_CALLS:
            a, b = (torch.linspace(0.1, 0.9, 16).view(4, 4).to(dtype).float() for dtype in dtypes)
            assert isinstance(found, Tensor), found
            assert torch.equal(found, PROMOTED_CALLS[name](a, b))


@pytest.mark.parametrize("name", FAMILIES["matmuls"])
def test_a_family_of_products_gives_the_dtypes_of_autocast(name: str) -> None:
    """So whatever takes their results with fp32 tensors runs as it does without a policy."""
    dtypes = torch.float32, torch.float32
    without = outcome(CALLS[name], dtypes, None)
    found = outcome(CALLS[name], dtypes, PrecisionPolicy({"op:matmuls": "low"}))
    assert torch.equal(found, without)
    assert found.dtype == without.dtype == (torch.float32 if name in PRODUCTS_WITH_A_VECTOR else torch.bfloat16)


@pytest.mark.parametrize("name", sorted(PRODUCTS_WITH_A_VECTOR))
def test_a_rule_that_names_the_product_casts_it(name: str) -> None:
    dtypes = torch.float32, torch.float32
    for wanted in ("low", "bf16"):
        named = outcome(CALLS[name], dtypes, PrecisionPolicy([(f"op:{name}", wanted), ("matmuls", "low")]))
        assert named.dtype == torch.bfloat16
    assert outcome(CALLS[name], dtypes, PrecisionPolicy({"op:matmuls": "bf16"})).dtype == torch.float32
    assert outcome(CALLS[name], MIXTURES[0], PrecisionPolicy({"op:matmuls": "fp32"})).dtype == torch.float32


def test_a_result_tensor_is_written_to() -> None:
    into = torch.zeros(4, dtype=torch.float16)
    dtypes = torch.bfloat16, torch.bfloat16
    found = outcome(lambda a, b: torch.mv(a, b[0], out=into), dtypes, PrecisionPolicy.default())
    assert isinstance(found, str)  # as torch refuses it, instead of writing to a copy
    assert not into.any()


@pytest.mark.parametrize("policy", [PrecisionPolicy({"op:matmuls": "low"}), {"op:mv": "low"}], ids=["family", "mv"])
@pytest.mark.parametrize(
    "normed", [nn.utils.spectral_norm, nn.utils.parametrizations.spectral_norm], ids=["hook", "parametrization"]
)
def test_spectral_norm_trains_under_a_policy(
    normed: Callable[[nn.Module], nn.Module], policy: PrecisionPolicy | dict[str, str]
) -> None:
    """Its power iteration takes products with vectors, and their dot product with fp32 vectors."""

    def trained(policy: PrecisionPolicy | dict[str, str] | None) -> list[Tensor]:
        torch.manual_seed(0)
        model = Regression(sgd)
        model.net = nn.Sequential(nn.Linear(8, 16), nn.GELU(), normed(nn.Linear(16, 16)), nn.Linear(16, 1))
        fit(model, regression_batches(3), plugin=AutocastPrecision("bf16-mixed", policy=policy))
        return [value.clone() for value in model.state_dict().values()]

    same = [torch.equal(ours, stock) for ours, stock in zip(trained(policy), trained(None), strict=True)]
    assert all(same) or isinstance(policy, dict)
