"""Weights that are no plain fp32 tensors: complex, float64, pruned."""

from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import small_models
import torch
from small_models import Trained, regression_batches
from torch import Tensor, nn
from torch.nn.utils import prune

from lightning_mp import AutocastPrecision, Float8Precision, LossScaler, MasterWeightsPrecision, OverflowMonitor

PLUGINS: dict[str, Callable[[], Any]] = {
    "bf16-mixed": lambda: AutocastPrecision("bf16-mixed"),
    "16-mixed": lambda: AutocastPrecision("16-mixed", scaler=LossScaler(init_scale=64.0)),
    "masters": lambda: MasterWeightsPrecision("bf16-true"),
    "masters-fp16": lambda: MasterWeightsPrecision("16-true", scaler=LossScaler(init_scale=64.0)),
    "fp8": lambda: Float8Precision(emulate=True, skip_small=False, skip_first_and_last=False),
}


def fit(plugin: Any, module: pl.LightningModule, **arguments: Any) -> pl.Trainer:
    return small_models.fit(module, regression_batches(4, width=16), plugin=plugin, **arguments)


def complex_weights(*, lazily: bool = True, **settings: Any) -> Trained:
    """A complex parameter; its gradient is conjugated by a bit only, as torch leaves it."""

    def loss(module: Any, batch: Any) -> Tensor:
        phases = module.phases.conj() if lazily else module.phases.conj_physical()
        return (module.net(batch[0]).float().to(torch.complex64) @ phases).abs().square().mean()

    return Trained(
        loss,
        partial(torch.optim.AdamW, lr=1e-3, **settings),
        net=lambda: nn.Linear(16, 16),
        phases=lambda: nn.Parameter(torch.randn(16, 4, dtype=torch.complex64)),
    )


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("plugin", PLUGINS)
def test_complex_parameters_train(plugin: str, foreach: bool) -> None:
    """With a loss scale, clipping and monitors; close to fp32. Lightning's bf16-true makes real numbers of them."""
    # Without our plugins torch's clipping fails on the conjugation bit.
    exact, module = complex_weights(lazily=False, foreach=foreach), complex_weights(foreach=foreach)
    fit(None, exact, gradient_clip_val=0.5)
    trainer = fit(PLUGINS[plugin](), module, gradient_clip_val=0.5, callbacks=[OverflowMonitor()])
    assert trainer.global_step == 4
    assert module.phases.dtype == torch.complex64
    torch.testing.assert_close(module.phases, exact.phases, rtol=0, atol=4e-3 if plugin == "fp8" else 4e-4)


def test_the_norm_of_complex_gradients_is_torchs() -> None:
    norms = []

    class Norm(pl.Callback):
        def on_after_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any, outcome: Any) -> None:
            norms.append(outcome.grad_norm)

        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            norms.append(torch.nn.utils.get_total_norm([p.grad.resolve_conj() for p in pl_module.parameters()]).item())

    fit(PLUGINS["16-mixed"](), complex_weights(), callbacks=[Norm()])
    assert len(norms) == 8
    assert norms[::2] == pytest.approx(norms[1::2], rel=1e-5)


def double_weights(**settings: Any) -> Trained:
    return Trained(
        lambda module, batch: (module.net(batch[0]).double() * module.scale).square().mean(),
        partial(torch.optim.AdamW, lr=1e-3, **settings),
        net=lambda: nn.Linear(16, 16),
        scale=lambda: nn.Parameter(torch.full((16,), 1 + 2.0**-40, dtype=torch.float64)),
    )


@pytest.mark.parametrize("settings", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize("plugin", PLUGINS)
def test_float64_parameters_are_stepped_in_float64(plugin: str, settings: dict[str, Any]) -> None:
    module = double_weights(**settings)
    trainer = fit(PLUGINS[plugin](), module, gradient_clip_val=0.5)
    state = trainer.optimizers[0].state[module.scale]
    assert {module.scale.dtype, state["exp_avg"].dtype} == {torch.float64}
    assert trainer.global_step == 4
    assert torch.equal(module.scale.detach().float().double(), module.scale) is False, "stepped below fp32's last bit"
    # Four steps of Adam, all along the gradient.
    assert (1 - module.scale).mean().item() == pytest.approx(4e-3, rel=0.1)


def test_pruned_layers_are_left_out_of_fp8_with_the_reason() -> None:
    module = Trained(
        lambda m, batch: m.second(m.first(batch[0])).float().square().mean(),
        partial(torch.optim.SGD, lr=1e-2),
        first=lambda: prune.l1_unstructured(nn.Linear(16, 16), "weight", 0.3),
        second=lambda: nn.Linear(16, 16),
    )
    plugin = PLUGINS["fp8"]()
    fit(plugin, module)
    reasons = {layer.name: layer.skipped_because for layer in plugin.layers}
    assert reasons == {"first": "its weight is computed from other parameters (pruning, spectral_norm)", "second": None}
