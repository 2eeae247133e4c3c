"""Faults planted at a known place: PrecisionAudit names the place and what to do, and nothing else."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from audit_models import CLASSES, WIDTH, InFp64, Known, audited, batches
from lightning.pytorch.plugins import MixedPrecision
from small_models import Parts, loader
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_mp import AutocastPrecision, Float8Precision, LossScaler, MasterWeightsPrecision, PrecisionPolicy
from lightning_mp.monitors.diagnostics.audit.findings import find_problems
from lightning_mp.monitors.diagnostics.audit.requested import RequestedPrecision
from lightning_mp.monitors.diagnostics.audit.watch import audit_step

DEFAULT = PrecisionPolicy.default()


class WithoutAutocast(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return self.inner(x.float())


class UnderBf16(WithoutAutocast):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.inner(x)


class CalledAside(WithoutAutocast):
    """Calls a method of the inner module that is not its forward."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.inner.weight, self.inner.bias)


class HandNorm(nn.Module):
    """Known for a norm by its name."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (x.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt()


# as in a power iteration: fp32 under autocast on a CPU
product_with_vector = Parts(lambda _, x: x * torch.mv(torch.eye(8), torch.ones(8)).mean())
softmax = Parts(lambda _, x: torch.softmax(x, -1))


def cast_by_hand(operation: Callable[[Tensor], Tensor]) -> Parts:
    """An operation on 16-bit numbers where autocast does not cast."""
    return Parts(lambda _, x: operation(x.float().bfloat16()).float())


def loss_inside(_: nn.Module, x: Tensor) -> Tensor:
    """A loss that is written on 16-bit numbers where autocast cannot see it."""
    with torch.autocast("cpu", enabled=False):
        low = x.bfloat16()
        return x + F.mse_loss(low, torch.zeros_like(low))


def put(name: str, part: Any) -> Callable[[Known], None]:
    """Replaces a part of the model; a class is put around what is there."""

    def plant(module: Known) -> None:
        setattr(module, name, part(getattr(module, name)) if isinstance(part, type) else part)

    return plant


def resize(module: Known) -> None:
    module.first, module.norm, module.middle = nn.Linear(WIDTH, 100), nn.LayerNorm(100), nn.Linear(100, 32)


def cast(module: Known) -> None:
    module.middle = module.middle.half()
    module.middle.forward = _half_forward(module.middle)


def _half_forward(linear: nn.Linear) -> Any:
    def forward(x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return F.linear(x.half(), linear.weight, linear.bias).float()

    return forward


def everything_without_autocast(module: Known) -> None:
    inner = module.training_step

    def training_step(batch: Any, batch_idx: int) -> Any:
        with torch.autocast("cpu", enabled=False):
            return inner(batch, batch_idx)

    module.training_step = training_step


def bf16(policy: Any = DEFAULT) -> dict[str, Any]:
    return {"plugins": [AutocastPrecision("bf16-mixed", policy=policy)]}


def fp16() -> dict[str, Any]:
    return {"plugins": [AutocastPrecision("16-mixed", scaler=LossScaler(init_scale=256.0), policy=DEFAULT)]}


def not_active(precision: str) -> list[tuple[str, tuple[str, ...], str]]:
    text = f"Mixed precision is not active: every product ran in fp32 in a {precision} run"
    return [("not_active", ("first", "middle", "mix", "last"), text)]


ODD_SIZES = [
    ("tensor_cores", ("first",), "out_features is 100, not a multiple of 8: first."),
    ("tensor_cores", ("middle",), "in_features is 100, not a multiple of 8: middle."),
]
HEAD_IN_FP32 = PrecisionPolicy([("middle.inner", "fp32"), *DEFAULT.rules])

# name: what is planted, the run, and all findings there should be: kind, modules, a part of the text.
PLANTED: dict[str, tuple[Callable[[Known], None], Any, list[tuple[str, tuple[str, ...], str]]]] = {
    "nothing": (lambda module: None, bf16, []),
    "autocast off in one module": (
        put("middle", WithoutAutocast),
        lambda: bf16(None),
        [("fp32_matmul", ("middle.inner",), "addmm ran in fp32 in a bf16-mixed run: middle.inner.")],
    ),
    "autocast off in a module of which a policy asks 16 bit": (
        put("middle", WithoutAutocast),
        bf16,
        [("policy", ("middle.inner",), "addmm ran in fp32 though the policy says bf16: middle.inner.")],
    ),
    "autocast off everywhere": (
        everything_without_autocast,
        lambda: {"precision": "bf16-mixed"},
        not_active("bf16-mixed"),
    ),
    "autocast off everywhere, under a policy": (everything_without_autocast, bf16, not_active("bf16-mixed")),
    "autocast off everywhere, 16-mixed": (
        everything_without_autocast,
        lambda: {"plugins": [MixedPrecision("16-mixed", "cpu", LossScaler(init_scale=256.0))]},
        not_active("16-mixed"),
    ),
    "a module that the policy keeps in fp32, called aside": (
        put("middle", CalledAside),
        lambda: bf16(PrecisionPolicy([("middle", "low"), *DEFAULT.rules])),
        [],
    ),
    "a rule about a module that another module goes round": (
        put("middle", CalledAside),
        lambda: bf16(HEAD_IN_FP32),
        [],
    ),
    "another 16 bit inside": (
        put("middle", UnderBf16),
        fp16,
        [("policy", ("middle.inner",), "addmm ran in bf16 though the policy says fp16: middle.inner.")],
    ),
    "another 16 bit without a policy": (
        cast,
        lambda: {"precision": "32-true"},
        [("other_format", ("middle",), "Products ran in fp16 in a 32-true run: middle.")],
    ),
    "a softmax and norms that a CPU's autocast leaves in 16 bit": (put("norm", softmax), lambda: bf16(None), []),
    "a softmax that was cast by hand": (
        put("norm", cast_by_hand(lambda x: x.softmax(-1))),
        lambda: bf16({"mix": "fp32"}),
        [("low_precision", ("norm",), "softmax ran in bf16: norm.")],
    ),
    "a norm that was cast by hand": (
        put("norm", cast_by_hand(lambda x: F.layer_norm(x, x.shape[1:]))),
        lambda: bf16({"softmaxes": "fp32"}),
        [("low_precision", ("norm",), "layer_norm ran in bf16: norm.")],
    ),
    "log-probabilities in 16 bit": (
        put("norm", nn.LogSoftmax(-1)),
        lambda: bf16(None),
        [("low_precision", ("norm",), "log_softmax ran in bf16: norm.")],
    ),
    "a product with a vector that a family rule leaves in fp32": (put("norm", product_with_vector), bf16, []),
    "a norm in 16 bit that the policy asks for": (
        lambda module: None,
        lambda: bf16({"norms": "bf16", "softmaxes": "fp32"}),
        [],
    ),
    "a norm by hand": (
        put("norm", HandNorm()),
        bf16,
        [("low_precision", ("norm",), "the sums of a norm ran in bf16: norm.")],
    ),
    "a loss in 16 bit": (
        put("norm", Parts(loss_inside)),
        lambda: bf16({"mix": "fp32"}),
        [("low_precision", ("norm",), "mse_loss ran in bf16: norm.")],
    ),
    "64-bit numbers": (put("norm", InFp64()), bf16, [("fp64", ("norm",), "64-bit floating-point numbers: norm.")]),
    "64-bit numbers in fp32": (
        put("norm", InFp64()),
        dict,
        [("fp64", ("norm",), "64-bit floating-point numbers: norm.")],
    ),
    "64-bit numbers that were asked for": (put("norm", InFp64()), lambda: {"precision": "64-true"}, []),
    "an odd size": (resize, bf16, ODD_SIZES),
    "an odd size in fp32": (resize, dict, []),
    "16-bit weights": (resize, lambda: {"plugins": [MasterWeightsPrecision("bf16-true")]}, ODD_SIZES),
}


@pytest.mark.parametrize("case", PLANTED)
def test_a_planted_fault_is_named_and_nothing_else(case: str) -> None:
    plant, run, expected = PLANTED[case]
    module = Known()
    plant(module)
    found = audited(module, **run()).findings
    assert [(finding.kind, finding.modules) for finding in found] == [row[:2] for row in expected]
    for finding, (_, _, text) in zip(found, expected, strict=True):
        assert finding.what.startswith(text)
        guess = f"Likely cause (a guess): {finding.likely_cause} " if finding.likely_cause else ""
        assert str(finding) == f"{finding.what} {guess}{finding.advice}"


def test_an_fp8_layer_that_is_gone_round_is_named() -> None:
    module = Known()
    plugin = Float8Precision(emulate=True, skip_small=False, skip_first_and_last=False)

    def forward(x: Tensor) -> Tensor:
        return F.gelu(x @ module.middle.weight.t())

    original = plugin.convert_module

    def convert(model: nn.Module) -> nn.Module:
        converted = original(model)
        module.middle.forward = forward  # after the layers were chosen
        return converted

    plugin.convert_module = convert  # type: ignore[method-assign]
    found = audited(module, loader(batches()), plugins=[plugin]).findings
    assert [finding.modules for finding in found if finding.kind == "not_fp8"] == [("middle",)]


@pytest.mark.parametrize(
    ("make", "size", "expected"),
    [
        (lambda: nn.Conv2d(100, 8, 3), (2, 100, 8, 8), ["in_channels is 100, not a multiple of 8: ."]),
        (lambda: nn.ConvTranspose2d(8, 65, 3), (2, 8, 8, 8), ["out_channels is 65, not a multiple of 8: ."]),
        (lambda: nn.Linear(100, 8, bias=False), (8, 100), ["in_features is 100, not a multiple of 8: ."]),
        (lambda: nn.Linear(8, 50257), (8, 8), ["out_features is 50257, not a multiple of 8: ."]),
        (lambda: nn.Conv2d(3, 8, 3), (2, 3, 8, 8), []),
        (lambda: nn.Linear(12, 10), (197, 12), []),
    ],
    ids=["conv", "transposed conv", "linear", "vocabulary", "colours of an image", "classes of an odd batch"],
)
def test_the_dimension_that_misses_tensor_cores_is_named(make: Any, size: tuple[int, ...], expected: list[str]) -> None:
    model = make()

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(torch.ones(size)).float().sum()
        loss.backward()

    found = find_problems(audit_step(model, step), RequestedPrecision("bf16-mixed"))
    assert [finding.what.replace("the step around the model", "") for finding in found] == expected
    assert all(finding.kind == "tensor_cores" for finding in found)


class Attention(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x)


@pytest.mark.parametrize("autocast", [True, False])
def test_attention_that_torch_computes_in_parts_is_no_finding(autocast: bool) -> None:
    """On the CPU attention over 3-D tensors has no fused kernel, and torch casts 16-bit inputs up to fp32.

    With autocast off its inputs were fp32 already, and that is one.
    """
    model = nn.Sequential(nn.Linear(8, 8), Attention())

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            x = model[0](torch.ones(2, 8, 8))
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = model[1](x if autocast else x.float()).float().sum()
        loss.backward()

    found = find_problems(audit_step(model, step), RequestedPrecision("bf16-mixed"))
    assert [(finding.kind, finding.modules) for finding in found] == [] if autocast else [("fp32_matmul", ("1",))]


def test_a_finding_says_what_is_certain_and_what_is_a_guess() -> None:
    module = Known()
    module.middle = WithoutAutocast(module.middle)
    (finding,) = audited(module, **bf16(None)).findings
    assert str(finding) == (
        "addmm ran in fp32 in a bf16-mixed run: middle.inner. Likely cause (a guess): torch.autocast(enabled=False), a"
        " custom autograd function, or a buffer that is fp32. If it is intended, say so in a PrecisionPolicy."
    )


def test_an_operation_that_autocast_does_not_know_is_no_guess() -> None:
    """Experts in one grouped product: autocast has no rule for it, so it runs in fp32."""

    ends = torch.tensor([4, 8], dtype=torch.int32)
    experts = Parts(
        lambda module, x: F.grouped_mm(x.float(), module.weight, offs=ends),
        weight=lambda: nn.Parameter(torch.randn(2, 16, 16)),
    )
    model = nn.Sequential(nn.Linear(16, 16), experts)

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(torch.ones(8, 16)).float().square().sum()
        loss.backward()

    (finding,) = find_problems(audit_step(model, step), RequestedPrecision("bf16-mixed"))
    assert (finding.kind, finding.modules, finding.likely_cause) == ("fp32_matmul", ("1",), "")
    assert finding.what.endswith("torch's autocast has no rule for this operation on cpu.")


@pytest.mark.parametrize("precision", ["", "nf4", "transformer-engine"])
def test_of_an_unknown_precision_only_what_is_wrong_in_any_is_said(precision: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), InFp64())
    report = audit_step(model, lambda: model(torch.ones(CLASSES, 8)).sum().backward())
    assert [finding.kind for finding in find_problems(report, RequestedPrecision(precision))] == ["fp64"]
