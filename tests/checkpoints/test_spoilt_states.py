"""Promise 6: what a checkpoint holds of a callback is checked before anything is changed by it."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from small_models import TokenModel, loader, quiet_trainer, token_batches

from lightning_mp import (
    BudgetForecast,
    ChinchillaBudget,
    MFUMonitor,
    MicroBatchOnOOM,
    OverflowMonitor,
    TokenLearningRate,
    UnderflowMonitor,
    WarmupStableDecay,
)
from lightning_mp.lr_schedule.progress import ScheduleRun


class WithLoss(TokenModel):
    def training_step(self, *arguments: Any) -> Any:
        loss = super().training_step(*arguments)
        self.log("loss", loss["loss"] if isinstance(loss, dict) else loss, on_step=True)
        return loss


def made() -> list[Callback]:
    return [
        OverflowMonitor(),
        ChinchillaBudget(tokens=1_000, save=False),
        TokenLearningRate(WarmupStableDecay(warmup=0.1)),
        MFUMonitor(1.0, peak_flops=1.0),
        UnderflowMonitor("fp16", every_n_steps=2),
        BudgetForecast("loss", every_n_steps=100),
        MicroBatchOnOOM(),
    ]


@pytest.fixture(scope="module")
def states() -> dict[str, dict[str, Any]]:
    """Of each callback after ten steps, as a checkpoint holds it."""
    callbacks = made()
    trainer = quiet_trainer(callbacks=callbacks, max_epochs=-1, max_steps=10)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(WithLoss(), loader(token_batches([4] * 20)))
    return {type(callback).__name__: copy.deepcopy(callback.state_dict()) for callback in callbacks}


def ways_in(state: Any) -> list[list[Any]]:
    """The path to each entry, also inside of lists and mappings."""
    inside = state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, list) else ()
    return [way for key, value in inside for way in ([key], *([key, *more] for more in ways_in(value)))]


def changed(state: dict[str, Any], way: list[Any], change: Callable[[Any, Any], None]) -> dict[str, Any]:
    state = copy.deepcopy(state)
    inside: Any = state
    for key in way[:-1]:
        inside = inside[key]
    change(inside, way[-1])
    return state


@pytest.mark.parametrize("number", range(7), ids=[type(callback).__name__ for callback in made()])
def test_every_entry_is_checked_before_anything_is_changed(number: int, states: dict[str, dict[str, Any]]) -> None:
    callback = made()[number]
    state = states[type(callback).__name__]
    if isinstance(callback, ChinchillaBudget):  # its totals are the accumulation controller's
        return
    callback.load_state_dict(copy.deepcopy(state))
    assert callback.state_dict() == state
    fresh = made()[number]
    before = copy.deepcopy(fresh.state_dict())
    assert len(ways_in(state)) >= 1
    for way in ways_in(state):
        for bad in ("spoilt", torch.ones(2), [None]):
            with pytest.raises(ValueError, match=r"cannot be loaded: .* Nothing was changed"):
                fresh.load_state_dict(changed(state, way, lambda inside, key, bad=bad: inside.__setitem__(key, bad)))
            assert fresh.state_dict() == before
        if len(way) == 1:
            with pytest.raises(ValueError, match="cannot be loaded"):
                fresh.load_state_dict(changed(state, way, lambda inside, key: inside.pop(key)))


@pytest.mark.parametrize(
    ("entry", "value", "message"),
    [
        ("horizon_tokens", 0, "'horizon_tokens' is 0; it must be a whole number from 1 or None"),
        ("course", [0.0, float("nan"), 0.0], "'course' is [0.0, nan, 0.0]; it must be a list of 3 times a finite"),
        ("cooldown", [1.0, 0.0, "steep"], "'cooldown' is [1.0, 0.0, 'steep']; it must be a list of two finite"),
        ("skipped_tokens", -1, "'skipped_tokens' is -1; it must be a whole number from 0"),
    ],
)
def test_a_schedule_says_what_is_wrong(entry: str, value: object, message: str) -> None:
    run = ScheduleRun(WarmupStableDecay())
    run.begin(100)
    with pytest.raises(ValueError, match="cannot be loaded") as error:
        run.load_state_dict(run.state_dict() | {entry: value})
    assert message in str(error.value)
