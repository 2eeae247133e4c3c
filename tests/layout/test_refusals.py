"""Bad input to the plugin, and callbacks that cannot work together.

Every refusal is one line that says what was wrong and what to do instead, and what it offers works. A refused run
changes no weight, leaves no file and no trace on its Trainer.
"""

import re
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
    UnderflowMonitor,
)


class Lbfgs(TokenModel):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(self.parameters(), max_iter=2)


class Manual(StepsByHand, TokenModel):
    pass


def bf16() -> AutocastPrecision:
    return AutocastPrecision("bf16-mixed")


def fp16() -> AutocastPrecision:
    return AutocastPrecision("16-mixed", scaler=LossScaler("cpu", init_scale=256.0))


def count(batch: Any) -> int:
    return int((batch[1] != -100).sum())


def count_otherwise(batch: Any) -> int:
    return 1


def scheduler(*thresholds: int, **settings: Any) -> AccumulationScheduler:
    return AccumulationScheduler(
        {threshold: number for number, threshold in enumerate(thresholds, start=2)}, **settings
    )


#: What is refused: the words, the module and the arguments of the Trainer; and what to do instead, which trains.
REFUSED: dict[str, tuple[str, Any, Any, list[tuple[Any, Any]]]] = {
    "another device": (
        "AutocastPrecision(device='cuda') but the Trainer runs on 'cpu': nothing would be cast."
        " Leave device out, or give 'cpu'.",
        TokenModel,
        lambda: {"plugins": [AutocastPrecision("bf16-mixed", device="cuda")]},
        [
            (TokenModel, lambda: {"plugins": [bf16()]}),
            (TokenModel, lambda: {"plugins": [AutocastPrecision("bf16-mixed", device="cpu")]}),
        ],
    ),
    "LBFGS with a loss scale": (
        "AutocastPrecision('16-mixed') cannot be used with LBFGS, which evaluates the loss several times in one step:"
        " its own evaluations would be scaled, and could not be unscaled. Use a precision without a loss"
        " scale ('bf16-mixed', 'bf16-true' or '32-true'), or another optimizer.",
        Lbfgs,
        lambda: {"plugins": [fp16()]},
        [
            (Lbfgs, lambda: {"plugins": [bf16()]}),
            (Lbfgs, lambda: {"precision": "32-true", "callbacks": [OverflowMonitor()]}),
            (TokenModel, lambda: {"plugins": [fp16()]}),
        ],
    ),
    "two lengths of a window": (
        "Trainer(accumulate_grad_batches=2) and an AccumulationScheduler both set the number of micro-batches per"
        " optimizer step. Leave accumulate_grad_batches out, or remove the callback.",
        TokenModel,
        lambda: {"accumulate_grad_batches": 2, "callbacks": [scheduler(0)]},
        [(TokenModel, lambda: {"callbacks": [scheduler(0)]}), (TokenModel, lambda: {"accumulate_grad_batches": 2})],
    ),
    "Lightning's scheduler beside ours": (
        "AccumulationScheduler and GradientAccumulationScheduler both set accumulate_grad_batches. Remove the latter"
        " and give its schedule to lightning_mp.AccumulationScheduler.",
        TokenModel,
        lambda: {"callbacks": [scheduler(0), GradientAccumulationScheduler({0: 2})]},
        [(TokenModel, lambda: {"callbacks": [GradientAccumulationScheduler({0: 2})]})],
    ),
    "D51, StochasticWeightAveraging": (
        "AccumulationScheduler cannot be used with StochasticWeightAveraging, which sets accumulate_grad_batches itself"
        " and steps the optimizer while it renews batch norms. Remove one of them; EMAWeightAveraging works beside it.",
        TokenModel,
        lambda: {"max_epochs": 3, "callbacks": [StochasticWeightAveraging(1e-2), scheduler(0)]},
        [
            (TokenModel, lambda: {"callbacks": [EMAWeightAveraging(decay=0.9), scheduler(0)]}),
            (TokenModel, lambda: {"max_epochs": 3, "callbacks": [StochasticWeightAveraging(1e-2)]}),
        ],
    ),
    "two schedulers": (
        "There are two AccumulationSchedulers; merge them into one schedule.",
        TokenModel,
        lambda: {"callbacks": [scheduler(0), scheduler(3)]},
        [(TokenModel, lambda: {"callbacks": [scheduler(0, 3)]})],
    ),
    "two budgets": (
        "There are two ChinchillaBudgets; a run has one budget. Remove one of them.",
        TokenModel,
        lambda: {"callbacks": [ChinchillaBudget(tokens=20), ChinchillaBudget(tokens=30)], "max_epochs": -1},
        [],
    ),
    "two ways to count": (
        "Two callbacks count tokens with different count= functions; use one.",
        TokenModel,
        lambda: {"callbacks": [scheduler(0, count=count), ChinchillaBudget(tokens=20, count=count_otherwise)]},
        [
            (
                TokenModel,
                lambda: {
                    "callbacks": [scheduler(0, count=count), ChinchillaBudget(tokens=14, count=count, landing="floor")],
                    "max_epochs": -1,
                },
            )
        ],
    ),
    "a scheduler in manual optimization": (
        "AccumulationScheduler needs automatic optimization; with automatic_optimization=False the module decides"
        " itself when to step. Remove the callback or turn automatic optimization on.",
        Manual,
        lambda: {"callbacks": [scheduler(0)]},
        [(Manual, lambda: {"plugins": [bf16()], "callbacks": [OverflowMonitor()]})],
    ),
    "a budget in manual optimization": (
        "ChinchillaBudget needs automatic optimization; with automatic_optimization=False the module decides itself"
        " when to step. Remove the callback or turn automatic optimization on.",
        Manual,
        lambda: {"callbacks": [ChinchillaBudget(tokens=20)]},
        [],
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_setting_that_cannot_work_is_refused_and_what_is_offered_trains(case: str) -> None:
    """D51 is among them."""
    message, module, arguments, offered = REFUSED[case]
    refused(message, module(), tokens(), **arguments())
    for other_module, other_arguments in offered:
        trains(other_module(), tokens(), **other_arguments())


@pytest.mark.parametrize("precision", ["16-true", "bf16-true"])
def test_the_plugin_that_a_refused_16_bit_precision_names_trains(precision: Any) -> None:
    trains(TokenModel(), tokens(), plugins=[MasterWeightsPrecision(precision)])


@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed"])
def test_a_device_without_16_bit_autocast_is_refused(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    dtype = torch.float16 if precision == "16-mixed" else torch.bfloat16
    monkeypatch.setattr(torch.amp, "is_autocast_available", lambda device_type: device_type != "cpu")
    refused(
        f"AutocastPrecision('{precision}') cannot run on 'cpu': torch has no {dtype} autocast there."
        " Use one of ('cuda', 'cpu', 'mps', 'xpu'), another precision, or none.",
        TokenModel(),
        tokens(),
        plugins=[AutocastPrecision(precision)],
    )


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


DEEPSPEED = "cannot be used with DeepSpeed, "
SCHEDULER = (
    "AccumulationScheduler cannot be used with DeepSpeed, which accumulates gradients itself. Set"
    " gradient_accumulation_steps in the DeepSpeed config, or use strategy='fsdp'."
)


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (AutocastPrecision("16-mixed"), f"{DEEPSPEED}whose engine makes masters"),
        (MasterWeightsPrecision("bf16-true"), f"{DEEPSPEED}whose engine makes masters"),
        (TF32Precision(), f"{DEEPSPEED}whose engine makes masters"),
        (Float8Precision(), f"{DEEPSPEED}whose engine makes masters"),
        (OverflowMonitor(), f"OverflowMonitor {DEEPSPEED}"),
        (UnderflowMonitor(), f"UnderflowMonitor {DEEPSPEED}.* Use strategy='ddp' or"),
        (scheduler(0), f"^{re.escape(SCHEDULER)}$"),
    ],
    ids=lambda part: type(part).__name__,
)
def test_parts_are_refused_under_deepspeed(part: Any, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, module = quiet_trainer(), TokenModel()
    module.trainer = trainer
    # DeepSpeed is not installed, so the strategy cannot be constructed, but it can be recognised.
    monkeypatch.setattr(pl.Trainer, "strategy", object.__new__(DeepSpeedStrategy))
    with pytest.raises(MisconfigurationException, match=words):
        part.setup(trainer, module, "fit") if isinstance(part, pl.Callback) else part.convert_module(module)


def test_a_negative_clipping_value_is_refused() -> None:
    """Lightning trains on without clipping."""
    trainer = quiet_trainer(plugins=[AutocastPrecision("bf16-mixed")], gradient_clip_val=-1.0)
    with pytest.raises(MisconfigurationException, match=r"gradient_clip_val=-1\.0\) must not be negative.*leave it"):
        trainer.fit(TokenModel(), tokens())


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
