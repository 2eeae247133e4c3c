"""TokenLearningRate: the rate that every optimizer step really uses, by the tokens trained on before it."""

import csv
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from gradient_counter import CountGradientTraffic
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from recorded_rates import COSINE, LENGTHS, TOTAL, WSD, Recording, adamw, expected, first, fit, fused, tensor_rate
from small_models import Regression, at, loader, quiet_trainer, regression_batches, token_batches
from torch import nn
from torch.optim import lr_scheduler

from lightning_mp import (
    AccumulationScheduler,
    AutocastPrecision,
    ChinchillaBudget,
    LossScaler,
    MasterWeightsPrecision,
    OverflowMonitor,
)
from lightning_mp.callbacks.token_learning_rate import TokenLearningRate
from lightning_mp.training.lr_schedule.progress import set_rates
from lightning_mp.training.lr_schedule.schedules import WarmupCosine


def half(**arguments: Any) -> AutocastPrecision:
    return AutocastPrecision("16-mixed", scaler=LossScaler(init_scale=2.0**10), **arguments)


def stock_half() -> MixedPrecision:
    return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**10))


PLUGINS: dict[str, Any] = {
    "fp32": dict,
    "stock bf16": lambda: {"precision": "bf16-mixed"},
    "stock fp16": lambda: {"plugins": [stock_half()]},
    "bf16": lambda: {"plugins": [AutocastPrecision("bf16-mixed")]},
    "fp16": lambda: {"plugins": [half()]},
    "masters": lambda: {"plugins": [MasterWeightsPrecision("bf16-true")]},
}


# -- the rate of every step --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", [adamw, fused, tensor_rate])
@pytest.mark.parametrize("plugin", PLUGINS)
def test_each_step_uses_the_schedule_at_the_tokens_before_it(plugin: str, optimizer: Any) -> None:
    """No lag: the tokens of the step before count, whatever the plugin and the optimizer, also under a ramp."""
    module, rate = Recording(optimizer), TokenLearningRate(COSINE, tokens=TOTAL)
    monitor = [OverflowMonitor()] if plugin == "stock fp16" else []
    # 1 micro-batch per step up to 20 tokens, then 3: the change comes two windows after the threshold.
    ramp = AccumulationScheduler({0: 1, 20: 3}, unit="token")
    fit(module, [rate, ramp, *monitor], **PLUGINS[plugin]())
    windows = [5, 9, 4, 8, 7, 3 + 9 + 6, 8 + 5 + 7, 9 + 4 + 6, 5 + 5]
    if optimizer is tensor_rate:
        wanted = [float(torch.tensor(float(torch.tensor(1e-2)) * r * 100)) for r in expected(COSINE, windows)]
        assert first(module) == pytest.approx(wanted, rel=1e-6)
    else:
        assert first(module) == expected(COSINE, windows)
    assert len(first(module)) == 9


def test_groups_keep_their_ratios() -> None:
    module = Recording(ratio=0.25)
    fit(module, [TokenLearningRate(WSD, tokens=TOTAL)])
    assert [rates[1] for rates in module.rates] == expected(WSD, LENGTHS)
    assert first(module) == expected(WSD, LENGTHS, peak=0.25e-2)


def test_constant_tokens_per_step_equal_torchs_schedulers() -> None:
    class Stock(Recording):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            parts = [
                lr_scheduler.LinearLR(optimizer, start_factor=0.05, total_iters=4),
                lr_scheduler.CosineAnnealingLR(optimizer, T_max=28, eta_min=1e-3),
            ]
            scheduler = lr_scheduler.SequentialLR(optimizer, parts, [4])
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    stock, ours = Stock(), Recording()
    fit(stock, [], [10] * 32)
    fit(ours, [TokenLearningRate(WarmupCosine(warmup=4 / 32, final=0.1, start=0.05), tokens=320)], [10] * 32)
    assert first(ours) == pytest.approx(first(stock), rel=1e-12)


@pytest.mark.parametrize("order", [1, -1])
def test_the_horizon_is_the_budget(order: int) -> None:
    """8 windows of the first epoch and 5 of the second: 77 tokens per epoch of 10, and 123 in all, to the token."""
    module, rate = Recording(), TokenLearningRate(WSD)
    fit(module, [rate, ChinchillaBudget(tokens=123)][::order], max_epochs=-1)
    windows = [*LENGTHS, 5, 9, 4, 5]
    assert rate.horizon_tokens == sum(windows) == 123
    assert first(module) == expected(WSD, windows, 123)


def test_a_horizon_in_words_and_a_rate_that_stays_at_the_end() -> None:
    module = Recording()
    fit(module, [TokenLearningRate(COSINE, tokens="0.08K")])
    assert first(module) == expected(COSINE, LENGTHS, 80)
    assert first(module)[-3:] == [1e-3] * 3


def test_tokens_are_counted_by_a_function() -> None:
    class Counted(Regression):
        pass

    module, rates = Counted(), []
    trainer = quiet_trainer(callbacks=[TokenLearningRate(lambda f: 1 - f / 2, tokens=80, count=lambda batch: 10)])
    module.on_train_batch_end = lambda *_: rates.append(trainer.optimizers[0].param_groups[0]["lr"])  # type: ignore[method-assign]
    trainer.fit(module, loader(regression_batches(8)))
    assert rates == [1e-2 * (1 - tokens / 80 / 2) for tokens in range(0, 80, 10)]


@pytest.mark.parametrize("optimizer", [adamw, tensor_rate])
@pytest.mark.parametrize("plugin", ["fp16", "stock fp16"])
@pytest.mark.parametrize("on_waste", ["none", "extend", "report"])
def test_a_skipped_step_does_not_advance_the_schedule(plugin: str, optimizer: Any, on_waste: str) -> None:
    """D07. Without a budget and where skips are made up for, the steps that are made use the rates of a run without
    them; where they are spent, the schedule ends with the run all the same."""
    skipped = (0, 3, 4, 9)
    module = Recording(optimizer, overflows=skipped)
    rate = TokenLearningRate(COSINE, tokens=85 if on_waste == "none" else None)
    budget = [] if on_waste == "none" else [ChinchillaBudget(tokens=TOTAL, on_waste=on_waste)]  # type: ignore[arg-type]
    monitor = [OverflowMonitor()] if plugin == "stock fp16" else []
    epochs = 1 if on_waste == "none" else -1
    fit(module, [rate, *budget, *monitor], max_epochs=epochs, **PLUGINS[plugin]())
    rates = first(module)
    windows = list(LENGTHS)
    if on_waste == "extend":
        windows += [5, 9, 4, 8][: len(rates)]
    made = [tokens for index, tokens in enumerate(windows) if index not in skipped]
    if len(rates) > len(made):
        # fused: the step of an overflow is called, and leaves the weights alone
        assert [rates[index] for index in skipped] == [rates[index + 1] for index in skipped]
        rates = [r for index, r in enumerate(rates) if index not in skipped]
    tolerance = 1e-6 if optimizer is tensor_rate else 0.0
    if on_waste == "report":
        assert rates[0] == pytest.approx(1e-2 * COSINE(0.0), rel=tolerance)
        assert rate._run.advance(sum(made), sum(LENGTHS[index] for index in skipped), skips_shorten=True) == 0.1
    else:
        assert rates == pytest.approx(expected(COSINE, made, rate.horizon_tokens)[: len(rates)], rel=tolerance)
        assert len(rates) >= 12


def test_a_stock_plugin_that_hides_its_skips_is_named() -> None:
    with pytest.warns(
        UserWarning, match=r"MixedPrecision does not report which steps it skips.*add OverflowMonitor\(\)"
    ):
        fit(Recording(), [TokenLearningRate(COSINE, tokens=TOTAL)], plugins=[stock_half()])


# -- beside others -----------------------------------------------------------------------------------------------------


def test_a_monitor_shows_the_rate_of_the_step_before(tmp_path: Any) -> None:
    logger = CSVLogger(tmp_path)
    module = Recording(ratio=0.25)
    callbacks = [LearningRateMonitor("step"), TokenLearningRate(COSINE, tokens=TOTAL)]
    fit(module, callbacks, logger=logger, log_every_n_steps=1)
    with open(f"{logger.log_dir}/metrics.csv") as file:
        logged = [float(row["lr-AdamW/pg2"]) for row in csv.DictReader(file) if row["lr-AdamW/pg2"]]
    used = [rates[1] for rates in module.rates]
    assert logged == [used[0], *used[:-1]]


def test_nothing_waits_for_a_rate_that_is_a_tensor() -> None:
    """Promise 5; with a rate that is a number, tools/test_bench_cost.py counts."""

    def waits(*callbacks: pl.Callback) -> list[int]:
        module = Recording(tensor_rate)
        counter = CountGradientTraffic(module)
        fit(module, [counter, AccumulationScheduler({0: 2}), *callbacks], plugins=[AutocastPrecision("bf16-mixed")])
        return [row.host_waits for row in counter.rows[2:-1]]

    assert waits(TokenLearningRate(COSINE, tokens=TOTAL)) == waits()


def test_a_group_that_joins_later_keeps_its_ratio() -> None:
    class Joining(Recording):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 5:
                extra = nn.Parameter(torch.zeros(3))
                self.trainer.optimizers[0].add_param_group({"params": [extra], "lr": 5e-3})

    module = Joining()
    fit(module, [TokenLearningRate(COSINE, tokens=TOTAL)])
    assert first(module) == expected(COSINE, LENGTHS)
    assert [rates[1] for rates in module.rates if len(rates) > 1] == expected(COSINE, LENGTHS, peak=5e-3)[5:]


def test_a_step_before_the_first_batch_keeps_its_rate_after_a_fit_that_failed() -> None:
    """As distributed checkpoints make one, to have the optimizer's state to read into."""

    class Failing(Recording):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise RuntimeError("planted")

    rate, module = TokenLearningRate(COSINE, tokens=TOTAL), Recording()
    with pytest.raises(RuntimeError, match="planted"):
        fit(Failing(), [rate])
    fit(module, [rate, at(lambda trainer, _: trainer.optimizers[0].step(), "on_fit_start")])
    assert first(module) == [1e-2, *expected(COSINE, LENGTHS)]


def test_a_second_fit_goes_on_and_another_trainer_begins_anew() -> None:
    rate = TokenLearningRate(COSINE, tokens=2 * TOTAL)
    module = Recording()
    with pytest.warns(UserWarning, match="a run of batches like the first has about 128 tokens: it is 56% longer"):
        trainer = fit(module, [rate])
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, loader(token_batches(LENGTHS)))
    assert first(module) == expected(COSINE, LENGTHS * 2, 2 * TOTAL)

    other = Recording()
    fit(other, [rate], max_epochs=2)
    assert first(other) == expected(COSINE, LENGTHS * 2, 2 * TOTAL)


def test_a_rate_that_is_a_tensor_stays_that_tensor() -> None:
    """Captured and compiled steps hold on to it. Its first value is kept as a number, which nobody waits for."""
    optimizer = tensor_rate([nn.Parameter(torch.zeros(1))])
    (group,) = optimizer.param_groups
    group["initial_lr"] = group["lr"].clone()  # as torch's schedulers leave it
    rate = group["lr"]
    set_rates(optimizer, 0.5)
    assert group["lr"] is rate
    assert rate == 0.5 * torch.tensor(1e-2)
    assert type(group["initial_lr"]) is float


# -- warnings and refusals ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "tokens", "callbacks", "arguments", "message"),
    [
        (COSINE, 126, [], {}, "the horizon is 126 tokens and the run ended after 100 tokens: it is 26% longer"),
        (COSINE, 1000, [], {"max_steps": 4}, "a run of batches like the first has about 32 tokens: it is 3025% longer"),
        (COSINE, 130, ["budget"], {"max_epochs": -1}, "the budget has 100 tokens: it is 30% longer than the run"),
        (COSINE, 50, ["budget"], {"max_epochs": -1}, "the last 50% of the run are trained at 0.1 of the peak"),
        (WSD, 101, ["budget"], {"max_epochs": -1}, "the run ends before its cooldown does"),
    ],
)
def test_a_horizon_that_misses_the_run_is_warned_of_once(
    schedule: Any, tokens: int, callbacks: list[str], arguments: dict[str, Any], message: str
) -> None:
    """Hoffmann et al. 2022, appendix B, figure A1."""
    budget = [ChinchillaBudget(tokens=TOTAL)] if callbacks else []
    with pytest.warns(UserWarning, match=message) as caught:
        fit(Recording(), [TokenLearningRate(schedule, tokens=tokens), *budget], **arguments)
    assert sum("TokenLearningRate" in str(warning.message) for warning in caught) == 1


def test_steps_that_are_still_to_grow_are_no_reason_to_warn() -> None:
    """Four steps of one micro-batch and four of four have 126 tokens."""
    ramp = AccumulationScheduler({0: 1, 4: 4}, unit="step")
    module = Recording()
    fit(module, [TokenLearningRate(COSINE, tokens=126), ramp], max_epochs=-1, max_steps=8)
    assert module.trained_tokens == 126


def test_a_trial_of_one_batch_warns_of_nothing() -> None:
    fit(Recording(), [TokenLearningRate(COSINE, tokens=1000)], fast_dev_run=1)


def test_what_cannot_work_is_refused_at_set_up() -> None:
    class Scheduled(Recording):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            return [optimizer], [lr_scheduler.StepLR(optimizer, 1)]

    class NoRate(Recording):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            optimizer.param_groups[0]["lr"] = None
            return optimizer

    class Manual(Recording):
        automatic_optimization = False

    def rate() -> TokenLearningRate:
        return TokenLearningRate(COSINE, tokens=TOTAL)

    hours = ChinchillaBudget(device_hours=1)
    for module, callbacks, message in [
        (Scheduled(), [rate()], "TokenLearningRate and StepLR both set the learning rate. Return the optimizer alone"),
        (NoRate(), [rate()], "cannot schedule AdamW, which has a parameter group without a learning rate"),
        (Recording(), [TokenLearningRate(COSINE)], "does not know how long the run is. Give tokens=, or add a Chin"),
        (Recording(), [TokenLearningRate(COSINE), hours], "device_hours alone do not determine a number of tokens"),
        (Manual(), [rate()], "TokenLearningRate needs automatic optimization"),
    ]:
        with pytest.raises(MisconfigurationException, match=message):
            fit(module, callbacks)  # type: ignore[arg-type]
    with pytest.raises(MisconfigurationException, match="cannot count tokens in a batch of type 'list'.*Pass count="):
        quiet_trainer(callbacks=[rate()]).fit(Regression(), loader(regression_batches(4)))
