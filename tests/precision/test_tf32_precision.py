"""TF32Precision: what it switches, that all of it is put back, and where it is refused."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from small_models import Regression, loader, quiet_trainer, regression_batches, weights

from lightning_mp import TF32Precision
from lightning_mp.training.precision import tf32
from lightning_mp.training.precision.tf32 import tf32_matmuls_and_convolutions, why_no_tf32

BACKENDS: Any = torch.backends

# Everything that torch 2.11 to 2.13 lets one read about TF32, the CPU's settings included.
READERS: dict[str, Callable[[], Any]] = {
    "old matmul precision": torch.get_float32_matmul_precision,
    "old matmul switch": lambda: BACKENDS.cuda.matmul.allow_tf32,
    "old cudnn switch": lambda: BACKENDS.cudnn.allow_tf32,
    "everything": lambda: BACKENDS.fp32_precision,
    "cuda": lambda: BACKENDS.cudnn.fp32_precision,
    "cuda matmul": lambda: BACKENDS.cuda.matmul.fp32_precision,
    "cudnn conv": lambda: BACKENDS.cudnn.conv.fp32_precision,
    "cudnn rnn": lambda: BACKENDS.cudnn.rnn.fp32_precision,
    "cpu": lambda: BACKENDS.mkldnn.fp32_precision,
    "cpu matmul": lambda: BACKENDS.mkldnn.matmul.fp32_precision,
    "cpu conv": lambda: BACKENDS.mkldnn.conv.fp32_precision,
}


def read(reader: Callable[[], Any]) -> Any:
    """torch raises where old and new switches disagree; that, too, is a state to keep."""
    try:
        return reader()
    except RuntimeError:
        return "they disagree"


def settings() -> dict[str, Any]:
    return {name: read(reader) for name, reader in READERS.items()}


def deep_settings() -> list[dict[str, Any]]:
    """Also what shows when a parent is taken away: a child may hold a value of its own or follow its parent."""
    seen = [settings()]
    everything, BACKENDS.fp32_precision = BACKENDS.fp32_precision, "none"
    seen.append(settings())
    cuda, BACKENDS.cudnn.fp32_precision = BACKENDS.cudnn.fp32_precision, "none"
    seen.append(settings())
    BACKENDS.fp32_precision, BACKENDS.cudnn.fp32_precision = everything, cuda
    return seen


def set_to_defaults() -> None:
    BACKENDS.fp32_precision = BACKENDS.cudnn.fp32_precision = "none"
    torch.set_float32_matmul_precision("highest")
    BACKENDS.cuda.matmul.fp32_precision = BACKENDS.mkldnn.matmul.fp32_precision = "none"
    BACKENDS.cudnn.allow_tf32 = True


@pytest.fixture(autouse=True)
def _defaults() -> Iterator[None]:
    set_to_defaults()  # torch 2.11 has a third name for them, "ieee", until somebody sets one
    before = settings()
    yield
    set_to_defaults()
    assert settings() == before


def assign(owner: Any, name: str, value: Any) -> Callable[[], None]:
    return lambda: setattr(owner, name, value)


WAYS_TO_SET: dict[str, Callable[[], None]] = {
    f"{label}={value}": assign(owner, name, value)
    for label, owner, name, values in [
        ("everything", BACKENDS, "fp32_precision", ["none", "ieee", "tf32", "bf16"]),
        ("cuda", BACKENDS.cudnn, "fp32_precision", ["none", "ieee", "tf32"]),
        ("cuda matmul", BACKENDS.cuda.matmul, "fp32_precision", ["none", "ieee", "tf32"]),
        ("conv", BACKENDS.cudnn.conv, "fp32_precision", ["none", "ieee", "tf32"]),
        ("rnn", BACKENDS.cudnn.rnn, "fp32_precision", ["none", "ieee", "tf32"]),
        ("cpu matmul", BACKENDS.mkldnn.matmul, "fp32_precision", ["none", "ieee", "tf32", "bf16"]),
        ("old matmul", BACKENDS.cuda.matmul, "allow_tf32", [False, True]),
        ("old cudnn", BACKENDS.cudnn, "allow_tf32", [False, True]),
    ]
    for value in values
} | {
    f"old precision={value}": lambda value=value: torch.set_float32_matmul_precision(value)
    for value in ("highest", "high", "medium")
}


# -- the settings ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("caller", [None, "old precision=medium", "old cudnn=False", "conv=ieee", "cuda matmul=tf32"])
def test_inside_everything_on_cuda_is_tf32_and_old_and_new_switches_agree(caller):
    if caller is not None:
        WAYS_TO_SET[caller]()
    with tf32_matmuls_and_convolutions():
        inside = settings()
    assert {inside[name] for name in ("cuda matmul", "cudnn conv", "cudnn rnn")} == {"tf32"}
    assert inside["old matmul switch"] is True
    assert inside["old cudnn switch"] is True
    assert inside["old matmul precision"] == ("medium" if caller == "old precision=medium" else "high")


@given(st.lists(st.sampled_from(sorted(WAYS_TO_SET)), max_size=6))
def test_whatever_the_caller_had_set_is_put_back(steps):
    set_to_defaults()
    for step in steps:
        WAYS_TO_SET[step]()
    before = deep_settings()
    with tf32_matmuls_and_convolutions():
        assert BACKENDS.cuda.matmul.fp32_precision == "tf32"
    assert deep_settings() == before


@given(st.sampled_from(sorted(WAYS_TO_SET)))
def test_what_is_set_in_between_does_not_stay(step):
    set_to_defaults()
    before = deep_settings()
    cpu = "cpu matmul"  # is nobody's business here
    with tf32_matmuls_and_convolutions():
        WAYS_TO_SET[step]()
    after = deep_settings()
    for state in (*before, *after):
        if step.startswith((cpu, "old precision")):
            state.pop(cpu)
            state.pop("old matmul precision")
    assert after == before


def test_settings_of_the_cpu_are_not_touched():
    BACKENDS.mkldnn.matmul.fp32_precision = "bf16"
    before = settings()
    with tf32_matmuls_and_convolutions():
        inside = settings()
    assert {name: inside[name] for name in inside if name.startswith("cpu")} == {
        name: before[name] for name in before if name.startswith("cpu")
    }


def test_it_nests():
    before = deep_settings()
    with ExitStack() as stack:
        stack.enter_context(tf32_matmuls_and_convolutions())
        first = deep_settings()
        with tf32_matmuls_and_convolutions():
            assert deep_settings() == first
        assert deep_settings() == first
    assert deep_settings() == before


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_nvidia_devices_from_ampere_on_have_tf32(capability):
    assert why_no_tf32("cuda", capability) is None


@pytest.mark.parametrize(
    ("device", "wrong", "instead"),
    [
        ({"device_type": "cpu"}, "this is 'cpu'", "Trainer(precision='32-true')"),
        ({"device_type": "mps"}, "this is 'mps'", "AutocastPrecision('bf16-mixed')"),
        ({"device_type": "cuda", "capability": (7, 5)}, "compute capability 7.5", "AutocastPrecision('16-mixed')"),
        ({"device_type": "cuda", "capability": (9, 4), "is_rocm": True}, "an AMD device", "AutocastPrecision("),
    ],
)
def test_other_devices_are_told_why_not_and_what_to_do(device, wrong, instead):
    reason = why_no_tf32(**device)
    assert wrong in reason
    assert instead in reason


# -- the plugin --------------------------------------------------------------------------------------------------------


def fit(module: Regression, **arguments: Any) -> None:
    quiet_trainer(plugins=[TF32Precision()], **arguments).fit(module, loader(regression_batches(4)))


def test_on_a_cpu_it_is_refused_and_nothing_is_switched():
    module = Regression()
    before, start = deep_settings(), weights(module)
    with pytest.raises(MisconfigurationException, match=r"TF32Precision cannot run on this device: .* this is 'cpu'"):
        fit(module)
    assert deep_settings() == before
    assert all(torch.equal(a, b) for a, b in zip(start, weights(module), strict=True))


class Watches(Regression):
    """Looks at the settings in forward and backward, and may fail."""

    def __init__(self, fail_at: int | None = None) -> None:
        super().__init__()
        self.fail_at = fail_at
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.seen.append(BACKENDS.cuda.matmul.fp32_precision)
        if batch_idx == self.fail_at:
            raise ZeroDivisionError
        assert not torch.is_autocast_enabled("cpu")
        return super().training_step(batch, batch_idx)

    def on_after_backward(self) -> None:
        self.seen.append(BACKENDS.cudnn.conv.fp32_precision)


@pytest.fixture
def _cpu_passes_for_a_device_with_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tf32, "why_no_tf32", lambda *_, **__: None)


@pytest.mark.usefixtures("_cpu_passes_for_a_device_with_tf32")
@pytest.mark.parametrize("fail_at", [None, 2])
def test_settings_hold_for_the_whole_fit_and_are_put_back(fail_at):
    torch.set_float32_matmul_precision("medium")
    BACKENDS.cudnn.allow_tf32 = False
    before = deep_settings()
    module = Watches(fail_at)
    with pytest.raises(ZeroDivisionError) if fail_at is not None else nullcontext():
        fit(module)
    assert module.seen == ["tf32"] * (8 if fail_at is None else 5)
    assert deep_settings() == before


@pytest.mark.usefixtures("_cpu_passes_for_a_device_with_tf32")
def test_on_the_cpu_where_tf32_changes_nothing_it_equals_fp32():
    ours, stock = Regression(), Regression()
    fit(ours, gradient_clip_val=0.1)
    quiet_trainer(gradient_clip_val=0.1).fit(stock, loader(regression_batches(4)))
    torch.testing.assert_close(weights(ours), weights(stock), rtol=1e-6, atol=1e-7)


@pytest.mark.gpu
def test_matrix_products_on_cuda_are_rounded_to_tf32():
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("needs compute capability 8.0")
    a, b = (torch.randn(512, 512, device="cuda") for _ in range(2))
    exact = a.double() @ b.double()
    with tf32_matmuls_and_convolutions():
        rounded = (a @ b - exact).norm() / exact.norm()
    full = (a @ b - exact).norm() / exact.norm()
    # 10 mantissa bits: relative noise of each factor 2^-10 / sqrt(28), of the product sqrt(2) times that: 2.6e-4.
    assert 1e-4 < rounded < 6e-4
    assert full < 1e-5


@pytest.mark.gpu
def test_a_fit_on_cuda_multiplies_in_tf32():
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("needs compute capability 8.0")
    before = deep_settings()
    module = Watches()
    fit(module, accelerator="gpu")
    assert module.seen == ["tf32"] * 8
    assert deep_settings() == before
