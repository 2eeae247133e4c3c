"""D36: the frequency of a step scheduler counts optimizer steps that were made."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import small_models
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.utilities.types import LRSchedulerConfig
from small_models import Regression, adamw, fused_adamw, loader, regression_batches
from torch.optim import lr_scheduler

from lightning_mp import AccumulationScheduler, AutocastPrecision, LossScaler, OverflowMonitor

NUM_BATCHES = 48


class WithFrequency(Regression):
    """Halves its learning rate once in ``frequency`` steps."""

    def __init__(self, frequency: int, optimizer: Any = adamw, **arguments: Any) -> None:
        super().__init__(optimizer, **arguments)
        self.frequency = frequency

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        scheduler = lr_scheduler.LambdaLR(optimizer, lambda count: 0.5**count)
        return [optimizer], [{"scheduler": scheduler, "interval": "step", "frequency": self.frequency}]


def ours() -> AutocastPrecision:
    return AutocastPrecision("16-mixed", scaler=LossScaler(init_scale=2.0**10))


def stock() -> MixedPrecision:
    return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**10))


def fit(module: pl.LightningModule, **arguments: Any) -> pl.Trainer:
    return small_models.fit(module, regression_batches(NUM_BATCHES), **arguments)


@pytest.mark.parametrize("frequency", [1, 2, 3, 4, 10])
@pytest.mark.parametrize("who", ["our plugin", "monitor", "scheduler"])
def test_a_frequency_counts_optimizer_steps(who: str, frequency: int) -> None:
    """D36. 12 optimizer steps of 4 micro-batches; whichever part of the pack is there brings it."""
    parts: dict[str, Any] = {
        "our plugin": {"plugins": [AutocastPrecision("bf16-mixed")], "accumulate_grad_batches": 4},
        "monitor": {"callbacks": [OverflowMonitor()], "accumulate_grad_batches": 4},
        "scheduler": {"callbacks": [AccumulationScheduler({0: 4})]},
    }
    module = WithFrequency(frequency)
    trainer = fit(module, **parts[who])
    assert trainer.global_step == 12
    assert module.learning_rates == [1e-2 * 0.5 ** (step // frequency) for step in range(12)]
    assert type(trainer.lr_scheduler_configs[0].frequency) is int, "the plain number is back after fit"


def test_lightning_alone_counts_micro_batches() -> None:
    """D36, what is mended here; if this fails, Lightning has mended it."""
    module = WithFrequency(2)
    fit(module, accumulate_grad_batches=4)
    assert module.learning_rates == [1e-2 * 0.5**step for step in range(12)]


@pytest.mark.parametrize("optimizer", [adamw, fused_adamw], ids=["unfused", "fused"])
@pytest.mark.parametrize("plugin", ["ours", "stock"])
def test_skipped_steps_do_not_count(plugin: str, optimizer: Any) -> None:
    overflows = (0, 1, 5, 8, 9, 20)
    module = WithFrequency(3, optimizer, overflows=overflows)
    plugins = [ours()] if plugin == "ours" else [stock()]
    fit(module, plugins=plugins, callbacks=[OverflowMonitor()] if plugin == "stock" else [])
    rates = module.learning_rates
    if len(rates) == NUM_BATCHES:
        rates = [rate for step, rate in enumerate(rates) if step not in overflows]
    assert rates == [1e-2 * 0.5 ** (step // 3) for step in range(NUM_BATCHES - len(overflows))]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("plugin", ["ours", "stock"])
def test_the_count_goes_on_after_a_resume_and_in_a_second_fit(plugin: str, tmp_path: Path) -> None:
    def arguments() -> dict[str, Any]:
        if plugin == "ours":
            return {"plugins": [ours()]}
        return {"plugins": [stock()], "callbacks": [OverflowMonitor()]}

    expected = [1e-2 * 0.5 ** (step // 10) for step in range(2 * NUM_BATCHES - 3)]
    first = WithFrequency(10, overflows=(0, 7, 8))
    trainer = fit(first, **arguments())
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    assert first.learning_rates == expected[: NUM_BATCHES - 3]

    resumed = WithFrequency(10)
    fit(resumed, max_epochs=2, ckpt_path=tmp_path / "x.ckpt", **arguments())
    assert resumed.learning_rates == expected[NUM_BATCHES - 3 :]

    trainer.fit_loop.max_epochs = 2
    # A second fit has new schedulers, as in Lightning, but the same count of steps: 45 are made, 5 are to come.
    again = WithFrequency(10)
    trainer.fit(again, loader(regression_batches(NUM_BATCHES)))
    assert again.learning_rates == [1e-2 * 0.5 ** ((45 + step) // 10 - 4) for step in range(NUM_BATCHES)]


class Restarts(WithFrequency):
    """Is given a new scheduler before its batch ``at``, beside a new optimizer or for the one that there is."""

    def __init__(self, how: str, at: int, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.how, self.at = how, at

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx != self.at:
            return
        strategy = self.trainer.strategy
        if self.how == "set-up":
            strategy.setup_optimizers(self.trainer)
            return
        if self.how == "optimizer":
            self.trainer.optimizers = super().configure_optimizers()[0]
        (optimizer,), (former,) = self.trainer.optimizers, strategy.lr_scheduler_configs
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"]
        scheduler = lr_scheduler.LambdaLR(optimizer, lambda count: 0.5**count)
        if self.how == "copied":
            strategy.lr_scheduler_configs = [replace(former, scheduler=scheduler)]
        else:
            strategy.lr_scheduler_configs = [LRSchedulerConfig(scheduler, interval="step", frequency=self.frequency)]


@pytest.mark.parametrize("how", ["set-up", "optimizer", "scheduler", "copied"])
@pytest.mark.parametrize("optimizer", [adamw, fused_adamw], ids=["unfused", "fused"])
@pytest.mark.parametrize("plugin", ["ours", "stock"])
def test_schedulers_made_inside_of_a_fit_count_steps_that_were_made(plugin: str, optimizer: Any, how: str) -> None:
    overflows = (2, 8, 9, 15)
    module = Restarts(how, 6, 3, optimizer, overflows=overflows)
    plugins = [ours()] if plugin == "ours" else [stock()]
    trainer = fit(module, plugins=plugins, callbacks=[OverflowMonitor()] if plugin == "stock" else [])
    rates = module.learning_rates
    if len(rates) == NUM_BATCHES:
        rates = [rate for step, rate in enumerate(rates) if step not in overflows]
    before = 5  # steps that were made before the new one
    expected = [step // 3 for step in range(before)] + [step // 3 - 1 for step in range(before, NUM_BATCHES - 4)]
    assert rates == [1e-2 * 0.5**count for count in expected]
    assert type(trainer.lr_scheduler_configs[0].frequency) is int, "the plain number is back after fit"


def test_schedulers_made_inside_of_a_fit_count_steps_without_outcomes() -> None:
    """Windows of 4, and a stock plugin that reports nothing."""
    module = Restarts("scheduler", 8, 3)
    fit(module, callbacks=[AccumulationScheduler({0: 4})])
    assert module.learning_rates == [1e-2 * 0.5 ** (step // 3) for step in range(12)]


def test_a_frequency_that_is_changed_inside_of_a_fit_stays_changed() -> None:
    class Slower(WithFrequency):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 6:
                self.trainer.lr_scheduler_configs[0].frequency = 10

    module = Slower(3, overflows=(8,))
    trainer = fit(module, plugins=[ours()])
    expected = [min(step // 3, 2) + step // 10 for step in range(NUM_BATCHES - 1)]
    assert module.learning_rates == [1e-2 * 0.5**count for count in expected]
    assert trainer.lr_scheduler_configs[0].frequency == 10


def test_plateau_schedulers_look_at_their_metric_once_in_so_many_steps() -> None:
    class Plateau(Regression):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            plateau = lr_scheduler.ReduceLROnPlateau(optimizer, patience=100)
            return [optimizer], [{"scheduler": plateau, "interval": "step", "frequency": 5, "monitor": "loss"}]

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.log("loss", loss.detach())
            return loss

    trainer = fit(Plateau(), callbacks=[AccumulationScheduler({0: 4})])
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == 12 // 5
