"""Skipped steps: who learns of them, and what holds. Our plugin needs no callback for it; stock ones, a monitor."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import small_models
import torch
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging, ModelCheckpoint, WeightAveraging
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from small_models import (
    Outcomes,
    Regression,
    StepsByHand,
    adamw,
    at,
    fused_adamw,
    loader,
    quiet_trainer,
    regression_batches,
    sgd,
    weights,
)
from torch.optim import lr_scheduler

from lightning_mp import AutocastPrecision, LossScaler, MasterWeightsPrecision, OverflowMonitor
from lightning_mp.diagnostics import LossScaleFloorError

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


class Recording(lr_scheduler.LRScheduler):
    """Its rate depends on a list of its own, to which each step adds."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.history: list[int] = []
        super().__init__(optimizer)

    def get_lr(self) -> list[float | torch.Tensor]:
        self.history.append(self.last_epoch)
        return [base / len(self.history) for base in self.base_lrs]


SCHEDULERS: dict[str, Any] = {
    "step": step_lr,
    "one_cycle": one_cycle,
    "sequential": sequential,
    "lambda": lambda_lr,
    "recording": Recording,
}


def ours(init_scale: float = 2.0**10) -> AutocastPrecision:
    return AutocastPrecision("16-mixed", scaler=LossScaler(init_scale=init_scale))


def stock(init_scale: float = 2.0**10) -> MixedPrecision:
    return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=init_scale))


#: name -> precision plugin, callbacks that bring the holds
PLUGINS = {"ours": (ours, list), "stock": (stock, lambda: [OverflowMonitor()])}


def fit(plugin: Any, callbacks: Iterable[Callback], module: Regression, **arguments: Any) -> pl.Trainer:
    return small_models.fit(module, regression_batches(NUM_BATCHES), *callbacks, plugin=plugin, **arguments)


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


class SetsGroups(Regression):
    """A schedule by step beside one by epoch, and what others set in the groups between two epochs."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.settings: list[tuple[float, float]] = []

    def on_train_epoch_start(self) -> None:
        for group in self.trainer.optimizers[0].param_groups:
            group["weight_decay"] = 0.01 * (1 + self.current_epoch)
            if self.current_epoch == 2:
                group["lr"] = 0.25

    def configure_optimizers(self) -> Any:
        made = self.make_optimizer(self.parameters())
        made.register_step_post_hook(
            lambda stepped, *_: self.settings.append(
                (float(stepped.param_groups[0]["lr"]), stepped.param_groups[0]["weight_decay"])
            )
        )
        by_step = {"scheduler": lr_scheduler.ExponentialLR(made, 0.5), "interval": "step"}
        by_epoch = {"scheduler": lr_scheduler.MultiplicativeLR(made, lambda epoch: 0.1), "interval": "epoch"}
        return [made], [by_step, by_epoch]


@pytest.mark.parametrize("plugin", PLUGINS)
def test_what_others_set_before_a_skip_is_known_stays(plugin: str) -> None:
    """D07. The last step of each epoch is skipped; a fused optimizer learns of that in the next epoch."""
    make_plugin, make_callbacks = PLUGINS[plugin]
    last = [epoch * NUM_BATCHES + NUM_BATCHES - 1 for epoch in range(3)]
    made = {}
    for optimizer in (adamw, fused_adamw):
        module = SetsGroups(optimizer, overflows=last)
        fit(make_plugin(), make_callbacks(), module, max_epochs=3)
        made[optimizer] = module.settings
    if len(made[fused_adamw]) == 3 * NUM_BATCHES:  # its kernel runs for a skipped step, too
        made[fused_adamw] = [settings for step, settings in enumerate(made[fused_adamw]) if step not in last]
    assert made[fused_adamw] == made[adamw]
    assert len({decay for _, decay in made[adamw]}) == 3


@pytest.mark.parametrize("as_tensor", [False, True], ids=["number", "tensor"])
@pytest.mark.parametrize("plugin", PLUGINS)
def test_a_rate_that_is_set_between_a_fused_skip_and_its_outcome_stays(plugin: str, as_tensor: bool) -> None:
    """D07. The scheduler's step is undone one step later; what was set meanwhile is not the scheduler's."""

    class SetsRate(Callback):
        def __init__(self) -> None:
            self.rates: list[float] = []

        def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            trainer.optimizers[0].register_step_pre_hook(
                lambda stepped, *_: self.rates.append(float(stepped.param_groups[0]["lr"]))
            )

        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            if trainer.global_step == 2:
                group = trainer.optimizers[0].param_groups[0]
                group["lr"] = group["lr"].fill_(0.75) if as_tensor else 0.75

    def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, torch.tensor(0.5) if as_tensor else 0.5, fused=True)

    make_plugin, make_callbacks = PLUGINS[plugin]
    sets_rate = SetsRate()
    module = Regression(make_optimizer, scheduler=step_lr, overflows=[1])
    fit(make_plugin(), [*make_callbacks(), sets_rate], module)
    assert sets_rate.rates[2] == 0.75


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
    torch.testing.assert_close(weights(module), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("every", [1, 2, 3])
@pytest.mark.parametrize("optimizer", [adamw, fused_adamw], ids=["unfused", "fused"])
@pytest.mark.parametrize("plugin", PLUGINS)
def test_an_average_of_every_nth_step_counts_steps_that_were_made(plugin: str, optimizer: Any, every: int) -> None:
    """D08, D58: Lightning counts attempts, so that after one skip it would average the other steps."""

    class Counting(EMAWeightAveraging):
        def __init__(self) -> None:
            super().__init__(decay=0.5, update_every_n_steps=every, update_starting_at_step=2)
            self.averaged: list[int] = []

        def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
            updating = super().should_update(step_idx, epoch_idx)
            if updating:
                assert step_idx is not None
                self.averaged.append(step_idx)
            return updating

    make_plugin, make_callbacks = PLUGINS[plugin]
    averaging = Counting()
    fit(make_plugin(), [averaging, *make_callbacks()], Regression(optimizer, overflows=OVERFLOWS))
    made = NUM_BATCHES - len(OVERFLOWS)
    assert averaging.averaged == [index for index in range(2, made) if index % every == 0]


@pytest.mark.parametrize(
    ("optimizer", "known_at_batch"),
    [(adamw, [*range(NUM_BATCHES)]), (fused_adamw, [*range(1, NUM_BATCHES), NUM_BATCHES - 1])],
    ids=["unfused", "fused"],
)
@pytest.mark.parametrize("plugin", PLUGINS)
def test_outcomes_come_at_once_and_of_fused_steps_one_step_later(
    plugin: str, optimizer: Any, known_at_batch: list[int]
) -> None:
    """D46: Lightning has no hook after the optimizer step. The last fused step is settled at the end of the run."""
    make_plugin, make_callbacks = PLUGINS[plugin]
    outcomes, batches, known_at_batch_ = Outcomes(), [], []
    noting = [
        at(lambda trainer, _: batches.append(trainer.fit_loop.epoch_loop.batch_idx), "on_train_batch_start"),
        at(lambda *_: known_at_batch_.append(batches[-1]), "on_after_optimizer_step"),
    ]
    fit(make_plugin(), [outcomes, *noting, *make_callbacks()], Regression(optimizer, overflows=OVERFLOWS))
    assert [o.step_index for o in outcomes.seen if o.skipped] == list(OVERFLOWS)
    assert known_at_batch_ == known_at_batch


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


def writing(how: Any) -> Callback:
    """Writes into the gradients that it is shown, in one step; ``how`` is given a parameter."""
    return at(lambda _, module: how(module.net[0].weight), "on_before_optimizer_step", step=1)


def writes_nan(weight: Any) -> None:
    weight.grad[0, 0] = torch.nan


def replaces(weight: Any) -> None:
    weight.grad = torch.full_like(weight, torch.inf)


def writes_inf(weight: Any) -> None:
    weight.grad[0, 0] = torch.inf


@pytest.mark.parametrize(
    ("write", "clip"),
    [(writes_nan, None), (writes_nan, ("norm", 1.0)), (writes_nan, ("value", 1.0)), (writes_inf, ("value", 1.0))],
    ids=["unclipped", "norm", "value", "inf-value"],
)
@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed", "masters"])
@pytest.mark.parametrize("optimizer", [adamw, fused_adamw], ids=["unfused", "fused"])
def test_what_a_hook_writes_is_checked_before_it_is_stepped_with(
    optimizer: Any, precision: str, write: Any, clip: Any
) -> None:
    """Promise 2, whoever wrote it; a limit on values would make a number of an infinity."""
    outcomes, module = Outcomes(), Regression(optimizer)
    made = {"16-mixed": ours, "masters": lambda: MasterWeightsPrecision("bf16-true")}
    arguments = {} if clip is None else {"gradient_clip_algorithm": clip[0], "gradient_clip_val": clip[1]}
    plugin = made.get(precision, lambda: AutocastPrecision("bf16-mixed"))()
    fit(plugin, [writing(write), outcomes], module, **arguments)
    assert [o.step_index for o in outcomes.seen if o.skipped] == [1]
    assert outcomes.seen[1].nonfinite_parameters() == ["net.0.weight"]
    assert all(torch.isfinite(w).all() for w in weights(module))


def test_a_gradient_that_a_hook_brings_along_is_checked() -> None:
    """A parameter that had none, and a gradient that is another tensor by now."""

    class Unused(Regression):
        def __init__(self) -> None:
            super().__init__(sgd)
            self.extra = torch.nn.Parameter(torch.ones(2))

    def brings(weight: Any) -> None:
        module.extra.grad = torch.full((2,), torch.nan)

    for how in (brings, replaces):
        outcomes, module = Outcomes(), Unused()
        fit(AutocastPrecision("bf16-mixed"), [writing(how), outcomes], module)
        assert [o.step_index for o in outcomes.seen if o.skipped][:1] == [1]
        assert all(torch.isfinite(w).all() for w in weights(module))


@pytest.mark.parametrize("clips", ["on_its_own", "through_us_first"])
def test_what_a_module_writes_where_it_clips_is_checked(clips: str) -> None:
    class Clips(Regression):
        def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
            if clips == "through_us_first":
                self.clip_gradients(optimizer, gradient_clip_val=1.0, gradient_clip_algorithm="norm")
            if self.trainer.global_step == 1:
                writes_nan(self.net[0].weight)

    outcomes, module = Outcomes(), Clips(fused_adamw)
    fit(AutocastPrecision("bf16-mixed"), [outcomes], module)
    assert [o.step_index for o in outcomes.seen if o.skipped] == [1]
    assert all(torch.isfinite(w).all() for w in weights(module))


@pytest.mark.parametrize("plugin", PLUGINS)
@pytest.mark.parametrize("optimizer", [sgd, fused_adamw], ids=["unfused", "fused"])
def test_a_group_that_is_added_before_the_outcome_is_known_keeps_its_settings(plugin: str, optimizer: Any) -> None:
    """The last step of an epoch was skipped; the schedule of the old group goes back, the new group is left alone."""

    class Adds(Callback):
        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            if trainer.current_epoch == 1:
                pl_module.extra = torch.nn.Parameter(torch.zeros(2))
                group = {"params": [pl_module.extra], "lr": 0.5, "initial_lr": 0.5}
                trainer.optimizers[0].add_param_group(group)
                scheduler = trainer.lr_scheduler_configs[0].scheduler
                scheduler.base_lrs.append(0.5)
                scheduler.lr_lambdas.append(lambda _: 1.0)

    make_plugin, make_callbacks = PLUGINS[plugin]
    module = Regression(optimizer, scheduler=lambda_lr, overflows=[3])
    trainer = quiet_trainer(plugins=[make_plugin()], callbacks=[Adds(), *make_callbacks()], max_epochs=2)
    trainer.fit(module, loader(regression_batches(4)))
    scheduler = trainer.lr_scheduler_configs[0].scheduler
    # Eight attempts, one of them skipped.
    assert scheduler.last_epoch == 7
    assert [group["lr"] for group in trainer.optimizers[0].param_groups] == [1e-2 / 8, 0.5]
    assert scheduler.base_lrs == [1e-2, 0.5]


def test_a_teardown_that_raises_takes_everything_away() -> None:
    """The end of a run updates the scale of its last batch, which may find that it has been at its floor too long."""

    class Manual(StepsByHand, Regression):
        pass

    module, averaging = Manual(fused_adamw, overflows=range(30)), WeightAveraging()
    forwards = {name: "forward" in vars(part) for name, part in module.named_modules()}
    policy = {"net.0": "fp32", "*": "low"}
    precision = AutocastPrecision("16-mixed", scaler=LossScaler("cpu", init_scale=2.0, min_scale=2.0), policy=policy)
    # The floor's patience is 20 steps, and its number is read one update late: here, in the teardown.
    trainer = quiet_trainer(plugins=[precision], callbacks=[averaging], max_steps=21, max_epochs=-1)
    with pytest.raises(LossScaleFloorError, match="the last 20 steps overflowed"):
        trainer.fit(module, loader(regression_batches(4)))
    assert "lr_scheduler_step" not in vars(module)
    assert "should_update" not in vars(averaging)
    assert {name: "forward" in vars(part) for name, part in module.named_modules()} == forwards
    # Nothing of it watches the optimizer any longer.
    (optimizer,) = trainer.optimizers
    for p in module.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()


@pytest.mark.parametrize(("make_plugin", "monitored"), [(ours, True), (stock, True), (ours, False)])
def test_a_checkpoint_holds_settled_totals_and_rates(make_plugin: Any, monitored: bool, tmp_path: Path) -> None:
    """The outcome of the last step is still on its way: schedulers go back, with no callback to settle them, too."""
    module = Regression(fused_adamw, scheduler=step_lr, overflows=[2])
    checkpoint = ModelCheckpoint(tmp_path, every_n_train_steps=3, save_top_k=-1, filename="{step}")
    callbacks = [checkpoint, *([OverflowMonitor()] if monitored else [])]
    small_models.fit(module, regression_batches(3), *callbacks, plugin=make_plugin(), enable_checkpointing=True)
    saved = torch.load(tmp_path / "step=3.ckpt", weights_only=True)
    assert saved["lr_schedulers"][0]["last_epoch"] == 2
    assert saved["optimizer_states"][0]["param_groups"][0]["lr"] == 1e-2 * 0.25
    totals = {"attempted_steps": 3, "skipped_steps": 1, "skip_streak": 1}
    assert saved["callbacks"].get("OverflowMonitor") == (totals if monitored else None)


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
    assert logged["mp/overflow_rate"] == pytest.approx(len(OVERFLOWS) / NUM_BATCHES)
    assert ("mp/grad_norm" in logged) == (plugin == "ours")


def test_the_monitor_watches_fp32_too() -> None:
    monitor = OverflowMonitor()
    fit(Precision(), [monitor], Regression(adamw))
    assert (monitor.attempted_steps, monitor.skipped_steps, monitor.loss_scale) == (NUM_BATCHES, 0, 1.0)


def test_overflow_at_the_floor_ends_the_run_with_names() -> None:
    """D01."""
    scaler = LossScaler(init_scale=2.0**-23, min_scale=2.0**-24)
    module = Regression(fused_adamw, overflows=range(1000))
    before = weights(module)
    trainer = quiet_trainer(plugins=[AutocastPrecision("16-mixed", scaler=scaler)])
    with pytest.raises(LossScaleFloorError, match=r"Step 2\d: LossScaler: the last \d+ steps overflowed.*net.2.bias"):
        trainer.fit(module, loader(regression_batches(60)))
    assert all(torch.equal(a, b) for a, b in zip(weights(module), before, strict=True))
