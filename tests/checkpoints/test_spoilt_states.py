"""Promise 6: what a checkpoint holds of a callback or a plugin is checked before anything is changed by it."""

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from small_models import TokenModel, loader, quiet_trainer, token_batches

import lightning_mp as mp
from lightning_mp.training.lr_schedule.progress import ScheduleRun


class WithLoss(TokenModel):
    def training_step(self, *arguments: Any) -> Any:
        loss = super().training_step(*arguments)
        self.log("loss", loss["loss"] if isinstance(loss, dict) else loss, on_step=True)
        return loss


def made() -> list[Callback]:
    return [
        mp.OverflowMonitor(),
        mp.ChinchillaBudget(tokens=1_000, save=False),
        mp.TokenLearningRate(mp.WarmupStableDecay(warmup=0.1)),
        mp.MFUMonitor(1.0, peak_flops=1.0),
        mp.UnderflowMonitor("fp16", every_n_steps=2),
        mp.BudgetForecast("loss", every_n_steps=100),
        mp.MicroBatchOnOOM(),
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
    if isinstance(callback, mp.ChinchillaBudget):  # its totals are the accumulation controller's
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
    run = ScheduleRun(mp.WarmupStableDecay())
    run.begin(100)
    with pytest.raises(ValueError, match="cannot be loaded") as error:
        run.load_state_dict(run.state_dict() | {entry: value})
    assert message in str(error.value)


def saved_by(plugin: Any, folder: Path) -> dict[str, Any]:
    trainer = quiet_trainer(plugins=plugin, max_epochs=-1, max_steps=2, accumulate_grad_batches=2)
    trainer.fit(TokenModel(), loader(token_batches([4, 5] * 4)))
    trainer.save_checkpoint(folder / "sound.ckpt")
    return torch.load(folder / "sound.ckpt", weights_only=True)


def refused(plugin: Any, checkpoint: dict[str, Any], folder: Path) -> str:
    """The error of a fit that resumes from it; nothing but the weights has been loaded then."""
    torch.save(checkpoint, folder / "spoilt.ckpt")
    scale = plugin.scaler.get_scale() if plugin.scaler is not None else None
    trainer, module = quiet_trainer(plugins=plugin, max_epochs=-1, max_steps=4, accumulate_grad_batches=2), TokenModel()
    with pytest.raises(ValueError, match="scaler|cannot be loaded") as error:
        trainer.fit(module, loader(token_batches([4, 5] * 4)), ckpt_path=folder / "spoilt.ckpt")
    assert all(torch.equal(value, checkpoint["state_dict"][name]) for name, value in module.state_dict().items())
    assert not trainer.optimizers[0].state
    assert trainer.global_step == 0
    assert plugin.scaler is None or plugin.scaler.get_scale() == scale
    assert len(str(error.value)) < 600
    return str(error.value)


TORCH_STATE = {"scale": 8.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000, "_growth_tracker": 0}
LOSSES = "lightning_mp_loss_weights"


@pytest.mark.parametrize(
    ("way", "value", "message"),
    [
        (["lightning_mp_skipped_steps"], "three", "'lightning_mp_skipped_steps' is 'three'; it must be a whole number"),
        (["lightning_mp_skipped_steps"], -1, "'lightning_mp_skipped_steps' is -1; it must be a whole number from 0"),
        (["lightning_mp_skipped_steps"], torch.ones(2), "'lightning_mp_skipped_steps' is a tensor of shape [2]"),
        (["lightning_mp_precision"], 16, "'lightning_mp_precision' is 16; it must be text"),
        ([LOSSES], [1], f"'{LOSSES}' is [1]; it must be a mapping"),
        ([LOSSES, "reference_items"], -1.0, "'reference_items' is -1.0; it must be a positive number or None"),
        ([LOSSES, "losses"], None, "'losses' is None; it must be a mapping"),
        ([LOSSES, "losses", "totals"], [], "'totals' is []; it must be a list of 1 times a finite number from 0"),
        ([LOSSES, "losses", "kinds"], "mean", "'kinds' is 'mean'; it must be a list of text"),
        (
            [LOSSES, "losses", "forms"],
            {"mean": "one"},
            "'forms' is {'mean': 'one'}; it must be a mapping from names to",
        ),
        (["AutocastPrecision"], [65536.0], "loss scaler cannot be loaded: it is of type list; it must be a mapping"),
        (["AutocastPrecision"], "65536", "the loss scaler cannot be loaded: it is of type str; it must be a mapping"),
        (["AutocastPrecision"], {"scale": 1.0}, "loss scaler lacks growth_factor"),
        (["AutocastPrecision", "scale"], "large", "loss scaler has scale='large'"),
    ],
)
def test_what_a_plugin_saved_is_checked_before_anything_of_it_is_loaded(
    way: list[str], value: object, message: str, tmp_path: Path
) -> None:
    checkpoint = saved_by(mp.AutocastPrecision("16-mixed", scaler=mp.LossScaler(init_scale=8.0)), tmp_path)
    spoilt = changed(checkpoint, list(way), lambda inside, key: inside.__setitem__(key, value))
    assert message in refused(mp.AutocastPrecision("16-mixed"), spoilt, tmp_path)
    if way[0] == "AutocastPrecision":  # where Lightning's plugins write it
        spoilt["MixedPrecision"] = spoilt.pop(way[0])
        assert message in refused(mp.AutocastPrecision("16-mixed"), spoilt, tmp_path)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ([8.0], "it is of type list; it must be a mapping"),
        (TORCH_STATE | {"scale": "large"}, "'scale' is 'large'; it must be a finite number from 0"),
        (TORCH_STATE | {"growth_interval": 0}, "'growth_interval' is 0; it must be a whole number from 1"),
        ({"scale": 8.0}, "it has no 'growth_factor', 'backoff_factor', 'growth_interval', '_growth_tracker'"),
    ],
)
def test_the_state_of_a_scaler_of_torch_is_checked(state: object, message: str, tmp_path: Path) -> None:
    def plugin() -> mp.AutocastPrecision:
        return mp.AutocastPrecision("16-mixed", scaler=torch.amp.GradScaler("cpu"))

    checkpoint = saved_by(plugin(), tmp_path)
    assert f"the loss scaler cannot be loaded: {message}" in refused(
        plugin(), checkpoint | {"AutocastPrecision": state}, tmp_path
    )


@pytest.mark.parametrize(
    ("master", "got"),
    [
        (torch.ones(3), "a tensor of shape [3] and float32"),
        (torch.ones(1), "a tensor of shape [1] and float32"),  # would be broadcast
        (torch.ones(11, dtype=torch.int64), "a tensor of shape [11] and int64"),
        ([1.0], "[1.0]"),
    ],
    ids=["shape", "broadcast", "dtype", "list"],
)
def test_a_former_master_is_checked_before_any_is_loaded(master: object, got: str, tmp_path: Path) -> None:
    checkpoint = saved_by(mp.MasterWeightsPrecision("bf16-true"), tmp_path)
    of_parameters = checkpoint["optimizer_states"][0].setdefault("state", {})
    for number, parameter in enumerate(TokenModel().parameters()):
        of_parameters.setdefault(number, {})["master_param"] = torch.zeros_like(parameter)
    of_parameters[number]["master_param"] = master
    message = refused(
        mp.MasterWeightsPrecision("bf16-true"), checkpoint | {"lightning_mp_masters": "bf16-true"}, tmp_path
    )
    assert f"an optimizer cannot be loaded: 'master_param' is {got}; it must be a floating-point" in message


@pytest.mark.parametrize("names", ["weight", [1]])
def test_which_weights_are_split_is_checked(names: object, tmp_path: Path) -> None:
    checkpoint = saved_by(mp.MasterWeightsPrecision("bf16-true"), tmp_path) | {"lightning_mp_split_weights": names}
    message = refused(mp.MasterWeightsPrecision("bf16-true"), checkpoint, tmp_path)
    assert f"'lightning_mp_split_weights' is {names!r}; it must be a list of text" in message
