"""What torch refuses in 16 bit runs under the default policy; without one, preflight and the error name it."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from small_models import WIDTH, Trained, loader, quiet_trainer, regression_batches, sgd
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_mp import AutocastPrecision, MasterWeightsPrecision, PrecisionPolicy, preflight
from lightning_mp.training.policy.fails_in_16_bit import WatchFor16Bit, refused_by
from lightning_mp.training.policy.module_rules import PolicyScope
from lightning_mp.training.policy.operation_rules import OperationRules, operation_rules
from lightning_mp.training.policy.operations import FAMILIES

FORMATS = {"fp16": torch.float16, "bf16": torch.bfloat16}
MASK = torch.eye(4, dtype=torch.bool)
TOO_LARGE = {"fp16": -1e9, "bf16": torch.finfo(torch.float32).min}

# By the name of a rule; what is not here takes one invertible matrix.
CALLS: dict[str, Callable[[Tensor], Any]] = {
    "cdist": lambda x: torch.cdist(x, x),
    "cholesky_solve": lambda x: torch.cholesky_solve(x, x),
    "complex": lambda x: torch.complex(x, x),
    "linalg_householder_product": lambda x: torch.linalg.householder_product(x, x[0]),
    "linalg_ldl_solve": lambda x: torch.linalg.ldl_solve(x, torch.tensor([1, 2, 3, 4], dtype=torch.int32), x),
    "linalg_lstsq": lambda x: torch.linalg.lstsq(x, x),
    "linalg_lu_solve": lambda x: torch.linalg.lu_solve(x, torch.tensor([1, 2, 3, 4], dtype=torch.int32), x),
    "linalg_solve": lambda x: torch.linalg.solve(x, x),
    "linalg_solve_ex": lambda x: torch.linalg.solve_ex(x, x),
    "linalg_solve_triangular": lambda x: torch.linalg.solve_triangular(x, x, upper=True),
    "linalg_tensorinv": lambda x: torch.linalg.tensorinv(x, ind=1),
    "linalg_tensorsolve": lambda x: torch.linalg.tensorsolve(x, x[0]),
    "nanquantile": lambda x: torch.nanquantile(x, 0.5),
    "pdist": F.pdist,
    "polar": lambda x: torch.polar(x, x),
    "quantile": lambda x: torch.quantile(x, 0.5),
    "stft": lambda x: torch.stft(x[0], 4, window=torch.ones(4), return_complex=True),
    "view_as_complex": lambda x: torch.view_as_complex(x.view(4, 2, 2)),
}


def call_of(name: str) -> Callable[[Tensor], Any]:
    prefix, _, rest = name.partition("_")
    namespace: Any = {"fft": torch.fft, "linalg": torch.linalg}.get(prefix, torch)
    return CALLS[name] if name in CALLS else getattr(namespace, rest if namespace is not torch else name)


def first_tensor(result: Any) -> Tensor:
    return result if isinstance(result, Tensor) else result[-1]


@pytest.mark.parametrize("low", FORMATS)
@pytest.mark.parametrize("name", FAMILIES["fp32_only"])
def test_the_default_policy_runs_what_torch_refuses(name: str, low: str) -> None:
    x = torch.diag(torch.tensor([1.0, 2.0, 3.0, 4.0])).to(FORMATS[low])
    scope = PolicyScope("cpu")
    rules = operation_rules(PrecisionPolicy.default().resolve(nn.Identity()), "cpu")
    with torch.autocast("cpu", FORMATS[low]), scope.active(FORMATS[low]), OperationRules(rules, scope):
        torch.manual_seed(0)
        found = first_tensor(call_of(name)(x))
    torch.manual_seed(0)
    torch.testing.assert_close(found, first_tensor(call_of(name)(x.float())))


FILLS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "masked_fill": lambda x, number: x.masked_fill(MASK, number),
    "index_fill": lambda x, number: x.index_fill(0, torch.tensor([0]), number),
    "full_like": torch.full_like,
    "new_full": lambda x, number: x.new_full((2,), number),
    "clamp": lambda x, number: x.clamp(min=number),
    "pad": lambda x, number: F.pad(x, (0, 1), value=number),
    "scatter": lambda x, number: x.scatter(0, torch.zeros(1, 4, dtype=torch.int64), number),
}


@pytest.mark.parametrize("low", FORMATS)
@pytest.mark.parametrize("name", FAMILIES["fills"])
def test_the_default_policy_casts_only_for_a_number_that_is_out_of_range(name: str, low: str) -> None:
    x = torch.ones(4, 4, dtype=FORMATS[low])
    scope = PolicyScope("cpu")
    for policy, of_a_small_number in ((PrecisionPolicy.default(), FORMATS[low]), (f"op:{name}", torch.float32)):
        policy = policy if isinstance(policy, PrecisionPolicy) else PrecisionPolicy({policy: "fp32"})
        rules = operation_rules(policy.resolve(nn.Identity()), "cpu")
        with torch.autocast("cpu", FORMATS[low]), scope.active(FORMATS[low]), OperationRules(rules, scope):
            assert FILLS[name](x, -1.0).dtype == FILLS[name](x, float("-inf")).dtype == of_a_small_number
            found = FILLS[name](x, TOO_LARGE[low])
        assert found.dtype == torch.float32
        assert torch.equal(found, FILLS[name](x.float(), TOO_LARGE[low]))


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("low", FORMATS)
@pytest.mark.parametrize("name", [*FAMILIES["fills"], *FAMILIES["fp32_only"]])
def test_a_watch_notes_what_torch_refuses(name: str, low: str) -> None:
    """With the device's own autocast where it has the operation on its list."""
    call = (lambda x: FILLS[name](x, TOO_LARGE[low])) if name in FILLS else call_of(name)
    x = torch.diag(torch.tensor([1.0, 2.0, 3.0, 4.0])).to(FORMATS[low])
    watch = WatchFor16Bit("cpu", nn.Identity)
    error = None
    with watch, torch.autocast("cpu", FORMATS[low]):
        try:
            call(x)
        except RuntimeError as raised:
            error = raised
    assert (watch.refused.operation if watch.refused is not None else "") == (name if error is not None else "")
    assert error is None or refused_by(error, nn.Identity()) is not None


class Core(nn.Module):
    def __init__(self, call: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.call = call

    def forward(self, hidden: Tensor) -> Tensor:
        return self.call(hidden @ hidden.T).float().softmax(-1) @ hidden


def made(call: Callable[[Tensor], Tensor]) -> Trained:
    return Trained(
        lambda m, batch: F.mse_loss(m.last(m.core(m.first(batch[0]))).float(), batch[1]),
        sgd,
        first=lambda: nn.Linear(WIDTH, WIDTH),
        core=lambda: Core(call),
        last=lambda: nn.Linear(WIDTH, 1),
    )


@pytest.mark.parametrize(
    ("call", "said", "cures"),
    [
        (
            lambda x: x.masked_fill(torch.eye(len(x), dtype=torch.bool), -1e9),
            "masked_fill",
            [{"masked_fill": "fp32"}, {"core": "fp32"}, PrecisionPolicy.default()],
        ),
        (lambda x: (x + 0).masked_fill_(torch.eye(len(x), dtype=torch.bool), -1e9), "masked_fill_", [{"core": "fp32"}]),
        (
            lambda x: x * torch.linalg.slogdet(x)[1],
            "linalg_slogdet",
            [{"linalg_slogdet": "fp32"}, {"core": "fp32"}, PrecisionPolicy.default()],
        ),
    ],
)
def test_preflight_and_the_error_name_what_cures(call: Any, said: str, cures: list[Any]) -> None:
    data = loader(regression_batches(2))
    report = preflight(quiet_trainer(plugins=[AutocastPrecision("16-mixed")]), made(call), data)
    [finding] = [finding for finding in report.findings if finding.severity == "error"]
    with pytest.raises(RuntimeError) as caught:
        quiet_trainer(plugins=[AutocastPrecision("16-mixed")], max_steps=1).fit(made(call), data)
    [hint] = caught.value.__notes__
    assert f"{said} (test_refused_in_16_bit.py:" in finding.what
    for cure in cures:
        written = "PrecisionPolicy.default()" if isinstance(cure, PrecisionPolicy) else str(cure)
        assert f"policy={written}" in finding.cure
        assert f"policy={written}" in hint
        make = partial(AutocastPrecision, "16-mixed", policy=cure)
        assert not preflight(quiet_trainer(plugins=[make()]), made(call), data).findings
        quiet_trainer(plugins=[make()], max_steps=1).fit(made(call), data)
    assert ("default()" in finding.cure) == any(isinstance(cure, PrecisionPolicy) for cure in cures)
    assert ("finfo" in finding.cure) == said.startswith("masked_fill")


def test_masters_under_the_default_policy() -> None:
    net = made(lambda x: x.masked_fill(torch.eye(len(x), dtype=torch.bool), -1e9))
    trainer = quiet_trainer(plugins=[MasterWeightsPrecision("16-true", policy=PrecisionPolicy.default())], max_steps=1)
    assert not preflight(trainer, net, loader(regression_batches(2))).findings
    trainer.fit(net, loader(regression_batches(2)))


def test_what_autocast_casts_by_itself_is_not_reported() -> None:
    net = made(lambda x: x * torch.linalg.svdvals(x).sum())
    trainer = quiet_trainer(plugins=[AutocastPrecision("16-mixed")], max_steps=1)
    assert not preflight(trainer, net, loader(regression_batches(2))).findings
    [finding] = preflight(trainer, net, loader(regression_batches(2)), device="H100").findings
    assert "linalg_svdvals" in finding.what  # not on CUDA's list


@pytest.mark.parametrize(("size", "refused"), [(4, False), (6, True)])
def test_cufft_takes_powers_of_two_in_fp16(size: int, refused: bool) -> None:
    for low in FORMATS.values():
        watch = WatchFor16Bit("cuda", nn.Identity)
        with watch, pytest.raises(RuntimeError, match="Unsupported dtype"):  # the CPU's
            torch.fft.rfft(torch.ones(4, size, dtype=low))
        assert (watch.refused is not None) == (refused or low == torch.bfloat16)


def test_other_errors_have_no_hint() -> None:
    def fails(_: Tensor) -> Tensor:
        raise RuntimeError("no")

    trainer = quiet_trainer(plugins=[AutocastPrecision("16-mixed")], max_steps=1)
    with pytest.raises(RuntimeError) as caught:
        trainer.fit(made(fails), loader(regression_batches(2)))
    assert not getattr(caught.value, "__notes__", [])


def test_a_bare_name_that_is_an_operation_and_no_module_is_answered() -> None:
    with pytest.raises(ValueError, match=r"matches none .* For torch's operation of that name write 'op:cumsum'"):
        PrecisionPolicy({"cumsum": "fp32"}).resolve(Core(torch.relu))
