"""Plugins that train fp32 weights, over a model whose trainable weights are 16 bit."""

import re
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import small_models
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from small_models import regression_batches, weights
from torch import Tensor, nn

from lightning_mp import AutocastPrecision, Float8Precision, MasterWeightsPrecision

PLUGINS: dict[str, Callable[[], Any]] = {
    "16-mixed": lambda: AutocastPrecision("16-mixed"),
    "bf16-mixed": lambda: AutocastPrecision("bf16-mixed"),
    "fp8": lambda: Float8Precision(emulate=True, skip_small=False, skip_first_and_last=False),
}


class Adapted(pl.LightningModule):
    """A base and an adapter, each in a dtype of its own; the base may be frozen, or join after an epoch."""

    def __init__(self, base: torch.dtype, adapter: torch.dtype, *, freeze: bool = False, joins: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base = nn.Linear(8, 16).to(base).requires_grad_(not freeze and not joins)
        self.adapter = nn.Linear(16, 16).to(adapter)
        with torch.no_grad():
            self.adapter.bias.fill_(1.0)
        self.joins = joins

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.adapter(self.base(batch[0])).float().square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW((self.adapter if self.joins else self).parameters(), lr=1e-3)

    def on_train_epoch_start(self) -> None:
        if self.joins and self.current_epoch == 1:
            self.base.requires_grad_(True)
            self.trainer.optimizers[0].add_param_group({"params": list(self.base.parameters())})


def fit(plugin: Any, module: pl.LightningModule, **arguments: Any) -> pl.Trainer:
    return small_models.fit(module, regression_batches(2), plugin=plugin, **arguments)


@pytest.mark.parametrize("plugin", PLUGINS)
def test_trainable_fp16_weights_are_refused_at_set_up(plugin: str) -> None:
    """In fp16 Adam's epsilon is 0: the first step that was made turned the weights to NaN."""
    module = Adapted(torch.float16, torch.float32)
    before = weights(module)
    with pytest.raises(
        MisconfigurationException,
        match=r"2 of 4 trainable parameters are fp16: base.weight, base.bias.*from_pretrained\(..., dtype=torch.float32"
        r".*MasterWeightsPrecision\('16-true'\)",
    ):
        fit(PLUGINS[plugin](), module)
    assert all(torch.equal(a, b) for a, b in zip(before, weights(module), strict=True))


@pytest.mark.parametrize("base", [torch.float16, torch.bfloat16])
def test_frozen_16_bit_weights_are_nobodys_business(base: torch.dtype) -> None:
    trainer = fit(PLUGINS["16-mixed"](), Adapted(base, torch.float32, freeze=True))
    assert all(p.isfinite().all() for p in trainer.lightning_module.parameters())


def test_fp16_weights_that_join_later_are_refused_before_they_are_stepped() -> None:
    module = Adapted(torch.float16, torch.float32, joins=True)
    with pytest.raises(MisconfigurationException, match=r"2 of 4 trainable parameters are fp16: base"):
        fit(PLUGINS["16-mixed"](), module, max_epochs=2)
    assert all(p.isfinite().all() for p in module.parameters())


@pytest.mark.parametrize("plugin", PLUGINS)
def test_bf16_weights_are_trained_with_a_count_of_what_is_lost(plugin: str) -> None:
    """The number is that of elements which a step of the size of the learning rate does not move."""
    module = Adapted(torch.float32, torch.bfloat16)
    with pytest.warns(UserWarning, match=r"2 trainable parameters are bf16: adapter.*rounded away in 16 of 272"):
        fit(PLUGINS[plugin](), module)


def test_a_warm_up_from_zero_is_counted_at_its_full_rate() -> None:
    class WarmUp(Adapted):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)]

    with pytest.warns(UserWarning, match=r"rounded away in 16 of 272"):
        fit(PLUGINS["bf16-mixed"](), WarmUp(torch.float32, torch.bfloat16))


def test_nothing_stays_on_the_optimizer() -> None:
    module = Adapted(torch.float32, torch.float32)
    trainer = fit(PLUGINS["bf16-mixed"](), module)
    optimizer = trainer.optimizers[0]
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_load_state_dict_pre_hooks


class TrainsAnother(Adapted):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(Adapted(torch.float32, torch.float32).parameters())


@pytest.mark.parametrize("plugin", [AutocastPrecision("bf16-mixed"), MasterWeightsPrecision("bf16-true")], ids=str)
def test_an_optimizer_of_another_model_is_named(plugin: Any) -> None:
    text = r"none of the 4 trainable parameters of TrainsAnother is in its optimizer, .* from self.parameters\(\)"
    with pytest.warns(UserWarning, match=text):
        fit(plugin, TrainsAnother(torch.float32, torch.float32))


class TrainsNothing(Adapted):
    def configure_optimizers(self) -> None:  # type: ignore[override]
        pass


@pytest.mark.filterwarnings("ignore:`LightningModule.configure_optimizers` returned `None`")
def test_a_module_without_an_optimizer_gets_lightnings_warning_alone() -> None:
    fit(AutocastPrecision("bf16-mixed"), TrainsNothing(torch.float32, torch.float32))


@pytest.mark.parametrize(
    ("plugin", "base", "said"),
    [
        ("16-mixed", torch.bfloat16, 1),
        ("16-mixed", torch.float16, 0),
        ("bf16-mixed", torch.float16, 1),
        ("fp8", torch.float16, 1),
        ("fp8", torch.bfloat16, 0),
    ],
)
def test_frozen_weights_in_the_other_16_bit_format_are_said(
    plugin: str, base: torch.dtype, said: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's error about a norm of such weights on a CPU names neither the weights nor a cure."""
    lines: list[str] = []
    monkeypatch.setattr("lightning_mp.training.precision.full_weights.rank_zero_info", lines.append)
    fit(PLUGINS[plugin](), Adapted(base, torch.float32, freeze=True), max_epochs=1)
    assert len(lines) == said
    low = torch.float16 if plugin == "16-mixed" else torch.bfloat16
    cure = rf"2 frozen weights are in the other 16-bit format \(base.weight, base.bias\): .* with dtype={low}\.$"
    assert all(re.search(cure, line) for line in lines)
