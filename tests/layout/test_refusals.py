"""Bad input to the plugin, and callbacks that cannot work together.

Every refusal is one line that says what was wrong and what to do instead, and what it offers works. A refused run
changes no weight, leaves no file and no trace on its Trainer.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from gloo import run_ranks
from lightning.pytorch.callbacks import EMAWeightAveraging, GradientAccumulationScheduler, StochasticWeightAveraging
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from refusing import refused, tokens, trains
from small_models import ResumableLoader, StepsByHand, TokenModel, fit, loader, quiet_trainer

from lightning_mp import (
    AccumulationScheduler,
    AutocastPrecision,
    ChinchillaBudget,
    Float8Precision,
    LossScaler,
    MasterWeightsPrecision,
    OverflowMonitor,
    TF32Precision,
)


class Lbfgs(TokenModel):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(self.parameters(), max_iter=2)


class Manual(StepsByHand, TokenModel):
    pass


# -- the plugin --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["16-true", "bf16-true"])
def test_the_plugin_that_a_refused_16_bit_precision_names_trains(precision: Any) -> None:
    trains(TokenModel(), tokens(), plugins=[MasterWeightsPrecision(precision)])


@pytest.mark.parametrize(
    "arguments",
    [
        {"plugins": [AutocastPrecision("16-mixed", scaler=LossScaler("cpu", init_scale=256.0))]},
        {"plugins": [AutocastPrecision("bf16-mixed")]},
        {"precision": "32-true"},
    ],
    ids=["16-mixed", "bf16-mixed", "32-true"],
)
def test_what_an_unknown_precision_offers_trains(arguments: Any) -> None:
    trains(TokenModel(), tokens(), **arguments)


def test_another_device_than_the_trainers_is_refused() -> None:
    refused(
        "AutocastPrecision(device='cuda') but the Trainer runs on 'cpu': nothing would be cast."
        " Leave device out, or give 'cpu'.",
        TokenModel(),
        tokens(),
        plugins=[AutocastPrecision("bf16-mixed", device="cuda")],
    )
    trains(TokenModel(), tokens(), plugins=[AutocastPrecision("bf16-mixed")])
    trains(TokenModel(), tokens(), plugins=[AutocastPrecision("bf16-mixed", device="cpu")])


@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed"])
def test_a_device_without_16_bit_autocast_is_refused(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    dtype = torch.float16 if precision == "16-mixed" else torch.bfloat16
    with monkeypatch.context() as patch:
        patch.setattr(torch.amp, "is_autocast_available", lambda device_type: device_type != "cpu")
        refused(
            f"AutocastPrecision('{precision}') cannot run on 'cpu': torch has no {dtype} autocast there."
            " Use one of ('cuda', 'cpu', 'mps', 'xpu'), another precision, or none.",
            TokenModel(),
            tokens(),
            plugins=[AutocastPrecision(precision)],
        )
    trains(TokenModel(), tokens())


def test_lbfgs_under_the_plugin_is_refused() -> None:
    refused(
        "AutocastPrecision('16-mixed') cannot be used with LBFGS, which evaluates the loss several times in one step:"
        " its own evaluations would be scaled, and could not be unscaled. Use a precision without a loss"
        " scale ('bf16-mixed', 'bf16-true' or '32-true'), or another optimizer.",
        Lbfgs(),
        tokens(),
        plugins=[AutocastPrecision("16-mixed", scaler=LossScaler("cpu", init_scale=256.0))],
    )
    trains(Lbfgs(), tokens(), plugins=[AutocastPrecision("bf16-mixed")])
    trains(TokenModel(), tokens(), plugins=[AutocastPrecision("16-mixed", scaler=LossScaler("cpu", init_scale=256.0))])
    trains(Lbfgs(), tokens(), precision="32-true")
    trains(Lbfgs(), tokens(), precision="32-true", callbacks=[OverflowMonitor()])


# -- schedules ---------------------------------------------------------------------------------------------------------


def test_the_schedule_that_a_refusal_shows_is_taken() -> None:
    assert AccumulationScheduler({0: 1, 1000: 4}).schedule == {0: 1, 1000: 4}


@pytest.mark.parametrize(
    ("arguments", "allowed"),
    [
        ({"unit": "epochs"}, ("epoch", "step", "sample", "token")),
        ({"weight_by": "tokens"}, ("auto", "batch", "sample", "token")),
    ],
)
def test_an_unknown_unit_or_weight_is_refused(arguments: Any, allowed: tuple[str, ...]) -> None:
    ((name, value),) = arguments.items()
    words, meant = re.escape(str(allowed)), repr(value[:-1])
    message = rf"Scheduler\({name}={value!r}\) is unknown; it must be one of {words}\. Did you mean {meant}\?$"
    with pytest.raises(ValueError, match=message):
        AccumulationScheduler({0: 2}, **arguments)
    for option in allowed:
        trains(TokenModel(), tokens(), callbacks=[AccumulationScheduler({0: 2}, **{name: option})])


# -- rivals ------------------------------------------------------------------------------------------------------------


def test_two_ways_to_set_the_window_length_are_refused() -> None:
    refused(
        "Trainer(accumulate_grad_batches=2) and an AccumulationScheduler both set the number of micro-batches per"
        " optimizer step. Leave accumulate_grad_batches out, or remove the callback.",
        TokenModel(),
        tokens(),
        accumulate_grad_batches=2,
        callbacks=[AccumulationScheduler({0: 3})],
    )
    assert trains(TokenModel(), tokens(), callbacks=[AccumulationScheduler({0: 3})]).global_step == 2
    assert trains(TokenModel(), tokens(), accumulate_grad_batches=2).global_step == 3


def test_lightnings_own_scheduler_beside_ours_is_refused() -> None:
    refused(
        "AccumulationScheduler and GradientAccumulationScheduler both set accumulate_grad_batches. Remove the latter"
        " and give its schedule to lightning_mp.AccumulationScheduler.",
        TokenModel(),
        tokens(),
        callbacks=[AccumulationScheduler({0: 3}), GradientAccumulationScheduler({0: 2})],
    )
    trainer = trains(TokenModel(), tokens(), callbacks=[GradientAccumulationScheduler({0: 2})])
    assert trainer.global_step == 3


def test_stochastic_weight_averaging_beside_the_scheduler_is_refused() -> None:
    """D51."""
    refused(
        "AccumulationScheduler cannot be used with StochasticWeightAveraging, which sets accumulate_grad_batches itself"
        " and steps the optimizer while it renews batch norms. Remove one of them; EMAWeightAveraging works beside it.",
        TokenModel(),
        tokens(),
        max_epochs=3,
        callbacks=[StochasticWeightAveraging(1e-2), AccumulationScheduler({0: 3})],
    )
    trains(TokenModel(), tokens(), callbacks=[EMAWeightAveraging(decay=0.9), AccumulationScheduler({0: 3})])
    trains(TokenModel(), tokens(), max_epochs=3, callbacks=[StochasticWeightAveraging(1e-2)])


def test_two_schedulers_are_refused() -> None:
    refused(
        "There are two AccumulationSchedulers; merge them into one schedule.",
        TokenModel(),
        tokens(),
        callbacks=[AccumulationScheduler({0: 1}), AccumulationScheduler({3: 2})],
    )
    trains(TokenModel(), tokens(), callbacks=[AccumulationScheduler({0: 1, 3: 2})])


def test_two_budgets_are_refused() -> None:
    refused(
        "There are two ChinchillaBudgets; a run has one budget. Remove one of them.",
        TokenModel(),
        tokens(),
        callbacks=[ChinchillaBudget(tokens=20), ChinchillaBudget(tokens=30)],
        max_epochs=-1,
    )


def test_two_ways_to_count_are_refused() -> None:
    count: Callable[[Any], int] = lambda batch: int((batch[1] != -100).sum())  # noqa: E731 # two names for one function
    other: Callable[[Any], int] = lambda batch: 1  # noqa: E731
    refused(
        "Two callbacks count tokens with different count= functions; use one.",
        TokenModel(),
        tokens(),
        callbacks=[AccumulationScheduler({0: 2}, count=count), ChinchillaBudget(tokens=20, count=other)],
    )
    budget = ChinchillaBudget(tokens=20, count=count, landing="floor")
    trains(TokenModel(), tokens(), callbacks=[AccumulationScheduler({0: 2}, count=count), budget], max_epochs=-1)
    assert budget.tokens_seen == 14


def test_the_scheduler_is_refused_in_manual_optimization() -> None:
    refused(
        "AccumulationScheduler needs automatic optimization; with automatic_optimization=False the module decides"
        " itself when to step. Remove the callback or turn automatic optimization on.",
        Manual(),
        tokens(),
        callbacks=[AccumulationScheduler({0: 2})],
    )
    trains(Manual(), tokens(), plugins=[AutocastPrecision("bf16-mixed")], callbacks=[OverflowMonitor()])
    trains(TokenModel(), tokens(), callbacks=[AccumulationScheduler({0: 2})])


def test_the_budget_is_refused_in_manual_optimization() -> None:
    refused(
        "ChinchillaBudget needs automatic optimization; with automatic_optimization=False the module decides itself"
        " when to step. Remove the callback or turn automatic optimization on.",
        Manual(),
        tokens(),
        callbacks=[ChinchillaBudget(tokens=20)],
    )


@pytest.mark.parametrize(
    "plugin",
    [
        AutocastPrecision("16-mixed"),
        MasterWeightsPrecision("bf16-true"),
        TF32Precision(),
        Float8Precision(),
    ],
    ids=lambda plugin: type(plugin).__name__,
)
def test_plugins_and_the_monitor_are_refused_under_deepspeed(plugin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, module = quiet_trainer(), TokenModel()
    module.trainer = trainer
    monkeypatch.setattr(pl.Trainer, "strategy", object.__new__(DeepSpeedStrategy))
    with pytest.raises(MisconfigurationException, match="cannot be used with DeepSpeed, whose engine makes masters"):
        plugin.convert_module(module)
    with pytest.raises(MisconfigurationException, match="OverflowMonitor cannot be used with DeepSpeed"):
        OverflowMonitor().setup(trainer, module, "fit")


def test_a_negative_clipping_value_is_refused() -> None:
    """Lightning trains on without clipping."""
    trainer = quiet_trainer(plugins=[AutocastPrecision("bf16-mixed")], gradient_clip_val=-1.0)
    with pytest.raises(MisconfigurationException, match=r"gradient_clip_val=-1\.0\) must not be negative.*leave it"):
        trainer.fit(TokenModel(), tokens())


def test_a_plugin_among_the_callbacks_is_refused_by_name() -> None:
    message = r"^AutocastPrecision was given among the callbacks and is a precision plugin: use Trainer\(p"
    with pytest.raises(MisconfigurationException, match=message):
        quiet_trainer(callbacks=[AutocastPrecision("bf16-mixed")])


@pytest.mark.parametrize("strategy", ["auto", "ddp"])
def test_a_folder_of_shards_as_a_file_names_what_makes_a_file_of_it(strategy: str, tmp_path: Path) -> None:
    folder = tmp_path / "sharded.ckpt"
    folder.mkdir()

    def on_rank(rank: int) -> str:
        trainer = quiet_trainer(
            strategy=DDPStrategy(process_group_backend="gloo") if strategy == "ddp" else "auto",
            plugins=[AutocastPrecision("bf16-mixed")],
        )
        with pytest.raises(IsADirectoryError) as caught:
            trainer.fit(TokenModel(), loader(tokens()), ckpt_path=folder)
        return caught.value.__notes__[0]

    [note] = run_ranks(on_rank, 1)
    assert "sharded.ckpt' is a folder" in note
    assert "lightning_mp.checkpoints.consolidate_checkpoint(folder, file)" in note


def test_a_resume_in_another_precision_is_reported_in_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = fit(TokenModel(), tokens(), plugin=AutocastPrecision("bf16-mixed"), max_steps=1)
    first.save_checkpoint(tmp_path / "a.ckpt")
    for plugin, lines in ((AutocastPrecision("bf16-mixed"), 0), (MasterWeightsPrecision("bf16-true"), 1)):
        caplog.clear()
        with caplog.at_level("INFO"):
            fit(TokenModel(), ResumableLoader(tokens()), plugin=plugin, max_steps=2, ckpt_path=tmp_path / "a.ckpt")
        assert caplog.text.count("MasterWeightsPrecision('bf16-true') resumes a run in 'bf16-mixed'") == lines


def test_the_scheduler_is_refused_under_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = quiet_trainer()
    # DeepSpeed is not installed, so the strategy cannot be constructed, but it can be recognised.
    monkeypatch.setattr(pl.Trainer, "strategy", object.__new__(DeepSpeedStrategy))
    message = (
        "AccumulationScheduler cannot be used with DeepSpeed, which accumulates gradients itself. Set"
        " gradient_accumulation_steps in the DeepSpeed config, or use strategy='fsdp'."
    )
    with pytest.raises(MisconfigurationException, match=f"^{re.escape(message)}$"):
        AccumulationScheduler({0: 2}).setup(trainer, TokenModel(), "fit")
