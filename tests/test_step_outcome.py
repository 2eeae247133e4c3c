"""Skipped steps: who learns of them, and what holds. Our plugin needs no callback for it; stock ones, a monitor."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging, ModelCheckpoint, WeightAveraging
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from small_models import Regression, adamw, fused_adamw, loader, quiet_trainer, regression_batches, sgd, weights
from torch.optim import lr_scheduler

from lightning_mp import AutocastPrecision, LossScaleFloorError, LossScaler, OverflowMonitor, OverflowPostMortem

OVERFLOWS = (0, 3, 4, 9)
NUM_BATCHES = 12


def step_lr(optimizer: torch.optim.Optimizer) -> Any:
    return lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)


def one_cycle(optimizer: torch.optim.Optimizer) -> Any:
    return lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=NUM_BATCHES + 1)


def sequential(optimizer: torch.optim.Optimizer) -> Any:
    warm_up = lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=3)
    decay = lr_scheduler.CosineAnnealingLR(optimizer, T_max=NUM_BATCHES)
    return lr_scheduler.SequentialLR(optimizer, [warm_up, decay], milestones=[3])


def lambda_lr(optimizer: torch.optim.Optimizer) -> Any:
    return lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))


SCHEDULERS = {"step": step_lr, "one_cycle": one_cycle, "sequential": sequential, "lambda": lambda_lr}


def ours(init_scale: float = 2.0**10) -> AutocastPrecision:
    return AutocastPrecision("16-mixed", scaler=LossScaler(init_scale=init_scale))


def stock(init_scale: float = 2.0**10) -> MixedPrecision:
    return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=init_scale))


#: name -> precision plugin, callbacks that bring the holds
PLUGINS = {"ours": (ours, list), "stock": (stock, lambda: [OverflowMonitor()])}


class Outcomes(Callback):
    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.known_at_batch: list[int] = []
        self.batch_idx = -1

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.batch_idx = batch_idx

    def on_after_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any, outcome: Any) -> None:
        self.seen.append(outcome)
        self.known_at_batch.append(self.batch_idx)


def fit(plugin: Any, callbacks: Iterable[Callback], module: Regression, **arguments: Any) -> pl.Trainer:
    trainer = quiet_trainer(plugins=[plugin], callbacks=list(callbacks), **arguments)
    trainer.fit(module, loader(regression_batches(NUM_BATCHES)))
    return trainer


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("optimizer", [adamw, fused_adamw], ids=["unfused", "fused"])
@pytest.mark.parametrize("plugin", PLUGINS)
def test_learning_rates_equal_those_of_a_run_without_skips(plugin: str, optimizer: Any, scheduler: str) -> None:
    """D07. A fused step that is skipped on the device ran its kernel too, so it shows up and is left out here."""
    make_plugin, make_callbacks = PLUGINS[plugin]
    skipping = Regression(optimizer, scheduler=SCHEDULERS[scheduler], overflows=OVERFLOWS)
    trainer = fit(make_plugin(), make_callbacks(), skipping)
    healthy = Regression(optimizer, scheduler=SCHEDULERS[scheduler])
    fit(make_plugin(), make_callbacks(), healthy)

    rates = skipping.learning_rates
    if len(rates) == NUM_BATCHES:
        rates = [rate for index, rate in enumerate(rates) if index not in OVERFLOWS]
    assert len(rates) == NUM_BATCHES - len(OVERFLOWS)
    assert rates == healthy.learning_rates[: len(rates)]
    # Also what a scheduler would do next.
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == len(rates)


@pytest.mark.parametrize("optimizer", [adamw, fused_adamw], ids=["unfused", "fused"])
@pytest.mark.parametrize("plugin", PLUGINS)
def test_plateau_schedulers_hold(plugin: str, optimizer: Any) -> None:
    class Plateau(Regression):
        def configure_optimizers(self) -> Any:
            made = self.make_optimizer(self.parameters())
            plateau = lr_scheduler.ReduceLROnPlateau(made, patience=100)
            config = {"scheduler": plateau, "interval": "step", "monitor": "loss"}
            return {"optimizer": made, "lr_scheduler": config}

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.log("loss", loss.detach().nan_to_num(posinf=1.0))
            return loss

    make_plugin, make_callbacks = PLUGINS[plugin]
    trainer = fit(make_plugin(), make_callbacks(), Plateau(optimizer, overflows=OVERFLOWS))
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == NUM_BATCHES - len(OVERFLOWS)


def test_schedulers_that_count_epochs_are_left_alone() -> None:
    class PerEpoch(Regression):
        def configure_optimizers(self) -> Any:
            config = super().configure_optimizers()
            config["lr_scheduler"]["interval"] = "epoch"
            return config

    module = PerEpoch(adamw, scheduler=step_lr, overflows=[NUM_BATCHES - 1])
    trainer = fit(ours(), [], module)
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == 1


@pytest.mark.parametrize("optimizer", [adamw, fused_adamw], ids=["unfused", "fused"])
@pytest.mark.parametrize("plugin", PLUGINS)
def test_averaged_weights_hold(plugin: str, optimizer: Any) -> None:
    """D08."""

    class Counting(WeightAveraging):
        updates = 0

        def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
            updating = super().should_update(step_idx, epoch_idx)
            self.updates += updating
            return updating

    make_plugin, make_callbacks = PLUGINS[plugin]
    averaging = Counting()
    fit(make_plugin(), [averaging, *make_callbacks()], Regression(optimizer, overflows=OVERFLOWS))
    assert averaging.updates == NUM_BATCHES - len(OVERFLOWS)


def test_an_average_over_a_run_with_skips_stays_finite_and_exact() -> None:
    module = Regression(fused_adamw, overflows=OVERFLOWS)
    averaging = EMAWeightAveraging(decay=0.5)
    expected: list[torch.Tensor] | None = None

    class Reference(Callback):
        """The EMA's own rule over the weights after each step that was made; torch copies the first ones."""

        def on_after_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any, outcome: Any) -> None:
            nonlocal expected
            if outcome.stepped:
                now = weights(pl_module)
                expected = now if expected is None else [e.lerp(w, 0.5) for e, w in zip(expected, now, strict=True)]

    fit(ours(), [Reference(), averaging], module)
    assert expected is not None
    for average, reference in zip(weights(module), expected, strict=True):
        torch.testing.assert_close(average, reference, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("plugin", PLUGINS)
def test_outcomes_of_unfused_steps_come_at_once(plugin: str) -> None:
    make_plugin, make_callbacks = PLUGINS[plugin]
    outcomes = Outcomes()
    fit(make_plugin(), [outcomes, *make_callbacks()], Regression(adamw, overflows=OVERFLOWS))
    assert [o.step_index for o in outcomes.seen if o.skipped] == list(OVERFLOWS)
    assert outcomes.known_at_batch == list(range(NUM_BATCHES))


@pytest.mark.parametrize("plugin", PLUGINS)
def test_outcomes_of_fused_steps_come_one_step_later(plugin: str) -> None:
    make_plugin, make_callbacks = PLUGINS[plugin]
    outcomes = Outcomes()
    fit(make_plugin(), [outcomes, *make_callbacks()], Regression(fused_adamw, overflows=OVERFLOWS))
    assert [o.step_index for o in outcomes.seen if o.skipped] == list(OVERFLOWS)
    # The last one is settled at the end of the run.
    assert outcomes.known_at_batch == [*range(1, NUM_BATCHES), NUM_BATCHES - 1]


def test_an_outcome_holds_scale_norm_and_names() -> None:
    outcomes = Outcomes()
    module = Regression(fused_adamw, overflows=[1])
    expected_norm = torch.autograd.grad(module.training_step(regression_batches(1)[0], 0), list(module.parameters()))
    module.seen_batches = 0
    fit(ours(), [outcomes], module)
    healthy, skipped, after = outcomes.seen[:3]
    norm = torch.cat([g.flatten() for g in expected_norm]).norm().item()
    assert healthy.grad_norm == pytest.approx(norm, rel=1e-2)
    assert (healthy.loss_scale, skipped.loss_scale, after.loss_scale) == (1024.0, 1024.0, 512.0)
    assert not torch.isfinite(torch.tensor(skipped.grad_norm))
    assert skipped.nonfinite_parameters() == ["net.2.bias", "net.2.weight", "net.0.bias", "net.0.weight"]
    assert healthy.nonfinite_parameters() == []


def test_the_module_is_told_too() -> None:
    class Told(Regression):
        told: list[bool]

        def on_after_optimizer_step(self, optimizer: Any, outcome: Any) -> None:
            self.told.append(outcome.stepped)

    module = Told(sgd, overflows=[1])
    module.told = []
    trainer = quiet_trainer(plugins=[ours()])
    trainer.fit(module, loader(regression_batches(3)))
    assert module.told == [True, False, True]


@pytest.mark.parametrize("optimizer", [adamw, fused_adamw], ids=["unfused", "fused"])
def test_bf16_steps_with_non_finite_gradients_are_skipped(optimizer: Any) -> None:
    """Promise 2, where there is no scaler."""
    outcomes = Outcomes()
    module = Regression(optimizer, scheduler=step_lr, overflows=OVERFLOWS)
    trainer = fit(AutocastPrecision("bf16-mixed"), [outcomes], module)
    assert [o.step_index for o in outcomes.seen if o.skipped] == list(OVERFLOWS)
    assert all(torch.isfinite(w).all() for w in weights(module))
    state = trainer.optimizers[0].state_dict()["state"]
    assert all(torch.isfinite(v).all() for moments in state.values() for v in moments.values())
    assert outcomes.seen[0].loss_scale == 1.0


@pytest.mark.parametrize("plugin", PLUGINS)
def test_nothing_stays_wrapped_after_fit(plugin: str) -> None:
    make_plugin, make_callbacks = PLUGINS[plugin]
    precision, averaging = make_plugin(), WeightAveraging()
    module = Regression(fused_adamw, scheduler=step_lr)
    before = set(vars(module)), set(vars(precision)), set(vars(averaging))
    fit(precision, [averaging, *make_callbacks()], module)
    for owner, names, wrapped in zip(
        (module, precision, averaging), before, ("lr_scheduler_step", "optimizer_step", "should_update"), strict=True
    ):
        assert wrapped not in names
        assert wrapped not in vars(owner)


@pytest.mark.parametrize("plugin", PLUGINS)
def test_nothing_stays_wrapped_after_an_exception(plugin: str) -> None:
    class Broken(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 2:
                raise KeyError("planted")
            return super().training_step(batch, batch_idx)

    make_plugin, make_callbacks = PLUGINS[plugin]
    precision, averaging = make_plugin(), WeightAveraging()
    module = Broken(fused_adamw, scheduler=step_lr)
    with pytest.raises(KeyError, match="planted"):
        fit(precision, [averaging, *make_callbacks()], module)
    for owner, wrapped in ((module, "lr_scheduler_step"), (precision, "optimizer_step"), (averaging, "should_update")):
        assert wrapped not in vars(owner)


@pytest.mark.parametrize("plugin", PLUGINS)
def test_a_checkpoint_holds_settled_totals(plugin: str, tmp_path: Path) -> None:
    """The outcome of the very last step is still on its way when the checkpoint is written."""
    make_plugin, _ = PLUGINS[plugin]
    module = Regression(fused_adamw, scheduler=step_lr, overflows=[2])
    monitor = OverflowMonitor()
    checkpoint = ModelCheckpoint(tmp_path, every_n_train_steps=3, save_top_k=-1, filename="{step}")
    trainer = quiet_trainer(plugins=[make_plugin()], callbacks=[checkpoint, monitor], enable_checkpointing=True)
    trainer.fit(module, loader(regression_batches(3)))
    saved = torch.load(tmp_path / "step=3.ckpt", weights_only=True)
    assert saved["lr_schedulers"][0]["last_epoch"] == 2
    assert saved["optimizer_states"][0]["param_groups"][0]["lr"] == 1e-2 * 0.25
    assert saved["callbacks"]["OverflowMonitor"] == {
        "attempted_steps": 3,
        "skipped_steps": 1,
        "skip_streak": 1,
    }


def test_a_checkpoint_holds_the_right_learning_rate_with_no_callback_to_settle_it(tmp_path: Path) -> None:
    """The scheduler has stepped by then and must have gone back: the optimizer's state is asked for before its."""
    checkpoint = ModelCheckpoint(tmp_path, every_n_train_steps=3, save_top_k=-1, filename="{step}")
    trainer = quiet_trainer(plugins=[ours()], callbacks=[checkpoint], enable_checkpointing=True)
    trainer.fit(Regression(fused_adamw, scheduler=step_lr, overflows=[2]), loader(regression_batches(3)))
    saved = torch.load(tmp_path / "step=3.ckpt", weights_only=True)
    assert saved["lr_schedulers"][0]["last_epoch"] == 2
    assert saved["optimizer_states"][0]["param_groups"][0]["lr"] == 1e-2 * 0.25


@pytest.mark.parametrize("plugin", PLUGINS)
@pytest.mark.parametrize("optimizer", [adamw, fused_adamw], ids=["unfused", "fused"])
def test_the_monitor_counts_and_logs(plugin: str, optimizer: Any) -> None:
    make_plugin, _ = PLUGINS[plugin]
    monitor = OverflowMonitor()
    trainer = fit(make_plugin(), [monitor], Regression(optimizer, overflows=OVERFLOWS))
    assert (monitor.attempted_steps, monitor.skipped_steps) == (NUM_BATCHES, len(OVERFLOWS))
    logged = trainer.callback_metrics
    assert logged["mp/loss_scale"] == 2.0 ** (10 - len(OVERFLOWS))
    assert logged["mp/skipped_steps"] == len(OVERFLOWS)
    lag = optimizer is fused_adamw
    assert logged["mp/overflow_rate"] == pytest.approx(len(OVERFLOWS) / (NUM_BATCHES - lag))
    assert ("mp/grad_norm" in logged) == (plugin == "ours")


def test_the_monitor_watches_fp32_too() -> None:
    monitor = OverflowMonitor()
    fit(Precision(), [monitor], Regression(adamw))
    assert (monitor.attempted_steps, monitor.skipped_steps, monitor.loss_scale) == (NUM_BATCHES, 0, 1.0)


@pytest.mark.parametrize("optimizer", [adamw, fused_adamw], ids=["unfused", "fused"])
def test_the_post_mortem_names_parameters(optimizer: Any, tmp_path: Path) -> None:
    module = Regression(optimizer)
    steps = iter(range(100))
    module.net[0].weight.register_hook(lambda g: g * torch.inf if next(steps) == 2 else g)
    post_mortem = OverflowPostMortem(dirpath=tmp_path / "reports")
    with pytest.warns(RuntimeWarning, match="step 2 was skipped at loss scale 1024.*: net.0.weight"):
        fit(ours(), [post_mortem], module)
    assert [r.parameters for r in post_mortem.reports] == [["net.0.weight"]]
    written = json.loads((tmp_path / "reports" / "overflow_step=2.json").read_text())
    expected = {"step_index": 2, "loss_scale": 1024.0, "parameters": ["net.0.weight"], "ranks": [0]}
    assert expected.items() <= written.items()


def test_overflow_at_the_floor_ends_the_run_with_names() -> None:
    """D01."""
    scaler = LossScaler(init_scale=2.0**-23, min_scale=2.0**-24)
    module = Regression(fused_adamw, overflows=range(1000))
    before = weights(module)
    trainer = quiet_trainer(plugins=[AutocastPrecision("16-mixed", scaler=scaler)])
    with pytest.raises(LossScaleFloorError, match=r"Step 2\d: The loss scale is at its floor.*net.2.bias"):
        trainer.fit(module, loader(regression_batches(60)))
    assert all(torch.equal(a, b) for a, b in zip(weights(module), before, strict=True))
