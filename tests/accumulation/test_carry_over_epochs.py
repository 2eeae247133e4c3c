"""AccumulationScheduler(carry_over=True): windows go on in the next epoch, and the epoch ends as always."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from gloo import run_ranks
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from small_models import (
    Regression,
    ResumableLoader,
    TokenModel,
    adamw,
    fused_adamw,
    loader,
    quiet_trainer,
    regression_batches,
    token_batches,
    weights,
)
from torch.optim import lr_scheduler

from lightning_mp import AccumulationScheduler, AutocastPrecision, ChinchillaBudget, LossScaler

LENGTHS = [5, 9, 4, 8, 7]


class Steps(Callback):
    """Micro-batches, counted over the run, that each optimizer step takes; epochs as they end."""

    def __init__(self) -> None:
        self.windows: list[list[int]] = []
        self.epoch_ends: list[tuple[int, int]] = []
        self._open: list[int] = []
        self._seen = 0

    def on_train_batch_start(self, *_: Any) -> None:
        self._open.append(self._seen)
        self._seen += 1

    def on_before_optimizer_step(self, *_: Any) -> None:
        self.windows.append(self._open)
        self._open = []

    def on_train_epoch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.epoch_ends.append((trainer.current_epoch, trainer.global_step))


def ours() -> list[Any]:
    return [AutocastPrecision("16-mixed", scaler=LossScaler(init_scale=2.0**10))]


def stock() -> list[Any]:
    return [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**10))]


def fit(
    module: pl.LightningModule, data: Any, *more: Callback, epochs: int, **arguments: Any
) -> tuple[pl.Trainer, Steps]:
    steps = Steps()
    scheduler = AccumulationScheduler({0: 3}, carry_over=True)
    trainer = quiet_trainer(callbacks=[scheduler, steps, *more], max_epochs=epochs, **arguments)
    trainer.fit(module, loader(data))
    return trainer, steps


@pytest.mark.parametrize("optimizer", [adamw, fused_adamw], ids=["unfused", "fused"])
@pytest.mark.parametrize("plugins", [list, ours, stock], ids=["fp32", "ours", "stock"])
def test_three_epochs_are_one_long_epoch(plugins: Any, optimizer: Any) -> None:
    """5 micro-batches per epoch in windows of 3: to the bit the run over all 15 at once, token weights included."""
    if plugins is stock and optimizer is fused_adamw:
        optimizer = adamw
    short, long = TokenModel(optimizer), TokenModel(optimizer)
    trainer, steps = fit(short, token_batches(LENGTHS), epochs=3, plugins=plugins())
    fit(long, token_batches(LENGTHS) * 3, epochs=1, plugins=plugins())
    assert steps.windows == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11], [12, 13, 14]]
    assert steps.epoch_ends == [(0, 1), (1, 3), (2, 5)]
    assert trainer.global_step == 5
    assert all(torch.equal(a, b) for a, b in zip(weights(short), weights(long), strict=True))


def test_the_last_epoch_closes_its_window() -> None:
    _, steps = fit(Regression(), regression_batches(4), epochs=2)
    assert steps.windows == [[0, 1, 2], [3, 4, 5], [6, 7]]


def test_schedulers_and_validation_see_epochs_as_always() -> None:
    """Per-step schedulers step with steps, per-epoch ones with epochs; validation zeroes no open gradient."""

    class Both(Regression):
        validations = 0

        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            per_step = lr_scheduler.LambdaLR(optimizer, lambda count: 1.0)
            per_epoch = lr_scheduler.LambdaLR(optimizer, lambda count: 1.0)
            return [optimizer], [{"scheduler": per_step, "interval": "step"}, per_epoch]

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.validations += 1

    data = regression_batches(5)
    module, plain = Both(adamw), Regression(adamw)
    steps, scheduler = Steps(), AccumulationScheduler({0: 3}, carry_over=True)
    trainer = quiet_trainer(callbacks=[scheduler, steps], max_epochs=3, num_sanity_val_steps=0)
    trainer.fit(module, loader(data), loader(data[:1]))
    fit(plain, data * 3, epochs=1)
    counts = [config.scheduler.last_epoch for config in trainer.lr_scheduler_configs]
    assert counts == [5, 3]
    assert module.validations == 3
    assert all(torch.equal(a, b) for a, b in zip(weights(module), weights(plain), strict=True))
    assert "on_validation_model_zero_grad" not in vars(module), "unwrapped after fit"


def test_loggers_count_the_steps_that_were_made() -> None:
    class Logged(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("loss", torch.tensor(1.0))
            return super().training_step(batch, batch_idx)

    class Axis(Callback):
        last = 0

        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            self.last = trainer.fit_loop.epoch_loop._batches_that_stepped

    axis = Axis()
    trainer, _ = fit(Logged(), regression_batches(5), axis, epochs=3)
    assert axis.last == trainer.global_step - 1, "Lightning adds the last one after this hook"


def test_the_end_of_a_stop_waits_for_the_window_in_the_next_epoch() -> None:
    class Stop(Callback):
        def on_train_epoch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            trainer.should_stop = True

    trainer, steps = fit(Regression(), regression_batches(5), Stop(), epochs=-1)
    assert steps.windows == [[0, 1, 2], [3, 4, 5]]
    assert trainer.global_step == 2


def test_checkpoints_of_an_epochs_end_wait_for_the_window(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path, save_top_k=-1, filename="{epoch}-{step}")
    fit(Regression(), regression_batches(5), checkpoint, epochs=3, enable_checkpointing=True)
    assert {file.name for file in tmp_path.glob("*.ckpt")} == {
        "epoch=1-step=2.ckpt",
        "epoch=2-step=4.ckpt",
        "epoch=2-step=5.ckpt",
    }


@pytest.mark.full
def test_two_ranks_carry_over_together_with_one_reduction_per_window() -> None:
    def train(rank: int, epochs: int) -> Any:
        data = [token_batches(LENGTHS), token_batches([7, 3, 9, 6, 2])][rank]
        module = TokenModel(adamw)
        _, steps = fit(module, data * (3 // epochs), epochs=epochs, strategy="ddp", devices=2)
        return [w.clone() for w in weights(module)], steps.windows

    (first, windows), (second, _) = run_ranks(lambda rank: train(rank, 3), 2)
    reference, reference_windows = run_ranks(lambda rank: train(rank, 1), 2)[0]
    assert windows == reference_windows
    for a, b, c in zip(first, second, reference, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)


def test_a_budget_lands_inside_of_a_carried_over_window() -> None:
    budget = ChinchillaBudget(tokens=40)
    _, steps = fit(TokenModel(), token_batches(LENGTHS), budget, epochs=-1)
    assert budget.tokens_seen == 40
    assert steps.windows == [[0, 1, 2], [3, 4, 5], [6]]


def test_the_estimate_knows_it() -> None:
    scheduler = AccumulationScheduler({0: 3, 1: 4, 2: 2}, carry_over=True)

    class Asking(Regression):
        def configure_optimizers(self) -> Any:
            self.estimate = scheduler.estimated_steps(self.trainer)
            return super().configure_optimizers()

    module = Asking()
    trainer = quiet_trainer(callbacks=[scheduler], max_epochs=4)
    trainer.fit(module, loader(regression_batches(5)))
    assert trainer.global_step == module.estimate


def test_a_resume_at_the_end_of_an_epoch_goes_on_inside_of_the_window(tmp_path: Path) -> None:
    data = regression_batches(5)

    def trainer(epochs: int) -> pl.Trainer:
        scheduler = AccumulationScheduler({0: 3}, carry_over=True, save_partial_gradients=True)
        checkpoint = ModelCheckpoint(tmp_path, save_top_k=-1, filename="{epoch}")
        return quiet_trainer(callbacks=[scheduler, checkpoint], max_epochs=epochs, enable_checkpointing=True)

    straight = Regression(adamw)
    trainer(3).fit(straight, ResumableLoader(data))
    resumed = Regression(adamw)
    with pytest.warns(UserWarning, match="Checkpoint directory .* exists and is not empty"):
        trainer(3).fit(resumed, ResumableLoader(data), ckpt_path=tmp_path / "epoch=0.ckpt", weights_only=True)
    assert all(torch.equal(a, b) for a, b in zip(weights(resumed), weights(straight), strict=True))


def test_plateau_schedulers_per_step_are_refused() -> None:
    class Plateau(Regression):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            plateau = lr_scheduler.ReduceLROnPlateau(optimizer)
            return [optimizer], [{"scheduler": plateau, "interval": "step", "monitor": "loss"}]

    with pytest.raises(MisconfigurationException, match=r"carry_over=True\) cannot be used with ReduceLROnPlateau"):
        fit(Plateau(), regression_batches(2), epochs=1)
