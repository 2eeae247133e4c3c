"""A part of the pack that is given to the wrong argument of a Trainer says where it belongs, wherever it is asked."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from small_models import Regression, loader, quiet_trainer, regression_batches

import lightning_mp as mp

CALLBACKS: list[Callable[[], Any]] = [mp.OverflowMonitor, mp.MFUMonitor, mp.StopAtBoundary, mp.UnderflowMonitor]
PLUGINS: list[Callable[[], Any]] = [
    lambda: mp.AutocastPrecision("bf16-mixed"),
    lambda: mp.MasterWeightsPrecision("bf16-true"),
    mp.Float8Precision,
    mp.TF32Precision,
]
STRATEGIES: list[Callable[[], Any]] = [
    mp.FSDP2Strategy,
    mp.PipelineParallelStrategy,
    lambda: mp.ReducedPrecisionDDPStrategy("bf16"),
]
BELONGS = {
    "a callback: use Trainer(callbacks=[...])": CALLBACKS,
    "a precision plugin: use Trainer(plugins=[...])": PLUGINS,
    "a strategy: use Trainer(strategy=...)": STRATEGIES,
    "AutocastPrecision('16-mixed', scaler=...)": [mp.LossScaler],
    "a policy: use AutocastPrecision(..., policy=...)": [mp.PrecisionPolicy.default],
}
PARTS = [(make, place) for place, parts in BELONGS.items() for make in parts]


@pytest.mark.parametrize("argument", ["plugins", "precision", "strategy"])
@pytest.mark.parametrize(("make", "place"), PARTS, ids=lambda value: getattr(value, "__name__", value))
def test_an_error_of_the_trainer_says_where_the_part_belongs(make: Any, place: str, argument: str) -> None:
    part = make()
    right = {"plugins": PLUGINS, "strategy": STRATEGIES}.get(argument, [])
    if make in right:
        assert place not in repr(part)
        return
    with pytest.raises((MisconfigurationException, ValueError)) as caught:
        pl.Trainer(**{"accelerator": "cpu", argument: [part] if argument == "plugins" else part})
    assert place in str(caught.value)
    assert place not in repr(part)


@pytest.mark.parametrize("make", [*PLUGINS, mp.LossScaler])
def test_a_plugin_among_the_callbacks_is_refused(make: Callable[[], Any]) -> None:
    part = make()
    with pytest.raises(MisconfigurationException, match=rf"{type(part).__name__} was given among the callbacks and is"):
        quiet_trainer(callbacks=[part])


@pytest.mark.parametrize(
    "part",
    [mp.PrecisionPolicy.default(), mp.WarmupCosine(), mp.FSDP2Strategy(), mp.OverflowMonitor],
    ids=lambda part: str(type(part)),
)
def test_preflight_sees_what_lightning_takes_among_the_callbacks(part: Any) -> None:
    [finding] = mp.preflight(quiet_trainer(callbacks=[part]), Regression(), loader(regression_batches(2))).findings
    assert finding.name == "refused"
    assert "callbacks" in finding.cure


@pytest.mark.parametrize("make", [mp.OverflowMonitor, lambda: mp.BudgetForecast("loss")])
def test_a_callback_that_is_given_twice_is_refused_by_its_name(make: Callable[[], Any]) -> None:
    first, second = make(), make()
    with pytest.raises(MisconfigurationException, match=f"more than one {type(first).__name__}, and one is enough"):
        quiet_trainer(callbacks=[first, LambdaCallback(), second])
    quiet_trainer(callbacks=[first])


@pytest.mark.parametrize(("every_n_steps", "at"), [(3, 3), (100, 12)])
def test_a_forecast_without_a_loss_warns_when_it_first_looks(every_n_steps: int, at: int) -> None:
    warned_at: list[int] = []

    class Model(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.log("loss/train", loss)
            return loss

    forecast = mp.BudgetForecast("train/loss", every_n_steps=every_n_steps)
    warn = forecast._warn_once

    def noted(trainer: pl.Trainer, fit: Any) -> None:
        if not fit.has_warned:
            warned_at.append(trainer.global_step)
        warn(trainer, fit)

    forecast._warn_once = noted  # type: ignore[method-assign]
    budget = mp.ChinchillaBudget(tokens=48, count=lambda batch: len(batch[1]), landing="ceil")
    trainer = quiet_trainer(callbacks=[forecast, budget], max_epochs=-1)
    with pytest.warns(UserWarning, match=r"BudgetForecast\('train/loss'\) sees no loss: the module logs loss/train"):
        trainer.fit(Model(), loader(regression_batches(12)))
    assert warned_at == [at]
