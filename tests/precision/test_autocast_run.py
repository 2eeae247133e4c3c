"""What every plugin with autocast puts around backwards and steps, in automatic and in manual optimization."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins.precision import FSDPPrecision, MixedPrecision
from policy_models import nothing_is_left
from small_models import Regression, fit, loader, quiet_trainer, regression_batches, weights
from torch import Tensor, nn

from lightning_mp import (
    AutocastPrecision,
    Float8Precision,
    LossScaler,
    MasterWeightsPrecision,
    PrecisionPolicy,
    TF32Precision,
)
from lightning_mp.training.precision import autocast, autocast_context, master_weights

WIDTH = 16
PLUGINS: dict[str, Callable[[], Any]] = {
    "autocast": lambda: AutocastPrecision("bf16-mixed"),
    "autocast-policy": lambda: AutocastPrecision("bf16-mixed", policy=PrecisionPolicy.default()),
    "fp16": lambda: AutocastPrecision("16-mixed"),
    "fp8": lambda: Float8Precision(skip_small=False, skip_first_and_last=False),
    "fp8-policy": lambda: Float8Precision(
        skip_small=False, skip_first_and_last=False, policy=PrecisionPolicy.default()
    ),
    "master-weights": lambda: MasterWeightsPrecision("bf16-true", policy=PrecisionPolicy.default()),
    "master-weights-fp16": lambda: MasterWeightsPrecision("16-true", policy=PrecisionPolicy.default()),
}


class Net(pl.LightningModule):
    """Multiplies in fp32 by hand, and trains with an optimizer that multiplies matrices."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def loss(self, x: Tensor) -> Tensor:
        x = self.first(x)
        with torch.autocast("cpu", enabled=False):
            x = x.float() @ torch.linspace(-1, 1, WIDTH * WIDTH, dtype=torch.float32).view(WIDTH, WIDTH)
        return self.second(x.sin()).float().square().mean()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adafactor(self.parameters(), lr=1e-2)


class Manual(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.autocast_in_step: list[bool] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> None:  # type: ignore[override]
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()
        self.autocast_in_step.append(torch.is_autocast_enabled("cpu"))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.autocast_in_step.append(torch.is_autocast_enabled("cpu"))


@pytest.mark.parametrize("name", [*PLUGINS, "tf32"])
def test_every_stock_strategy_takes_the_plugin_and_sums_gradients_in_fp32(name: str) -> None:
    """Modules and tensors are made in fp32, inputs and outputs are left alone, and fp16 has a loss scale by itself."""
    plugin = TF32Precision() if name == "tf32" else PLUGINS[name]()
    assert isinstance(plugin, MixedPrecision)
    assert isinstance(plugin, FSDPPrecision)
    low = {"tf32": torch.float32}.get(name, torch.float16 if "fp16" in name else torch.bfloat16)
    config = plugin.mixed_precision_config
    assert (config.param_dtype, config.reduce_dtype, config.buffer_dtype) == (low, torch.float32, torch.float32)
    double = torch.ones(2, dtype=torch.float64)
    assert plugin.convert_input(double) is plugin.convert_output(double) is double
    with plugin.module_init_context(), plugin.tensor_init_context():
        assert nn.Linear(1, 1).weight.dtype == torch.float32
    assert isinstance(plugin.scaler, LossScaler) == ("fp16" in name)


def train(module: Net, plugin: Any) -> Net:
    generator = torch.Generator().manual_seed(1)
    fit(module, [torch.randn(4, WIDTH, generator=generator) for _ in range(3)], plugin=plugin)
    return module


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("name", PLUGINS)
def test_manual_optimization_trains_as_automatic_optimization_does(name: str) -> None:
    """Backward and step run outside of autocast, though Lightning calls them inside of the forward's context."""
    module, expected = train(Manual(), PLUGINS[name]()), train(Net(), PLUGINS[name]())
    for ours, theirs in zip(weights(module), weights(expected), strict=True):
        assert torch.equal(ours, theirs)
    assert module.autocast_in_step == [False, True] * 3, "after the step the forward's context goes on"
    assert nothing_is_left(module)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("name", ["autocast", "autocast-policy", "fp16", "fp8", "master-weights"])
def test_a_compiled_backward_runs_outside_of_autocast(name: str) -> None:
    """torch.compile alone traces it under the autocast that is on around the forward."""
    ends = []
    for compiled in (True, False):
        torch._dynamo.reset()
        module = Net()
        if compiled:
            module.loss = torch.compile(module.loss, backend="aot_eager", fullgraph=True)  # type: ignore[method-assign]
        ends.append(weights(train(module, PLUGINS[name]())))
    for ours, theirs in zip(*ends, strict=True):
        assert torch.equal(ours, theirs)


def test_emulated_bf16_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *, including_emulation: including_emulation)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla T4")
    with pytest.warns(UserWarning, match=r"Tesla T4 has no bf16 units: .* slow. Use AutocastPrecision\('16-mixed'\)\."):
        autocast_context.warn_about_emulated_bf16("cuda", "AutocastPrecision('16-mixed')")
    autocast_context.warn_about_emulated_bf16("cpu", "")
    asked: list[tuple[str, str]] = []
    for module in (autocast, master_weights):
        monkeypatch.setattr(module, "warn_about_emulated_bf16", lambda *arguments: asked.append(arguments))
    for name in ("autocast", "fp16", "master-weights", "master-weights-fp16"):
        train(Net(), PLUGINS[name]())
    assert asked == [("cpu", "AutocastPrecision('16-mixed')"), ("cpu", "MasterWeightsPrecision('16-true')")]


class NanGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * torch.nan


@pytest.mark.filterwarnings("ignore:Error detected in NanGradientBackward")
@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed"])
def test_an_anomaly_under_a_loss_scale_has_a_hint(precision):
    """Without the flag it is a step that is skipped."""

    class Overflows(Regression):
        def training_step(self, batch, batch_idx):
            return NanGradient.apply(super().training_step(batch, batch_idx))

    trainer = quiet_trainer(plugins=[AutocastPrecision(precision)], max_steps=1, detect_anomaly=True)
    with pytest.raises(RuntimeError, match="returned nan values") as caught:
        trainer.fit(Overflows(), loader(regression_batches(2)))
    hints = getattr(caught.value, "__notes__", [])
    assert len(hints) == (precision == "16-mixed")
    assert all("OverflowPostMortem(replay=True)" in hint for hint in hints)
