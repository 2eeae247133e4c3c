"""What autocast does by itself on each device type, and that rules bring the rest; CUDA through fake tensors."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext

import operation_calls
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from lightning_mp import PrecisionPolicy
from lightning_mp.training.policy.module_rules import PolicyScope
from lightning_mp.training.policy.operation_rules import OperationRules, operation_rules
from lightning_mp.training.policy.operations import (
    FAMILIES,
    KNOWN_OPERATIONS,
    PRODUCTS_WITH_A_VECTOR,
    by_autocast,
    functions_of,
    operation_of_module,
    operations_named,
)

LOW = torch.bfloat16


def classes(x: Tensor) -> Tensor:
    return torch.zeros(4, dtype=torch.int64, device=x.device)


def plain(name: str, **arguments: int) -> Callable[[Tensor], Tensor]:
    return lambda x: getattr(F, name)(x, **arguments)


#: How to call an operation on a 4 x 4 tensor, without [], which fake CUDA tensors cannot do here.
CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    name: lambda x, call=call: call(x, x) for name, call in operation_calls.CALLS.items()
}
CALLS |= {name: plain(name, dim=-1) for name in FAMILIES["softmaxes"]}
CALLS |= {
    "local_response_norm": lambda x: F.local_response_norm(x.unsqueeze(0), 2),
    "batch_norm": lambda x: F.batch_norm(x, classes(x).float(), classes(x).float(), training=True),
    "instance_norm": lambda x: F.instance_norm(x.unsqueeze(0)),
    "logsumexp": lambda x: torch.logsumexp(x, -1),
    "cross_entropy": lambda x: F.cross_entropy(x, classes(x)),
    "ctc_loss": lambda x: F.ctc_loss(x.unsqueeze(1), (classes(x) + 1).unsqueeze(0), (4,), (2,)),
    "multi_margin_loss": lambda x: F.multi_margin_loss(x, classes(x)),
    "multilabel_margin_loss": lambda x: F.multilabel_margin_loss(x, classes(x).expand(4, 4)),
    "nll_loss": lambda x: F.nll_loss(x, classes(x)),
    "gelu": F.gelu,
}

# Their fake CUDA versions want to see values, or a CUDA build.
NO_FAKE = {"ctc_loss", "gaussian_nll_loss", "batch_norm", "instance_norm"}


@contextmanager
def autocast_on(device_type: str) -> Iterator[None]:
    """Autocast to bf16; torch.autocast would not be switched on for a CUDA that is not there."""
    torch.set_autocast_enabled(device_type, True)
    torch.set_autocast_dtype(device_type, LOW)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device_type, False)
        torch.clear_autocast_cache()


def result_dtype(operation: str, input_dtype: torch.dtype, device_type: str, policy: PrecisionPolicy | None) -> object:
    """What an operation gives under autocast, with a policy in force or without; the reason if torch refuses."""
    with ExitStack() as stack:
        # On the CPU real tensors; without a GPU only fake ones know what CUDA would do.
        stack.enter_context(nullcontext() if device_type == "cpu" else FakeTensorMode())
        x = torch.full((4, 4), 0.5, device=device_type, dtype=input_dtype)
        if policy is not None:
            scope = PolicyScope(device_type)
            rules = operation_rules(policy.resolve(torch.nn.Identity()), device_type)
            stack.enter_context(scope.active(LOW))
            stack.enter_context(OperationRules(rules, scope))
        stack.enter_context(autocast_on(device_type))
        try:
            return CALLS[operation](x).dtype
        except RuntimeError as error:
            return str(error)


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
@pytest.mark.parametrize("operation", sorted(KNOWN_OPERATIONS))
def test_the_lists_are_those_of_torch(operation: str, device_type: str) -> None:
    native = by_autocast(operation, device_type)
    if (operation, device_type) == ("binary_cross_entropy", "cuda"):
        assert "unsafe to autocast" in result_dtype(operation, LOW, device_type, None)
    elif native == "fp32":
        assert result_dtype(operation, LOW, device_type, None) == torch.float32
    elif native == "low":
        assert result_dtype(operation, torch.float32, device_type, None) == LOW


@pytest.mark.parametrize("input_dtype", [torch.float32, LOW], ids=["fp32", "bf16"])
@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
@pytest.mark.parametrize(
    "operation", [name for family in ("norms", "softmaxes", "losses", "matmuls") for name in FAMILIES[family]]
)
def test_under_default_an_operation_runs_alike_on_every_device_type(
    operation: str, device_type: str, input_dtype: torch.dtype
) -> None:
    if device_type == "cuda" and operation in NO_FAKE:
        rules = operation_rules(PrecisionPolicy.default().resolve(torch.nn.Identity()), "cuda")
        assert rules[getattr(F, operation)].dtype == torch.float32
        return
    found = result_dtype(operation, input_dtype, device_type, PrecisionPolicy.default())
    if (operation, device_type) == ("binary_cross_entropy", "cuda"):
        assert "unsafe to autocast" in found
    elif operation in PRODUCTS_WITH_A_VECTOR and device_type == "cpu":
        assert found == input_dtype  # as autocast has it there
    else:
        assert found == (LOW if operation in FAMILIES["matmuls"] else torch.float32)


@pytest.mark.parametrize("device_type", ["mps", "xpu"])
@pytest.mark.parametrize("operation", sorted(KNOWN_OPERATIONS))
def test_devices_that_cannot_be_run_here_have_kernels_for_what_their_list_says(
    operation: str, device_type: str
) -> None:
    if by_autocast(operation, device_type) is None or operation in ("softmin", "cross_entropy"):
        return  # softmin and cross_entropy call operations that are on the list
    key = {"mps": "AutocastMPS", "xpu": "AutocastXPU"}[device_type]
    overloads = [f"aten::{stem}{operation}{suffix}" for stem in ("", "linalg_") for suffix in ("", ".int", ".input")]
    assert any(torch._C._dispatch_has_kernel_for_dispatch_key(name, key) for name in overloads if exists(name))


def exists(name: str) -> bool:
    return name in torch._C._dispatch_get_all_op_names()


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "low"])
@pytest.mark.parametrize(
    ("operation", "device_type"),
    [
        ("batch_norm", "cpu"),
        *((name, kind) for name in ("softmax", "linear", "gelu", "conv2d") for kind in ("cpu", "cuda")),
    ],
)
def test_any_operation_runs_in_any_dtype(operation: str, device_type: str, dtype: str) -> None:
    policy = PrecisionPolicy([(f"op:{operation}", dtype)])
    wanted = torch.float32 if dtype == "fp32" else LOW
    assert {result_dtype(operation, source, device_type, policy) for source in (torch.float32, LOW)} == {wanted}


def test_rules_that_autocast_carries_out_need_no_mode() -> None:
    policy = PrecisionPolicy(
        [("softmax", "fp32"), ("layer_norm", "fp32"), ("cross_entropy", "fp32"), ("linear", "low")]
    )
    resolved = policy.resolve(torch.nn.Identity())
    assert operation_rules(resolved, "cuda") == operation_rules(resolved, "xpu") == {}
    assert F.linear not in operation_rules(resolved, "cpu")
    assert F.cross_entropy not in operation_rules(resolved, "cpu")
    assert {F.softmax, torch.softmax, Tensor.softmax, F.layer_norm} <= set(operation_rules(resolved, "cpu"))
    # A device type that nobody described: nothing is taken for granted.
    assert {F.softmax, F.layer_norm, F.cross_entropy, F.linear} <= set(operation_rules(resolved, "hpu"))


def test_every_way_to_call_softmax_is_reached() -> None:
    x = torch.zeros(2, 2, dtype=LOW)
    scope = PolicyScope("cpu")
    rules = operation_rules(PrecisionPolicy({"softmax": "fp32"}).resolve(torch.nn.Identity()), "cpu")
    calls = [
        lambda: F.softmax(x, -1),
        lambda: torch.softmax(x, -1),
        lambda: x.softmax(-1),
        lambda: torch.special.softmax(x, -1),
        lambda: torch.nn.Softmax(-1)(x),
        lambda: F.softmax(input=x, dim=-1),
    ]
    with torch.autocast("cpu", LOW):
        assert {call().dtype for call in calls} == {LOW}
        with scope.active(LOW), OperationRules(rules, scope):
            assert {call().dtype for call in calls} == {torch.float32}
            assert F.softmax(x, -1, dtype=LOW).dtype == LOW  # the caller's own word


def test_without_autocast_and_asleep_the_mode_does_nothing() -> None:
    x = torch.zeros(2, 2, dtype=LOW)
    scope = PolicyScope("cpu")
    rules = operation_rules(PrecisionPolicy({"softmax": "fp32"}).resolve(torch.nn.Identity()), "cpu")
    with OperationRules(rules, scope):
        with scope.active(LOW):
            assert F.softmax(x, -1).dtype == LOW
        with torch.autocast("cpu", LOW):
            assert F.softmax(x, -1).dtype == LOW


def test_batch_norm_in_16_bit_computes_in_fp32_and_keeps_its_statistics() -> None:
    """Why the family "norms" leaves it out: only its output is rounded."""
    x = torch.randn(16, 4).to(LOW)
    exact, rounded = torch.nn.BatchNorm1d(4), torch.nn.BatchNorm1d(4)
    torch.nn.init.normal_(exact.weight)
    rounded.load_state_dict(exact.state_dict())
    with torch.autocast("cpu", LOW):
        assert torch.equal(rounded(x), exact(x.float()).to(LOW))
    torch.testing.assert_close(rounded.running_var, exact.running_var)
    assert rounded.running_var.dtype == torch.float32


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_a_rule_about_batch_norm_keeps_its_statistics(dtype: str) -> None:
    norm, reference = torch.nn.BatchNorm1d(4), torch.nn.BatchNorm1d(4)
    scope = PolicyScope("cpu")
    rules = operation_rules(PrecisionPolicy({"batch_norm": dtype}).resolve(norm), "cpu")
    x = torch.randn(16, 4)
    with torch.autocast("cpu", LOW), scope.active(LOW), OperationRules(rules, scope):
        norm(x)
    reference(x if dtype == "fp32" else x.to(LOW).float())
    torch.testing.assert_close(norm.running_mean, reference.running_mean)
    assert norm.running_mean.abs().sum() > 0


def test_names_lead_to_functions() -> None:
    assert all(functions_of(name) for name in KNOWN_OPERATIONS)
    for written in ("cumsum", "torch.cumsum", "Tensor.cumsum"):
        assert operations_named(written) == ("cumsum",)
    for written in ("fft_rfft", "fft.rfft", "torch.fft.rfft"):
        assert operations_named(written) == ("fft_rfft",)
    assert operations_named("torch.nn.functional.softmax") == operations_named("F.softmax") == ("softmax",)
    assert functions_of("fft_rfft") == {torch.fft.rfft}
    assert operations_named("no_such_thing") == operations_named("_softmax") == operations_named("add_") == ()
    assert operation_of_module(torch.nn.SyncBatchNorm(4)) == "batch_norm"
