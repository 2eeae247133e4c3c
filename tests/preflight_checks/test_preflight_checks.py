"""Where findings begin and end: checks are functions of what was found, without a Trainer."""

import math
from dataclasses import replace
from typing import Any

import pytest

from lightning_mp.ground.flops.device_traits import named_device
from lightning_mp.monitors.preflight_checks.checks import check_everything
from lightning_mp.monitors.preflight_checks.found import (
    Found,
    FoundBudget,
    FoundCheckpoint,
    FoundLayer,
    FoundMemory,
    FoundPrecision,
    FoundRun,
    FoundStep,
    FoundWeight,
)
from lightning_mp.training.lr_schedule.scheduler_facts import AfterItsEnd, FoundScheduler

BF16 = FoundPrecision(name="bf16-mixed", plugin="AutocastPrecision('bf16-mixed')")
FP16 = FoundPrecision(name="16-mixed", plugin="AutocastPrecision('16-mixed')", has_scaler=True)
FP8 = FoundPrecision(name="fp8-mixed", plugin="Float8Precision('fp8-mixed')")
TRUE = FoundPrecision(name="bf16-true", plugin="MasterWeightsPrecision('bf16-true')", has_masters=True)
RUN = FoundRun(micro_batches_per_epoch=100, epochs=10, steps=1_000)
OF_8 = FoundRun(micro_batches_per_epoch=100, epochs=10, steps=1_000, data_ranks=8)


def found(device: str = "H100", **what: Any) -> Found:
    return Found(device=named_device(device), **what)


def names(**what: Any) -> list[tuple[str, str]]:
    return [(finding.severity, finding.name) for finding in check_everything(found(**what))]


def test_of_nothing_nothing_is_said() -> None:
    for precision in (FoundPrecision(), BF16, FP16, FP8, TRUE):
        assert names(precision=precision) == []


@pytest.mark.parametrize(
    ("device", "precision", "severity"),
    [
        *(("V100", BF16, "warning"), ("A100", BF16, None), ("cpu", BF16, None), ("mps", BF16, None)),
        *(("T4", FP16, None), ("cpu", FP16, None), ("cpu", FP8, None), ("L40S", FP8, None)),
        *(("A100", FP8, "error"), ("mps", FP8, "error"), ("A100", replace(FP8, emulates_fp8=True), None)),
        *(("mps", FoundPrecision(name="64-true"), "error"), ("H100", FoundPrecision(name="transformer-engine"), None)),
        *(("H100", FoundPrecision(name="64-true"), None), ("T4", TRUE, "warning")),
    ],
)
def test_the_device_multiplies_in_the_format(device: str, precision: FoundPrecision, severity: str | None) -> None:
    findings = names(device=device, precision=precision)
    assert findings == ([] if severity is None else [(severity, "device")])


@pytest.mark.parametrize(
    ("sizes", "precision", "cures"),
    [
        ((("in_features", 3), ("out_features", 10)), BF16, []),  # colours and classes
        ((("out_features", 1_000),), BF16, []),  # classes of ImageNet
        ((("out_features", 50_257),), BF16, ["Make it 50304."]),  # GPT-2's vocabulary
        ((("out_features", 50_264),), BF16, ["Make it 50304."]),
        ((("in_features", 100),), BF16, ["Make it 104."]),
        ((("in_features", 104),), BF16, []),
        ((("in_features", 104),), FP8, ["Make it 112."]),
        ((("head_dim", 10), ("embed_dim", 80)), FP16, ["Make it 16."]),
        ((("in_features", 100),), FoundPrecision(), []),
    ],
)
def test_sizes_for_tensor_cores(sizes: Any, precision: FoundPrecision, cures: list[str]) -> None:
    findings = check_everything(found(precision=precision, layers=(FoundLayer(name="layer", sizes=sizes),)))
    assert [finding.cure for finding in findings] == cures
    assert names(device="cpu", precision=precision, layers=(FoundLayer(name="layer", sizes=sizes),)) == []


@pytest.mark.parametrize(
    ("planned", "after", "severity"),
    [
        *((1_000, "raises", None), (999, "raises", "error"), (1_050, "raises", None), (1_051, "raises", "warning")),
        *((950, "rises", None), (949, "rises", "warning"), (2_000, "zero", "warning"), (10, "zero", "warning")),
        *((10, "stays", None), (100_000, "stays", "warning")),
    ],
)
def test_schedules_may_be_a_twentieth_off(planned: int, after: AfterItsEnd, severity: str | None) -> None:
    one = FoundScheduler(name="LR", setting="steps", planned=planned, interval="step", after_its_end=after)
    assert names(run=RUN, schedulers=(one,)) == ([] if severity is None else [(severity, "scheduler_length")])
    manual = replace(RUN, is_manual=True)
    assert names(run=manual, schedulers=(one,)) == []
    assert names(run=FoundRun(), schedulers=(one,)) == []


def test_a_schedule_without_an_end_never_falls() -> None:
    """``estimated_stepping_batches`` is inf where nothing but a budget ends the run."""
    one = FoundScheduler(name="LR", setting="T_max", planned=math.inf, interval="step", after_its_end="rises")
    for run in (RUN, FoundRun()):
        [finding] = check_everything(found(run=run, schedulers=(one,)))
        assert "LR(T_max=inf) never changes the learning rate" in finding.what
        assert "TokenLearningRate" in finding.cure


@pytest.mark.parametrize(
    ("planned", "interval", "frequency", "run", "guess"),
    [
        (1_000, "epoch", 1, RUN, "That is the number of optimizer steps"),
        (10, "step", 1, RUN, "That is the number of epochs."),
        (1_000, "step", 1, replace(RUN, steps=250), "That is the number of micro-batches"),
        (8_000, "step", 1, OF_8, "That is the number for one device; there are 8."),
        (1_000, "step", 10, RUN, "is called 100 times (after every 10 optimizer steps)"),
    ],
)
def test_what_was_mistaken_for_the_number_of_calls(
    planned: int, interval: str, frequency: int, run: FoundRun, guess: str
) -> None:
    one = FoundScheduler(
        name="LR", setting="T", planned=planned, interval=interval, frequency=frequency, after_its_end="rises"
    )
    [finding] = check_everything(found(run=run, schedulers=(one,)))
    assert guess in finding.what


def test_memory_fits_barely_or_not() -> None:
    def said(available: int) -> list[tuple[str, str]]:
        return names(memory=FoundMemory(live_bytes=100, reserved_bytes=150, available_bytes=available))

    assert said(150) == []
    assert said(149) == said(100) == [("warning", "memory")]
    assert said(99) == [("error", "memory")]


def test_a_budget_is_reached_by_the_last_token() -> None:
    def said(tokens: int, **run: Any) -> list[tuple[str, str]]:
        budget = FoundBudget(tokens=tokens, micro_batch_tokens=50, frozen_fraction=0.49)
        return names(budget=budget, run=FoundRun(micro_batches_per_epoch=100, **run))

    assert said(10_000, epochs=2) == []
    assert said(10_001, epochs=2) == [("warning", "budget")]
    assert said(10**9) == []
    assert said(401, max_steps=4, window_lengths=frozenset({1, 2})) == [("warning", "budget")]
    assert said(400, max_steps=4, window_lengths=frozenset({1, 2})) == []


def test_a_loss_may_be_divided_by_what_is_no_window() -> None:
    run = FoundRun(window_lengths=frozenset({1, 4}))
    assert names(run=run, step=FoundStep(loss_divisor=4.0)) == [("warning", "loss_divided_twice")]
    assert names(run=run, step=FoundStep(loss_divisor=1.0)) == []
    assert names(run=run, step=FoundStep(loss_divisor=2.0)) == []
    assert names(run=replace(run, is_manual=True), step=FoundStep(loss_divisor=4.0)) == []


def test_a_step_after_its_closure_is_wrong_for_plugins_that_need_it_only() -> None:
    step = FoundStep(closure_before_step=True)
    assert names(precision=FP16, step=step) == []
    assert names(precision=replace(FP16, needs_closure=True), step=step) == [("error", "step_past_plugin")]


def test_weights() -> None:
    good = FoundWeight(names=("a", "b"), memory=1, is_optimized=True, has_gradient=True)
    frozen = replace(good, names=("c",), memory=2, is_trainable=False, is_optimized=False, has_gradient=False)
    half = replace(good, names=("d",), memory=3, dtype="bfloat16")
    ddp = FoundRun(needs_all_gradients=True)
    assert names(weights=(good, frozen), run=ddp) == []
    assert names(weights=(good, replace(frozen, dtype="float16"))) == []
    assert names(weights=(good, half)) == [("warning", "weights_in_16_bit")]
    assert names(weights=(good, replace(half, dtype="float16"))) == [("error", "weights_in_16_bit")]
    assert names(weights=(half,), precision=TRUE) == []
    unused = replace(good, names=("e",), memory=4, has_gradient=False)
    assert names(weights=(good, unused)) == []
    assert names(weights=(good, unused), run=ddp) == [("error", "unused_weights")]
    assert names(weights=(good, replace(good, names=("f",)))) == [("error", "tied_weights")]
    assert names(weights=(good,), untied=("input and output embeddings of lm",)) == [("warning", "tied_weights")]


def test_frozen_weights_in_fp32() -> None:
    trained = FoundWeight(names=("head",))
    frozen = FoundWeight(names=("base",), elements=2**20, is_trainable=False)
    advice = [("advice", "frozen_in_fp32")]
    for precision in (BF16, FP16, TRUE):
        assert names(precision=precision, weights=(trained, frozen)) == advice
        for fine in (replace(frozen, dtype="bfloat16"), replace(frozen, elements=2**18)):
            assert names(precision=precision, weights=(trained, fine)) == []
    for precision in (FoundPrecision(), FP8):
        assert names(precision=precision, weights=(trained, frozen)) == []
    [finding] = check_everything(found(precision=FP16, weights=(trained, frozen)))
    assert "they take 4 MiB" in finding.what
    assert "In 16 bit they take 2 MiB" in finding.what
    assert "dtype=torch.float16" in finding.cure


def test_a_checkpoint_of_this_run_is_right() -> None:
    same = FoundCheckpoint(
        path="last.ckpt",
        optimizers=((4,),),
        own_optimizers=((4,),),
        learning_rates=(0.1,),
        own_learning_rates=(0.1,),
        global_step=999,
        epochs_done=9,
    )
    run = FoundRun(epochs=10, max_steps=1_000)
    assert names(run=run, checkpoint=same) == []
    assert names(run=run, checkpoint=replace(same, optimizers=None)) == []
    assert names(run=run, checkpoint=replace(same, global_step=1_000)) == [("error", "checkpoint")]
    assert names(run=run, checkpoint=replace(same, epochs_done=10)) == [("error", "checkpoint")]
    assert names(run=run, checkpoint=same, precision=FP16) == [("warning", "checkpoint")]
