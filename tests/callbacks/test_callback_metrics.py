"""When and where the numbers of our callbacks are logged."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import small_models
from gloo import run_ranks
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint, RichProgressBar, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger
from memory_logger import MemoryLogger
from small_models import (
    Regression,
    TokenModel,
    at,
    fused_adamw,
    loader,
    quiet_trainer,
    raising,
    regression_batches,
    sgd,
    token_batches,
)

from lightning_mp import (
    AccumulationScheduler,
    AutocastPrecision,
    ChinchillaBudget,
    LossScaler,
    MFUMonitor,
    OverflowMonitor,
)

SKIPPED = [2, 5]


def plugin(precision: Any = "16-mixed") -> AutocastPrecision:
    return AutocastPrecision(precision, scaler=LossScaler(init_scale=2.0**10) if precision == "16-mixed" else None)


def fit(*callbacks: Callback, precision: str = "16-mixed", steps: int = 10, **arguments: Any) -> pl.Trainer:
    module, batches = Regression(fused_adamw, overflows=SKIPPED), regression_batches(steps)
    return small_models.fit(module, batches, *callbacks, plugin=plugin(precision), **arguments)


class ShownBy:
    """A progress bar that keeps what it would show."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.shown: list[dict[str, Any]] = []

    def get_metrics(self, trainer: Any, pl_module: Any) -> Any:
        self.shown.append(dict(super().get_metrics(trainer, pl_module)))  # type: ignore[misc]
        return self.shown[-1]


class TQDM(ShownBy, TQDMProgressBar):
    pass


class Rich(ShownBy, RichProgressBar):
    pass


def test_rows_come_at_logging_steps_and_at_the_end() -> None:
    """On Lightning's own axis; with a fused optimizer the last outcome is known at the end only."""
    logger = MemoryLogger()
    fit(OverflowMonitor(), logger=[logger], log_every_n_steps=4, steps=10)
    assert [(step, row["skipped_steps"]) for step, row in logger.ours()] == [(3, 1), (7, 2), (9, 2)]
    assert logger.ours()[-1][1]["overflow_rate"] == 2 / 10


@pytest.mark.parametrize("optimizer", [fused_adamw, sgd])
@pytest.mark.parametrize("beside", [(), (MFUMonitor,), (OverflowMonitor, MFUMonitor)])
def test_counts_are_those_of_the_step_with_every_optimizer_whatever_stands_beside(optimizer: Any, beside: Any) -> None:
    """On a CPU; on another device the totals of a window are read one window late."""
    logger = MemoryLogger()
    small_models.fit(
        TokenModel(optimizer),
        token_batches([6, 5, 7, 4]),
        ChinchillaBudget(tokens=22, save=False),
        *(callback() for callback in beside),
        plugin=plugin("bf16-mixed"),
        logger=logger,
        log_every_n_steps=1,
    )
    rows = dict(logger.ours())
    assert [rows[step]["tokens"] for step in range(4)] == [6, 11, 18, 22]
    assert [rows[step]["budget_fraction"] for step in range(4)] == [6 / 22, 11 / 22, 18 / 22, 1]
    if OverflowMonitor in beside:
        late = 1 if optimizer is fused_adamw else 0  # what the step was is known one step late
        assert next(step for step, row in logger.ours() if "skipped_steps" in row) == late


def test_windows_of_two_micro_batches_make_one_row_each() -> None:
    logger = MemoryLogger()
    fit(OverflowMonitor(), AccumulationScheduler({0: 2}), logger=logger, log_every_n_steps=1, steps=6)
    # The outcome of the first step is known with the second one, that of the last one at the end.
    assert [step for step, _ in logger.ours()] == [1, 2, 2]


def test_nothing_is_logged_between_logging_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    metrics = OverflowMonitor._metrics
    monkeypatch.setattr(OverflowMonitor, "_metrics", lambda self: (asked.append(1), metrics(self))[1])
    monkeypatch.setattr(pl.LightningModule, "log", lambda *_, **__: pytest.fail("log was called"))
    fit(OverflowMonitor(), logger=MemoryLogger(), log_every_n_steps=5, steps=10)
    assert len(asked) == 2 + 2, "two logging steps, the end of the epoch and the end of the run"


@pytest.mark.parametrize("logger", [False, True], ids=["no logger", "two loggers"])
def test_every_logger_gets_the_same_rows(logger: bool, tmp_path: Path) -> None:
    loggers = [MemoryLogger(), MemoryLogger(), CSVLogger(tmp_path)] if logger else []
    trainer = fit(OverflowMonitor(), logger=loggers, log_every_n_steps=5)
    assert trainer.callback_metrics["mp/skipped_steps"] == 2
    if logger:
        assert loggers[0].rows == loggers[1].rows != []
        last = (Path(loggers[2].log_dir) / "metrics.csv").read_text().splitlines()
        assert float(dict(zip(last[0].split(","), last[-1].split(","), strict=True))["mp/skipped_steps"]) == 2


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, RuntimeError])
def test_a_run_that_breaks_off_logs_what_it_knew(interrupt: type[BaseException]) -> None:
    logger, monitor = MemoryLogger(), OverflowMonitor()
    with pytest.raises((SystemExit, RuntimeError)):
        fit(monitor, at(raising(interrupt), "on_train_batch_start", batch_idx=7), logger=logger, log_every_n_steps=50)
    [(step, row)] = logger.ours()
    assert (step, row["skipped_steps"]) == (6, monitor.skipped_steps)


@pytest.mark.filterwarnings("ignore:ChinchillaBudget. the data end before the budget")
def test_the_last_row_is_what_the_terminal_says(capsys: Any) -> None:
    logger, budget = MemoryLogger(), ChinchillaBudget(tokens=70)
    small_models.fit(TokenModel(fused_adamw), token_batches([9, 5, 7, 8, 6, 9]), budget, logger=logger, max_epochs=-1)
    assert logger.ours()[-1][1] == {"tokens": 70.0, "budget_fraction": 1.0}
    assert budget.tokens_spent == 70


@pytest.mark.parametrize("bar", [TQDM, Rich])
def test_the_bar_shows_the_scale_and_skips_from_the_first_one_on(bar: Any) -> None:
    shown = bar(refresh_rate=1)
    trainer = fit(OverflowMonitor(), shown, enable_progress_bar=True, steps=8)
    skips = [row.get("mp/skipped_steps") for row in shown.shown]
    assert skips[:2] == [None, None]
    assert skips[-1] == 2.0
    assert shown.shown[-1]["mp/loss_scale"] == 2.0**8
    assert "get_metrics" not in vars(shown)
    assert trainer.progress_bar_metrics["mp/skipped_steps"] == 2.0


def test_the_bar_asks_only_when_it_refreshes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    on_bar = OverflowMonitor._on_bar
    monkeypatch.setattr(OverflowMonitor, "_on_bar", lambda self: (asked.append(1), on_bar(self))[1])
    fit(OverflowMonitor(), TQDM(refresh_rate=10), enable_progress_bar=True, steps=20)
    assert len(asked) == 2 + 1, "every ten batches, and at the end of the epoch"


@pytest.mark.parametrize("precision", ["bf16-mixed", "32-true"])
def test_a_run_without_a_loss_scale_logs_none(precision: str) -> None:
    bar, monitor = TQDM(), OverflowMonitor()
    plugins = [plugin()] if precision == "bf16-mixed" else []
    trainer = quiet_trainer(
        **({"plugins": [plugin(precision)]} if plugins else {"precision": precision}),
        callbacks=[monitor, bar],
        enable_progress_bar=True,
    )
    trainer.fit(Regression(fused_adamw), loader(regression_batches(4)))
    assert trainer.callback_metrics["mp/overflow_rate"] == 0.0
    assert "mp/loss_scale" not in trainer.callback_metrics
    assert not [name for name in bar.shown[-1] if name.startswith("mp/")]


def test_monitors_find_the_numbers(tmp_path: Path) -> None:
    """Each micro-batch where somebody monitors one; at the end of an epoch anyway."""
    kept = ModelCheckpoint(tmp_path, monitor="mp/overflow_rate", every_n_train_steps=4, save_top_k=-1)
    stop = EarlyStopping("mp/skipped_steps", patience=0, mode="max", check_on_train_epoch_end=True)
    trainer = fit(OverflowMonitor(), stop, kept, enable_checkpointing=True, steps=8, max_epochs=5)
    # The same Regression overflows no more, so the second epoch has no more skips than the first.
    assert trainer.current_epoch == 2
    rates = {int(path.rsplit("step=")[-1][:-5]): float(rate) for path, rate in kept.best_k_models.items()}
    assert rates[4] == pytest.approx(1 / 3, abs=1e-6)


def test_a_subclass_keeps_its_own_hooks() -> None:
    called = []

    class Mine(OverflowMonitor):
        def on_train_batch_end(self, *args: Any) -> None:
            called.append("batch end")
            super().on_train_batch_end(*args)

        def on_before_zero_grad(self, *args: Any) -> None:
            called.append("zero grad")
            super().on_before_zero_grad(*args)

    fit(Mine(), steps=3)
    assert called == ["zero grad", "batch end"] * 3


def test_a_second_fit_with_the_same_trainer_logs_again() -> None:
    logger = MemoryLogger()
    trainer = quiet_trainer(plugins=[plugin()], callbacks=[OverflowMonitor()], logger=logger, log_every_n_steps=2)
    for _ in range(2):
        trainer.fit(Regression(fused_adamw), loader(regression_batches(4)))
        trainer.fit_loop.epoch_progress.reset()
        trainer.fit_loop.max_epochs = 1
    assert [step for step, _ in logger.ours()] == [1, 3, 3, 5, 7, 7]


@pytest.mark.full
def test_only_the_first_rank_logs_and_all_can_monitor() -> None:
    def train(rank: int) -> Any:
        logger = MemoryLogger()
        trainer = fit(OverflowMonitor(), strategy="ddp", devices=2, logger=logger, log_every_n_steps=2, steps=6)
        return len(logger.ours()), float(trainer.callback_metrics["mp/skipped_steps"])

    assert run_ranks(train, 2) == [(4, 2.0), (0, 2.0)]
