"""OverflowMonitor: its totals agree with what happened, max_steps in real steps when asked, the end of lost runs."""

import random
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import small_models
import torch
from gloo import run_ranks
from lightning.pytorch.callbacks import ModelCheckpoint, WeightAveraging
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from small_models import Regression, adamw, fused_adamw, loader, quiet_trainer, regression_batches, sgd, weights
from torch.optim import lr_scheduler

from lightning_mp import AutocastPrecision, LossScaler, OverflowMonitor


def ours() -> AutocastPrecision:
    return AutocastPrecision("16-mixed", scaler=LossScaler(init_scale=2.0**10))


def stock() -> MixedPrecision:
    return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**10))


PLUGINS = {"ours": ours, "stock": stock}
OPTIMIZERS = {"unfused": adamw, "fused": fused_adamw}
each_plugin = pytest.mark.parametrize("plugin", PLUGINS)
each_optimizer = pytest.mark.parametrize("optimizer", OPTIMIZERS)


def lambda_lr(optimizer: torch.optim.Optimizer) -> Any:
    return lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))


class CountingAverage(WeightAveraging):
    updates = 0

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        updating = super().should_update(step_idx, epoch_idx)
        self.updates += updating
        return updating


@each_plugin
@each_optimizer
@pytest.mark.parametrize("seed", range(4))
def test_every_total_agrees_with_the_steps_that_were_made(plugin: str, optimizer: str, seed: int) -> None:
    """D07, D08: Adam's own counter in the optimizer's state says how many steps were real."""
    generator = random.Random(seed)
    attempts = generator.randrange(20, 40)
    overflows = {step for step in range(attempts) if generator.random() < 0.3}
    module = Regression(OPTIMIZERS[optimizer], scheduler=lambda_lr, overflows=overflows)
    monitor, average = OverflowMonitor(), CountingAverage()
    trainer = small_models.fit(module, regression_batches(attempts), monitor, average, plugin=PLUGINS[plugin]())

    real_steps = attempts - len(overflows)
    adam_steps = {int(state["step"]) for state in trainer.optimizers[0].state.values()}
    assert adam_steps == {real_steps}
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == real_steps
    assert average.updates == real_steps
    assert (monitor.attempted_steps, monitor.skipped_steps) == (attempts, len(overflows))
    assert trainer.global_step == attempts


# -- max_steps ---------------------------------------------------------------------------------------------------------


def fit_to_max_steps(plugin: str, optimizer: str, overflows: Any, *, real: bool, max_steps: int = 6) -> pl.Trainer:
    module = Regression(OPTIMIZERS[optimizer], overflows=overflows)
    monitor = OverflowMonitor(count_real_steps=real)
    return small_models.fit(
        module, regression_batches(4), monitor, plugin=PLUGINS[plugin](), steps=max_steps, accumulate_grad_batches=1
    )


def real_steps_of(trainer: pl.Trainer) -> int:
    return max(int(state["step"]) for state in trainer.optimizers[0].state.values())


@each_plugin
@each_optimizer
@pytest.mark.parametrize(
    "overflows", [(), (0,), (5,), (4, 5), (5, 6, 7), (0, 2, 5, 6, 8)], ids=lambda steps: "-".join(map(str, steps))
)
def test_max_steps_counts_real_steps_when_asked(plugin: str, optimizer: str, overflows: tuple[int, ...]) -> None:
    """D07. Skips of the very last step are the hard case: a fused optimizer's outcome is still on its way then."""
    trainer = fit_to_max_steps(plugin, optimizer, overflows, real=True)
    assert real_steps_of(trainer) == 6
    assert trainer.global_step == 6 + len(overflows)
    assert trainer.max_steps == 6, "the user's number is back after fit"


def test_max_steps_counts_attempts_otherwise() -> None:
    trainer = fit_to_max_steps("ours", "unfused", (0, 5), real=False)
    assert (real_steps_of(trainer), trainer.global_step) == (4, 6)


@each_optimizer
def test_a_resumed_run_ends_at_the_same_real_step(optimizer: str, tmp_path: Path) -> None:
    def trainer(**arguments: Any) -> pl.Trainer:
        monitor = OverflowMonitor(count_real_steps=True)
        return quiet_trainer(plugins=[ours()], callbacks=[monitor], max_epochs=-1, **arguments)

    data = loader(regression_batches(4))
    first = trainer(max_steps=6)
    first.fit(Regression(OPTIMIZERS[optimizer], overflows=(1, 2)), data)
    assert first.global_step == 8
    first.save_checkpoint(tmp_path / "half.ckpt")
    second = trainer(max_steps=9)
    second_module = Regression(OPTIMIZERS[optimizer], overflows=(1,))
    second.fit(second_module, data, ckpt_path=tmp_path / "half.ckpt", weights_only=True)
    assert second.global_step == 12
    assert real_steps_of(second) == 9


def test_the_users_max_steps_is_back_after_an_exception() -> None:
    class Broken(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.seen_batches == 3:
                raise KeyError("planted")
            return super().training_step(batch, batch_idx)

    trainer = quiet_trainer(
        plugins=[ours()], callbacks=[OverflowMonitor(count_real_steps=True)], max_steps=9, max_epochs=-1
    )
    with pytest.raises(KeyError, match="planted"):
        trainer.fit(Broken(adamw, overflows=(0, 1)), loader(regression_batches(4)))
    assert trainer.max_steps == 9


def test_counting_real_steps_without_a_limit_is_refused() -> None:
    trainer = quiet_trainer(plugins=[ours()], callbacks=[OverflowMonitor(count_real_steps=True)])
    with pytest.raises(MisconfigurationException, match=r"count_real_steps=True\) needs Trainer\(max_steps="):
        trainer.fit(Regression(), loader(regression_batches(1)))


# -- too many skips ----------------------------------------------------------------------------------------------------


@each_plugin
@each_optimizer
def test_a_run_that_only_skips_is_stopped_saved_and_explained(plugin: str, optimizer: str, tmp_path: Path) -> None:
    module = Regression(OPTIMIZERS[optimizer], scheduler=lambda_lr, overflows=(1, *range(4, 100)))
    before_the_streak: list[torch.Tensor] = []
    module_step = module.training_step

    def step(batch: Any, batch_idx: int) -> Any:
        if module.seen_batches == 4:
            before_the_streak[:] = weights(module)
        return module_step(batch, batch_idx)

    module.training_step = step  # type: ignore[method-assign]
    monitor = OverflowMonitor(stop_after_skips=3)
    trainer = quiet_trainer(plugins=[PLUGINS[plugin]()], callbacks=[monitor], default_root_dir=tmp_path)
    with pytest.warns(RuntimeWarning, match=r"ends the run: 3 optimizer steps in a row were skipped, up to step 6, at"):
        trainer.fit(module, loader(regression_batches(30)))
    fused = optimizer == "fused"
    assert trainer.global_step == 7 + fused, "the outcome of a fused step is known one step later"
    assert monitor.stop_reason is not None
    assert ("net.2.bias" in monitor.stop_reason) == (plugin == "ours")
    saved = torch.load(tmp_path / f"stopped_after_skips-step-{7 + fused}.ckpt", weights_only=True)
    for (name, saved_weight), expected in zip(saved["state_dict"].items(), before_the_streak, strict=True):
        assert torch.equal(saved_weight, expected), name
    assert saved["lr_schedulers"][0]["last_epoch"] == 3


def test_a_streak_that_ends_in_time_stops_nothing() -> None:
    monitor = OverflowMonitor(stop_after_skips=3)
    trainer = quiet_trainer(plugins=[ours()], callbacks=[monitor])
    trainer.fit(Regression(sgd, overflows=(1, 2, 4, 5, 7)), loader(regression_batches(10)))
    assert trainer.global_step == 10
    assert monitor.stop_reason is None


def test_the_checkpoint_goes_beside_the_others(tmp_path: Path) -> None:
    checkpoints = ModelCheckpoint(tmp_path / "kept", save_last=True)
    trainer = quiet_trainer(
        plugins=[ours()],
        callbacks=[OverflowMonitor(stop_after_skips=1), checkpoints],
        default_root_dir=tmp_path,
        enable_checkpointing=True,
    )
    with pytest.warns(RuntimeWarning, match="1 optimizer steps in a row were skipped, up to step 2"):
        trainer.fit(Regression(sgd, overflows=(2,)), loader(regression_batches(10)))
    assert (tmp_path / "kept" / "stopped_after_skips-step-3.ckpt").exists()


@pytest.mark.filterwarnings("ignore:You.re resuming from a checkpoint that ended before the epoch ended")
def test_a_run_resumed_from_that_checkpoint_has_a_new_streak(tmp_path: Path) -> None:
    def fit(overflows: Any, **arguments: Any) -> pl.Trainer:
        trainer = quiet_trainer(
            plugins=[ours()], callbacks=[OverflowMonitor(stop_after_skips=2)], default_root_dir=tmp_path
        )
        trainer.fit(Regression(sgd, overflows=overflows), loader(regression_batches(10)), **arguments)
        return trainer

    with pytest.warns(RuntimeWarning, match="ends the run"):
        fit((2, 3))
    resumed = fit((0,), ckpt_path=tmp_path / "stopped_after_skips-step-4.ckpt", weights_only=True)
    assert resumed.global_step == 10


@pytest.mark.filterwarnings("ignore:OverflowMonitor.stop_after_skips=2. ends the run")
def test_two_ranks_stop_together_when_one_overflows(tmp_path: Path) -> None:
    """Promise 3."""

    def train(rank: int) -> tuple[int, str | None]:
        module = Regression(fused_adamw, overflows=range(3, 100) if rank == 1 else ())
        monitor = OverflowMonitor(stop_after_skips=2)
        trainer = small_models.fit(
            module, regression_batches(20), monitor, plugin=ours(), strategy="ddp", devices=2, default_root_dir=tmp_path
        )
        return trainer.global_step, monitor.stop_reason

    (steps_0, reason_0), (steps_1, reason_1) = run_ranks(train, 2)
    assert steps_0 == steps_1 == 6
    assert reason_0 is not None
    assert reason_1 is not None
    assert (tmp_path / "stopped_after_skips-step-6.ckpt").exists()


class Lost(Regression):
    """The weights are gone after the first step; nothing is finite from then on."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * torch.nan if batch_idx else loss


@pytest.mark.parametrize("plugin", ["bf16", "fp32 guard"])
def test_a_run_that_only_skips_says_so_without_a_loss_scale(plugin: str) -> None:
    """59 of 60 steps: too short to be ended, and not without a word."""
    ours_or_stock: dict[str, Any] = {"plugins": [AutocastPrecision("bf16-mixed")]} if plugin == "bf16" else {}
    monitor = OverflowMonitor(guard=plugin != "bf16")
    trainer = quiet_trainer(callbacks=[monitor], **ours_or_stock)
    with pytest.warns(RuntimeWarning, match=r"59 of 60 optimizer steps were skipped .* Without a loss scale"):
        trainer.fit(Lost(fused_adamw), loader(regression_batches(60)))
    assert monitor.stop_reason is None


def test_a_run_that_only_skips_is_ended_by_default(tmp_path: Path) -> None:
    trainer = quiet_trainer(
        plugins=[AutocastPrecision("bf16-mixed")], callbacks=[OverflowMonitor()], default_root_dir=tmp_path
    )
    with pytest.warns(RuntimeWarning, match="100 optimizer steps in a row were skipped, up to step 100"):
        trainer.fit(Lost(sgd), loader(regression_batches(200)))
    assert trainer.global_step == 101


@pytest.mark.full
def test_no_healthy_run_meets_the_default() -> None:
    """From the largest scale to the smallest, with all the hysteresis there is in Megatron-LM's defaults."""

    class Steep(Regression):
        """Gradients near 2^24, which are within fp16 at the smallest scale; there, those of 1 would be rounded to 0."""

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return super().training_step(batch, batch_idx) * 2.0**24

    scaler = LossScaler(init_scale=2.0**24, hysteresis=2)
    monitor = OverflowMonitor()
    trainer = quiet_trainer(plugins=[AutocastPrecision("16-mixed", scaler=scaler)], callbacks=[monitor])
    # 1 + 48 skips, then 500 steps at the scale that fits: fewer than a tenth were skipped.
    model = Steep(lambda parameters: torch.optim.SGD(parameters, lr=1e-2 / 2.0**24), overflows=range(49))
    trainer.fit(model, loader(regression_batches(549)))
    assert (monitor.skipped_steps, monitor.loss_scale, monitor.stop_reason) == (49, 2.0**-24, None)
