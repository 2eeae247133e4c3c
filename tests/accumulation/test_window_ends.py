"""What ends inside an accumulation window: an epoch, a run out of time, a validation, a budget that is not reached."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from cpu_fsdp import CpuFsdp
from gloo import run_ranks
from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler, ModelCheckpoint, Timer
from lightning.pytorch.strategies import DDPStrategy
from small_models import (
    Regression,
    ResumableLoader,
    TokenModel,
    loader,
    quiet_trainer,
    regression_batches,
    sgd,
    token_batches,
    weights,
)
from torch import Tensor, nn

from lightning_mp import AccumulationScheduler, AutocastPrecision, ChinchillaBudget, LossScaler

# -- on_train_batch_start returns -1 -----------------------------------------------------------------------------------


class Declines(Regression):
    """Leaves every epoch before the micro-batch at this place."""

    def __init__(self, place: int) -> None:
        super().__init__(sgd)
        self.place = place
        self.steps: list[int] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == self.place else None

    def on_train_epoch_end(self) -> None:
        self.steps.append(self.trainer.global_step)


def plain_loop(batches: list[Any], windows: Iterable[Iterable[int]]) -> list[Tensor]:
    module = Regression(sgd)
    optimizer = sgd(module.parameters())
    for window in windows:
        optimizer.zero_grad()
        losses = [nn.functional.mse_loss(module.net(batches[i][0]), batches[i][1]) for i in window]
        torch.stack(losses).mean().backward()
        optimizer.step()
    return weights(module)


@pytest.mark.parametrize("place", [6, 7, 8])
@pytest.mark.parametrize("precision", ["fp32", "16-mixed"])
def test_a_declined_batch_ends_its_window_with_a_step(place: int, precision: str) -> None:
    """In the middle of a window, after its first micro-batch, and where one opens."""
    half = [AutocastPrecision("16-mixed", scaler=LossScaler(init_scale=1024.0))] if precision == "16-mixed" else []
    module, batches = Declines(place), regression_batches(10)
    quiet_trainer(max_epochs=2, plugins=half, callbacks=[AccumulationScheduler({0: 3})]).fit(module, loader(batches))
    windows = [range(3), range(3, 6), *([range(6, place)] if place > 6 else [])]
    assert module.steps == [len(windows), 2 * len(windows)]
    tolerance = {"rtol": 1e-5, "atol": 1e-7} if not half else {"rtol": 1e-2, "atol": 1e-3}
    for ours, expected in zip(weights(module), plain_loop(batches, windows * 2), strict=True):
        torch.testing.assert_close(ours, expected, **tolerance)
    assert "on_train_batch_start" not in vars(module)


def test_ranks_reduce_the_gradient_of_a_declined_batch() -> None:
    """Lightning's DDP would have reduced it in the micro-batch that never came."""
    batches = regression_batches(16)

    def train(rank: int) -> list[Tensor]:
        module = Declines(7)
        strategy = DDPStrategy(process_group_backend="gloo")
        trainer = quiet_trainer(strategy=strategy, devices=2, callbacks=[AccumulationScheduler({0: 3})])
        trainer.fit(module, loader(batches[rank::2]))
        assert trainer.global_step == 3
        return weights(module)

    expected = plain_loop(batches, [range(6), range(6, 12), range(12, 14)])
    for result in run_ranks(train, 2):
        for ours, reference in zip(result, expected, strict=True):
            torch.testing.assert_close(ours, reference, rtol=1e-5, atol=1e-7)


def test_a_declined_batch_under_sharding_is_warned_of() -> None:
    def train(rank: int) -> int:
        module = Declines(7)
        trainer = quiet_trainer(strategy=CpuFsdp(), devices=2, max_epochs=2, callbacks=[AccumulationScheduler({0: 3})])
        match = "returned -1 inside a window, which continues in the next epoch.*CpuFsdp keeps"
        if rank == 0:
            with pytest.warns(UserWarning, match=match):
                trainer.fit(module, loader(regression_batches(10)))
        else:
            trainer.fit(module, loader(regression_batches(10)))
        return trainer.global_step

    assert run_ranks(train, 2) == [4, 4]


# -- max_time ----------------------------------------------------------------------------------------------------------


class SignalsStop(Callback):
    def __init__(self, after: int) -> None:
        self.after = after

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx + 1 == self.after:
            trainer.should_stop = True


@pytest.mark.parametrize("min_steps", [None, 1, 3])
def test_a_run_that_is_stopped_inside_a_window_ends_with_it(min_steps: int | None) -> None:
    trainer = quiet_trainer(
        min_steps=min_steps, min_epochs=0, callbacks=[AccumulationScheduler({0: 4}), SignalsStop(6)]
    )
    trainer.fit(Regression(sgd), loader(regression_batches(20)))
    assert trainer.global_step == (3 if min_steps == 3 else 2)
    assert trainer.min_steps == min_steps


def test_a_timer_ends_the_run_at_the_end_of_a_window() -> None:
    trainer = quiet_trainer(callbacks=[AccumulationScheduler({0: 4}), Timer({"seconds": 0})], max_epochs=-1)
    trainer.fit(Regression(sgd), loader(regression_batches(6)))
    assert trainer.global_step <= 1


# -- estimated_stepping_batches ----------------------------------------------------------------------------------------


class Asks(Regression):
    def __init__(self) -> None:
        super().__init__(sgd)
        self.estimates: list[float] = []

    def configure_optimizers(self) -> Any:
        self.estimates.append(self.trainer.estimated_stepping_batches)
        return super().configure_optimizers()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.estimates.append(self.trainer.estimated_stepping_batches)


SCHEDULES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"schedule": {0: 1, 1: 4}}, {}),
    ({"schedule": {0: 3}}, {"max_steps": 5}),
    ({"schedule": {0: 1, 4: 3}, "unit": "step"}, {}),
    ({"schedule": {0: 3}, "carry_over": True}, {}),
    ({"schedule": {0: 4}, "unit": "step"}, {"max_epochs": -1, "max_steps": 6}),
]


@pytest.mark.parametrize(("schedule", "limits"), SCHEDULES)
def test_who_asks_lightning_for_the_number_of_steps_gets_the_right_one(
    schedule: dict[str, Any], limits: dict[str, Any]
) -> None:
    module = Asks()
    trainer = quiet_trainer(callbacks=[AccumulationScheduler(**schedule)], **({"max_epochs": 3} | limits))
    trainer.fit(module, loader(regression_batches(10)))
    assert {*module.estimates, trainer.estimated_stepping_batches} == {trainer.global_step}
    assert len(module.estimates) > 5
    assert trainer.accumulate_grad_batches == 1


def test_a_number_of_steps_that_cannot_be_known_is_warned_of() -> None:
    class AsksOnce(TokenModel):
        def configure_optimizers(self) -> Any:
            self.estimate = self.trainer.estimated_stepping_batches
            return super().configure_optimizers()

    module = AsksOnce()
    trainer = quiet_trainer(callbacks=[AccumulationScheduler({0: 1, 20: 3}, unit="token")], max_epochs=2)
    with pytest.warns(
        UserWarning, match=r"AccumulationScheduler.estimated_steps\(trainer\) could not replace it.*tokens"
    ):
        trainer.fit(module, loader(token_batches([5] * 6)))
    assert module.estimate == 12


# -- checkpoints that are judged by a metric ---------------------------------------------------------------------------


class Validated(Regression):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", nn.functional.mse_loss(self.net(batch[0]), batch[1]))


def best(checkpoint: ModelCheckpoint, scheduler: Callback, every: int) -> tuple[float, float]:
    """The best score, and that of the weights in its file."""
    module, batches = Validated(sgd), regression_batches(16)
    trainer = quiet_trainer(
        callbacks=[scheduler, checkpoint], max_epochs=2, val_check_interval=every, enable_checkpointing=True
    )
    trainer.fit(module, loader(batches), loader(batches[:4]))
    saved = torch.load(checkpoint.best_model_path, weights_only=True)["state_dict"]
    again = Validated(sgd)
    again.load_state_dict(saved)
    [found] = quiet_trainer().validate(again, loader(batches[:4]), verbose=False)
    assert checkpoint.best_model_score is not None
    return float(checkpoint.best_model_score), found["val_loss"]


def test_a_file_with_other_weights_than_those_that_were_scored_is_warned_of(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path, monitor="val_loss")
    with pytest.warns(UserWarning, match=r"monitor='val_loss'\) validated inside .* one optimizer step later"):
        score, score_of_file = best(checkpoint, AccumulationScheduler({0: 4}), 5)
    assert score != score_of_file


@pytest.mark.parametrize(
    ("scheduler", "every", "weights_only"),
    [
        (AccumulationScheduler({0: 4}), 8, False),
        (AccumulationScheduler({0: 4}), 5, True),
        (AccumulationScheduler({0: 4}, save_partial_gradients=True), 5, False),
        (GradientAccumulationScheduler({0: 4}), 5, False),
    ],
    ids=["at the ends of windows", "weights alone", "with the partial gradient", "stock"],
)
def test_a_file_holds_the_weights_that_were_scored(
    scheduler: Callback, every: int, weights_only: bool, tmp_path: Path
) -> None:
    checkpoint = ModelCheckpoint(tmp_path, monitor="val_loss", save_weights_only=weights_only)
    score, score_of_file = best(checkpoint, scheduler, every)
    assert score == score_of_file


# -- a budget that is not reached --------------------------------------------------------------------------------------


class Interrupts(Callback):
    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            raise KeyboardInterrupt


def test_a_budget_that_is_not_reached_is_said_after_an_interrupt() -> None:
    trainer = quiet_trainer(callbacks=[ChinchillaBudget(tokens=100), Interrupts()], max_epochs=-1)
    with (
        pytest.raises((KeyboardInterrupt, SystemExit)),
        pytest.warns(UserWarning, match=r"the run ended after \d+ of 100 budgeted tokens .*: it was interrupted"),
    ):
        trainer.fit(TokenModel(), loader(token_batches([5] * 6)))


def test_a_budget_that_is_not_reached_is_said_where_no_step_was_made(tmp_path: Path) -> None:
    def fit(**arguments: Any) -> pl.Trainer:
        trainer = quiet_trainer(callbacks=[ChinchillaBudget(tokens=100, save=False)], max_steps=3, max_epochs=-1)
        trainer.fit(TokenModel(), ResumableLoader(token_batches([5] * 6)), **arguments)
        return trainer

    with pytest.warns(UserWarning, match="max_steps=3 ends before the budget|the run ended after 15 of 100"):
        fit().save_checkpoint(tmp_path / "x.ckpt")
    with pytest.warns(UserWarning, match="max_steps or max_epochs was reached before this fit"):
        fit(ckpt_path=tmp_path / "x.ckpt", weights_only=True)
