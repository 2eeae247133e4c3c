"""BudgetForecast: the law is fed with the right pairs of tokens and losses, and what comes of it is told."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import small_models
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from small_models import ResumableLoader, TokenModel, adamw, token_batches

from lightning_mp import AccumulationScheduler, AutocastPrecision, ChinchillaBudget
from lightning_mp.callbacks import budget_forecast as module_under_test
from lightning_mp.callbacks.budget_forecast import BudgetForecast

BATCHES = token_batches([6] * 8)


class Follows(TokenModel):
    """Logs a loss that follows a known law of the tokens it has seen."""

    name = "train/loss"

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log(self.name, torch.tensor(2.0 + 30.0 * self.trained_tokens**-0.5))
        return loss


def fit(forecast: BudgetForecast, *more: Any, data: Any = None, **arguments: Any) -> pl.Trainer:
    budget = arguments.pop("budget", ChinchillaBudget(tokens=12_000))
    batches = BATCHES if data is None else data
    return small_models.fit(Follows(adamw), batches, forecast, budget, *more, **({"max_epochs": -1} | arguments))


@pytest.mark.filterwarnings(
    "ignore:ChinchillaBudget. max_steps=.* ends before the budget|ChinchillaBudget. the run ended after"
)
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_points_pair_the_tokens_of_a_window_with_its_loss(micro_batches: int) -> None:
    forecast = BudgetForecast("train/loss")
    fit(forecast, AccumulationScheduler({0: micro_batches}), max_steps=9, limit_train_batches=6)
    assert forecast.tokens == [6.0 * micro_batches * step for step in range(1, 10)]
    assert forecast.losses == pytest.approx([2.0 + 30.0 * tokens**-0.5 for tokens in forecast.tokens])


class LogsRarely(Follows):
    """The mean of an epoch, or only every third step: what ``callback_metrics`` holds meanwhile is an old value."""

    on_epoch = False

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        if self.on_epoch:
            super().log(name, value, on_step=False, on_epoch=True)
        elif self.trainer.global_step % 3 == 0:
            super().log(name, value)


@pytest.mark.filterwarnings("ignore:ChinchillaBudget. .*")
@pytest.mark.parametrize("on_epoch", [False, True])
def test_a_loss_that_was_not_logged_in_a_window_is_no_point(on_epoch: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Seen: 12 means of epochs made 91 points, and a narrow band."""
    forecast, module = BudgetForecast("train/loss", every_n_steps=12), LogsRarely(adamw)
    module.on_epoch = on_epoch
    budget = ChinchillaBudget(tokens=12_000)
    with caplog.at_level("INFO"):
        small_models.fit(module, BATCHES[:6], forecast, budget, max_epochs=-1, max_steps=24)
    tokens = [42.0, 78.0, 114.0] if on_epoch else [6.0 + 18.0 * index for index in range(8)]
    assert forecast.tokens == tokens
    assert "BudgetForecast('train/loss') made no forecast. A forecast needs 20 points" in caplog.text


@pytest.mark.full
@pytest.mark.filterwarnings(
    "ignore:ChinchillaBudget. max_steps=.* ends before the budget|ChinchillaBudget. the run ended after"
)
def test_the_forecast_is_that_of_the_law_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    forecast = BudgetForecast("train/loss", every_n_steps=50)
    with caplog.at_level("INFO"):
        trainer = fit(forecast, max_steps=400, plugins=[AutocastPrecision("bf16-mixed")])
    assert forecast.loss is not None
    assert forecast.time is not None
    assert forecast.loss.loss == pytest.approx(2.0 + 30.0 * 12_000**-0.5, abs=0.01)
    assert trainer.callback_metrics["mp/forecast_loss"] == pytest.approx(forecast.loss.loss)
    assert trainer.callback_metrics["mp/forecast_seconds"] > 0
    assert "after 12K tokens" in caplog.text
    assert "The budget ends in 0:0" in caplog.text
    assert "BudgetForecast: loss 2.27" in caplog.text


def test_the_points_of_a_long_run_are_thinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module_under_test, "_MOST_POINTS", 16)
    forecast = BudgetForecast("train/loss")
    for window in range(1, 200):
        forecast._note(float(window), 1.0)
    assert len(forecast.tokens) <= 17
    assert forecast.tokens[-1] >= 190
    assert forecast.tokens == sorted(forecast.tokens)


@pytest.mark.filterwarnings(
    "ignore:ChinchillaBudget. max_steps=.* ends before the budget|ChinchillaBudget. the run ended after|You.re resuming"
)
def test_points_survive_a_resume(tmp_path: Path) -> None:
    trainer = fit(BudgetForecast("train/loss"), max_steps=8, data=ResumableLoader(BATCHES))
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    again = BudgetForecast("train/loss")
    fit(again, max_steps=12, data=ResumableLoader(BATCHES), ckpt_path=tmp_path / "x.ckpt")
    assert again.tokens[:7] == [6.0 * step for step in range(1, 8)]
    assert again.tokens == sorted(again.tokens)
    assert len(again.tokens) > 8


@pytest.mark.filterwarnings(
    "ignore:ChinchillaBudget. max_steps=.* ends before the budget|ChinchillaBudget. the run ended after"
)
def test_a_loss_that_nobody_logs_is_told_of() -> None:
    with pytest.warns(UserWarning, match=r"BudgetForecast\('loss'\) sees no loss: the module logs .*train/loss"):
        fit(BudgetForecast("loss"), max_steps=4)


def test_without_a_budget_in_tokens_there_is_nothing_to_forecast() -> None:
    with pytest.raises(MisconfigurationException, match="forecasts the end of a ChinchillaBudget in tokens or FLOPs"):
        fit(BudgetForecast("loss"), budget=ChinchillaBudget(device_hours=1))
