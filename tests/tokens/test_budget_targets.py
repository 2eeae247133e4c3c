"""ChinchillaBudget: what the budget may be, what counts as spent, and how the run ends on it."""

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import small_models
import torch
from gloo import run_ranks
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from small_models import ResumableLoader, TokenModel, adamw, fused_adamw, quiet_trainer, token_batches, weights
from torch import Tensor, nn

from lightning_mp import AccumulationScheduler, AutocastPrecision, ChinchillaBudget, LossScaler, OverflowMonitor
from lightning_mp.callbacks import chinchilla_budget as module_under_test

LENGTHS = [5, 9, 4, 8, 7, 3, 9, 6]
#: 11 x 8 embedding, 8 x 11 head, 11 biases
ALL, NON_EMBEDDING = 187, 99


def fit(budget: ChinchillaBudget, module: pl.LightningModule | None = None, **arguments: Any) -> pl.Trainer:
    callbacks = arguments.pop("callbacks", [])
    batches = arguments.pop("batches", token_batches(LENGTHS))
    return small_models.fit(module or TokenModel(), batches, budget, *callbacks, **({"max_epochs": -1} | arguments))


# -- targets -----------------------------------------------------------------------------------------------------------


def test_parameters_are_counted_as_asked() -> None:
    class Frozen(TokenModel):
        def __init__(self) -> None:
            super().__init__()
            self.embedding.requires_grad_(False)

    class Tied(TokenModel):
        def __init__(self) -> None:
            super().__init__()
            self.head.weight = self.embedding.weight

    for module, which, parameters in [
        (TokenModel(), "all", ALL),
        (TokenModel(), "non_embedding", NON_EMBEDDING),
        (Frozen(), "trainable", NON_EMBEDDING),
        (Tied(), "all", ALL - 88),
        (Tied(), "non_embedding", 11),
    ]:
        budget = ChinchillaBudget(0.5, parameters=which)  # type: ignore[arg-type]
        fit(budget, module)
        assert budget.budget_tokens == round(0.5 * parameters) == budget.tokens_seen


@pytest.mark.parametrize("target", [{"tokens": 100}, {"device_hours": 1.0}])
def test_which_parameters_count_is_refused_where_none_do(target: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"parameters='trainable'\) says which parameters .* neither is given"):
        ChinchillaBudget(parameters="trainable", **target)


def test_flops_become_tokens_by_6_n_d() -> None:
    budget = ChinchillaBudget(flops=6 * ALL * 60.9)
    fit(budget)
    assert budget.budget_tokens == budget.tokens_seen == 60


def test_flops_of_a_mixture_count_the_experts_that_a_token_is_sent_to() -> None:
    class Mixture(TokenModel):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList([nn.Linear(8, 8, bias=False) for _ in range(4)])

    class Configured(Mixture):
        config = SimpleNamespace(num_experts_per_tok=1, num_local_experts=4)

    flops = 6e6 * ALL
    for module, met in [(TokenModel(), ALL), (Configured(), ALL + 64), (Mixture(), ALL + 4 * 64)]:
        assert ChinchillaBudget(flops=flops).planned_tokens(quiet_trainer(), module) == int(flops / (6 * met))
    assert ChinchillaBudget(1.0).planned_tokens(quiet_trainer(), Configured()) == ALL + 4 * 64


def test_the_first_of_several_targets_ends_the_run() -> None:
    for tokens, flops, ratio, expected in [(70, 1e9, 1.0, 70), (1e6, 6 * ALL * 50, 1.0, 50), (1e6, 1e9, 0.25, 47)]:
        budget = ChinchillaBudget(ratio, tokens=tokens, flops=flops)
        fit(budget)
        assert budget.tokens_seen == expected


def test_strings_are_read_as_people_write_them() -> None:
    assert ChinchillaBudget(tokens="1.5B").budget_tokens == 1_500_000_000
    assert ChinchillaBudget(flops="1e21").flops == 1e21


class Clock:
    """Seconds that pass only when a test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(module_under_test.time, "monotonic", lambda: self.now)


class Slow(TokenModel):
    clock: Clock

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.clock.now += 90.0
        return super().training_step(batch, batch_idx)


def test_device_hours_end_the_run_at_the_end_of_a_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """90 s per micro-batch, 3 per window: 0.1 hours are over after the 4th, the window ends after the 6th."""
    module, budget = Slow(), ChinchillaBudget(device_hours=0.1)
    module.clock = Clock(monkeypatch)
    trainer = fit(budget, module, callbacks=[AccumulationScheduler({0: 3})])
    assert (trainer.global_step, budget.device_seconds) == (2, 540.0)
    assert budget.reached
    assert budget.budget_tokens is None
    assert trainer.callback_metrics["mp/budget_fraction"] == pytest.approx(540 / 360)


@pytest.mark.full
def test_device_hours_count_devices_and_all_ranks_stop_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1's clock says so after two steps; both learn of it one step later."""

    def train(rank: int) -> Any:
        module, budget = Slow(), ChinchillaBudget(device_hours=0.1)
        module.clock = Clock(monkeypatch)
        if rank == 0:
            module.clock = Clock(monkeypatch)
            monkeypatch.setattr(module_under_test.time, "monotonic", lambda: 0.0)
        trainer = fit(budget, module, strategy="ddp", devices=2)
        return trainer.global_step, budget.device_seconds

    assert run_ranks(train, 2) == [(3, 0.0), (3, 540.0)]


def test_device_hours_survive_a_resume(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def run(max_steps: int, **fit_arguments: Any) -> tuple[int, float]:
        module, budget = Slow(), ChinchillaBudget(device_hours=0.1)
        module.clock = Clock(monkeypatch)
        trainer = quiet_trainer(callbacks=[budget], max_epochs=-1, max_steps=max_steps)
        trainer.fit(module, ResumableLoader(token_batches(LENGTHS)), **fit_arguments)
        trainer.save_checkpoint(tmp_path / "x.ckpt")
        return trainer.global_step, budget.device_seconds

    with pytest.warns(UserWarning, match=r"75\.0% of its 0\.1 device hours"):
        assert run(3) == (3, 270.0)
    assert run(-1, ckpt_path=tmp_path / "x.ckpt", weights_only=True) == (4, 360.0)


# -- landings ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", range(1, 70, 3))
def test_nearest_lands_within_half_of_the_largest_micro_batch(tokens: int) -> None:
    """Micro-batches that all hold 6 tokens: the nearest multiple of 6 (ties go up), but one at least."""
    budget = ChinchillaBudget(tokens=max(tokens, 6), landing="nearest")
    fit(budget, batches=token_batches([6] * 16))
    input_tokens = token_batches([6])[0][1].numel()
    assert abs(budget.tokens_seen - max(tokens, 6)) <= input_tokens / 2
    assert budget.tokens_seen % 6 == 0


def test_a_users_own_trim_lands_exactly() -> None:
    """Labels where nobody looks for them, in a tuple, counted by count=."""

    class Own(TokenModel):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, _, holder = batch
            return nn.functional.cross_entropy(self.head(self.embedding(x)).flatten(0, 1), holder["y"].flatten())

    def count(batch: Any) -> Tensor:
        counted: Tensor = (batch[2]["y"] != -100).sum()
        return counted

    def trim(batch: Any, keep_tokens: int) -> Callable[[], None]:
        before = batch[2]["y"]
        seen = (before != -100).flatten().cumsum(0).view_as(before)
        batch[2]["y"] = torch.where(seen > keep_tokens, -100, before)
        return lambda: batch[2].update(y=before)

    plain = token_batches(LENGTHS)
    batches = [(x, "no labels", {"y": y}) for x, y in plain]
    budget, reference = ChinchillaBudget(tokens=61, count=count, trim=trim), ChinchillaBudget(tokens=61)
    module, other = Own(adamw), TokenModel(adamw)
    fit(budget, module, batches=batches)
    fit(reference, other)
    assert budget.tokens_seen == 61
    assert all(torch.equal(a, b) for a, b in zip(weights(module), weights(other), strict=True))
    assert all(b[2]["y"] is y for b, (_, y) in zip(batches, plain, strict=True)), "what was trimmed is whole again"


# -- waste -------------------------------------------------------------------------------------------------------------


class Overflowing(TokenModel):
    """The loss of some micro-batches, counted over the run, is infinite."""

    def __init__(self, optimizer: Any, overflows: Any) -> None:
        super().__init__(optimizer)
        self.overflows, self.seen = set(overflows), 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.seen += 1
        return loss * (math.inf if self.seen - 1 in self.overflows else 1.0)


def ours() -> AutocastPrecision:
    return AutocastPrecision("16-mixed", scaler=LossScaler(init_scale=2.0**10))


def stock() -> MixedPrecision:
    return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**10))


@pytest.mark.parametrize("plugin", [ours, stock])
@pytest.mark.parametrize("optimizer", [adamw, fused_adamw], ids=["unfused", "fused"])
@pytest.mark.parametrize("overflows", [(), (0,), (2, 3), (6,), (5, 6, 7), (7,), (1, 8)], ids=str)
def test_skipped_tokens_are_made_up_for(overflows: tuple[int, ...], optimizer: Any, plugin: Any) -> None:
    """The budget is that of seven micro-batches: the very last step may be the skipped one."""
    budget = ChinchillaBudget(tokens=sum(LENGTHS[:7]), on_waste="extend")
    module = Overflowing(optimizer, overflows)
    trainer = fit(budget, module, plugins=[plugin()], callbacks=[OverflowMonitor()])
    counter = budget._controller.counter  # type: ignore[union-attr]
    adam_steps = {int(state["step"]) for state in trainer.optimizers[0].state.values()}
    assert counter.tokens - counter.skipped_tokens == budget.tokens_spent == sum(LENGTHS[:7])
    assert adam_steps == {module.seen - len([i for i in overflows if i < module.seen])}
    # What is skipped is counted whole, but for a micro-batch that was trimmed to the budget.
    skipped = [LENGTHS[i % 8] for i in overflows if i < module.seen]
    assert counter.skipped_tokens == sum(skipped) or max(overflows) >= 6
    assert trainer.global_step == module.seen


@pytest.mark.parametrize("optimizer", [adamw, fused_adamw], ids=["unfused", "fused"])
def test_skipped_tokens_are_reported_otherwise(optimizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    budget = ChinchillaBudget(tokens=60)
    with caplog.at_level("INFO"):
        fit(budget, Overflowing(optimizer, (1, 7, 9)), plugins=[ours()])
    # 51 tokens in the first epoch, then 5 and 4 of 9.
    assert budget.tokens_seen == budget.tokens_spent == 60
    assert "60 in the loss, of those 19 in skipped steps and 9 after the first epoch" in caplog.text


def test_the_account_knows_padding(caplog: pytest.LogCaptureFixture) -> None:
    class FromDict(TokenModel):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return super().training_step((batch["input_ids"], batch["labels"]), batch_idx)

    batches = []
    for x, y in token_batches(LENGTHS):
        mask = torch.ones_like(x)
        mask[1, -1] = 0
        batches.append({"input_ids": x, "labels": y, "attention_mask": mask})
    input_tokens = sum(b["labels"].numel() for b in batches)
    with caplog.at_level("INFO"):
        fit(ChinchillaBudget(tokens=51), FromDict(), batches=batches)
    assert f"{input_tokens} in the inputs, {input_tokens - 8} without padding, 51 in the loss" in caplog.text


def test_making_up_needs_somebody_who_tells() -> None:
    budget = ChinchillaBudget(tokens=10, on_waste="extend")
    with pytest.raises(
        MisconfigurationException, match=r"MixedPrecision does not report them.*add OverflowMonitor\(\)"
    ):
        fit(budget, plugins=[stock()])


# -- ends --------------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:ChinchillaBudget. the run ended after")
def test_data_that_end_before_the_budget_are_told_of_with_the_first_batch() -> None:
    """Of the first batch 5 of 8 tokens are targets; the rest is padding."""
    with pytest.warns(
        UserWarning, match=r"max_epochs=2 leaves 16 micro-batches of about 5 tokens, 80 of the 500 tokens"
    ):
        fit(ChinchillaBudget(tokens=500), max_epochs=2)


@pytest.mark.filterwarnings("ignore:ChinchillaBudget. the run ended after")
def test_steps_that_end_before_the_budget_are_told_of_with_the_first_batch() -> None:
    message = "max_steps=5 ends before the budget. 5 steps of about 10 tokens make 50 of the 500 tokens"
    with pytest.warns(UserWarning, match=message):
        fit(ChinchillaBudget(tokens=500), max_steps=5, callbacks=[AccumulationScheduler({0: 2})])


def test_a_spent_budget_leaves_a_checkpoint_beside_the_others(tmp_path: Path) -> None:
    for save in (True, False):
        folder = tmp_path / str(save)
        checkpoint = ModelCheckpoint(folder, every_n_train_steps=100, save_top_k=-1)
        fit(ChinchillaBudget(tokens=30, save=save), callbacks=[checkpoint], enable_checkpointing=True)
        assert (folder / "budget_reached-step-5.ckpt").exists() == save


def test_without_checkpoints_there_is_no_file(tmp_path: Path) -> None:
    fit(ChinchillaBudget(tokens=30), default_root_dir=tmp_path)
    assert list(tmp_path.rglob("*.ckpt")) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tokens": "20 billions"}, "`tokens` cannot be read, got '20 billions'"),
        ({"tokens": "1.5"}, r"tokens=1.5\): it must be a whole number of tokens"),
        ({"flops": 0}, "`flops` must be a positive finite number, got 0"),
        ({"flops": math.nan}, "`flops` must be a positive finite number, got nan"),
        ({"device_hours": -1}, r"device_hours=-1\): it must be a positive finite number of hours times devices"),
        ({"tokens_per_parameter": math.inf}, r"tokens_per_parameter=inf\): it must be a positive finite number"),
        (
            {"parameters": "active"},
            r"parameters='active'\) is unknown; it must be one of \('all', 'trainable', 'non_emb",
        ),
        ({"on_waste": "ignore"}, r"on_waste='ignore'\) is unknown; it must be one of \('report', 'extend'\)"),
        ({"trim": print, "landing": "floor"}, r"trim=..., landing='floor'\): only landing='exact' trims"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ChinchillaBudget(**arguments)
