"""ChinchillaBudget: the run ends on its budget to the token, on a window boundary, and goes on after a resume."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from small_models import TokenModel, adamw, fused_adamw, loader, quiet_trainer, token_batches, weights

from lightning_mp import AccumulationScheduler, AutocastPrecision, ChinchillaBudget, LossScaler

LENGTHS = [6, 3, 11, 8, 2, 9, 7, 4, 10, 5]


def spend(budget: ChinchillaBudget, module: TokenModel, *callbacks: Callback, **arguments: Any) -> Any:
    trainer = quiet_trainer(callbacks=[*callbacks, budget], **({"max_epochs": -1} | arguments))
    trainer.fit(module, loader(token_batches(LENGTHS)))
    return trainer


@pytest.mark.parametrize("fused", [False, True], ids=["unfused", "fused"])
@pytest.mark.parametrize("tokens", [11, 13, 64, 65, 66, 100, 257])
def test_it_lands_on_the_token(tokens: int, fused: bool) -> None:
    module = TokenModel(fused_adamw if fused else adamw)
    budget = ChinchillaBudget(tokens=tokens)
    plugins = [AutocastPrecision("16-mixed", scaler=LossScaler(init_scale=1024.0))]
    spend(budget, module, AccumulationScheduler({0: 3, 1: 2}), plugins=plugins)
    assert module.trained_tokens == tokens
    assert (budget.tokens_seen, budget.fraction) == (tokens, 1.0)


@pytest.mark.full
@given(
    tokens=st.integers(11, 200),
    lengths=st.lists(st.integers(2, 11), min_size=1, max_size=7),
    window=st.integers(1, 4),
)
def test_it_lands_whatever_the_lengths(tokens: int, lengths: list[int], window: int) -> None:
    module = TokenModel()
    budget = ChinchillaBudget(tokens=tokens)
    trainer = quiet_trainer(callbacks=[budget, AccumulationScheduler({0: window})], max_epochs=-1)
    trainer.fit(module, loader(token_batches(lengths)))
    assert module.trained_tokens == budget.tokens_seen == tokens


@pytest.mark.parametrize(("planned", "is_said"), [(math.inf, True), (1_000, True), (9, False)])
def test_a_schedule_that_is_much_longer_than_the_budget_is_told(
    planned: float, is_said: bool, recwarn: pytest.WarningsRecorder
) -> None:
    """``estimated_stepping_batches`` knows nothing of a budget, and the learning rate would stay at its peak."""

    class Cosine(TokenModel):
        def configure_optimizers(self) -> Any:
            optimizer = adamw(self.parameters())
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, planned)  # type: ignore[arg-type]
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    spend(ChinchillaBudget(tokens=64), Cosine())
    said = [str(one.message) for one in recwarn if "CosineAnnealingLR" in str(one.message)]
    assert len(said) == is_said
    assert all(f"(T_max={planned:,})" in text and "TokenLearningRate" in text for text in said)


def test_the_last_window_is_the_mean_of_what_is_left() -> None:
    """The trimmed micro-batch weighs what it still has."""
    batches = token_batches([6, 8])
    module = TokenModel()
    start = [w.double() for w in weights(module)]
    callbacks = [ChinchillaBudget(tokens=10), AccumulationScheduler({0: 2})]
    quiet_trainer(callbacks=callbacks, max_epochs=-1).fit(module, loader([[x.clone(), y.clone()] for x, y in batches]))

    reference = TokenModel().double()
    (x1, y1), (x2, y2) = batches
    kept = y2.clone()
    kept.view(-1)[(y2 != -100).flatten().nonzero()[4:]] = -100
    logits = torch.cat([reference.head(reference.embedding(x)).flatten(0, 1) for x in (x1, x2)])
    torch.nn.functional.cross_entropy(logits, torch.cat([y1.flatten(), kept.flatten()])).backward()
    for now, before, p in zip(weights(module), start, reference.parameters(), strict=True):
        torch.testing.assert_close(now.double(), before - 1e-2 * p.grad, rtol=1e-6, atol=1e-7)


def test_trimming_leaves_the_data_set_alone() -> None:
    batches = token_batches([8, 8])
    copies = [y.clone() for _, y in batches]
    labels = [y for _, y in batches]
    quiet_trainer(callbacks=[ChinchillaBudget(tokens=11)], max_epochs=-1).fit(TokenModel(), loader(batches))
    assert all(torch.equal(y, copy) for y, copy in zip(labels, copies, strict=True))


@pytest.mark.full
def test_the_default_is_twenty_tokens_per_parameter(caplog: pytest.LogCaptureFixture) -> None:
    module = TokenModel()
    module.head.weight = module.embedding.weight
    parameters = 11 * 8 + 11
    budget = ChinchillaBudget()
    with caplog.at_level("INFO"):
        spend(budget, module)
    assert budget.budget_tokens == module.trained_tokens == 20 * parameters
    assert (
        f"20 tokens x {parameters} parameters (all of them, tied ones once) = {20 * parameters:,} tokens" in caplog.text
    )


@pytest.mark.parametrize(("landing", "expected"), [("floor", 56), ("ceil", 64)])
def test_other_landings(landing: Any, expected: int) -> None:
    module = TokenModel()
    batches = [(x, y) for x, y in token_batches([8] * 4)]  # tuples, which cannot be trimmed
    for index, (x, y) in enumerate(batches):
        batches[index] = (x[:, :4], torch.where(y[:, :4] == -100, 1, y[:, :4]))
    budget = ChinchillaBudget(tokens=60, landing=landing)
    quiet_trainer(callbacks=[budget, AccumulationScheduler({0: 3})], max_epochs=-1).fit(module, loader(batches))
    assert module.trained_tokens == budget.tokens_seen == expected


def test_it_lands_although_one_micro_batch_is_a_hundred_times_longer() -> None:
    module = TokenModel()
    budget = ChinchillaBudget(tokens=700)
    trainer = quiet_trainer(callbacks=[budget], max_epochs=-1)
    trainer.fit(module, loader(token_batches([10] * 20 + [1000] + [10] * 5)))
    assert module.trained_tokens == budget.tokens_seen == 700


def test_floor_does_not_pass_the_budget_with_uneven_micro_batches() -> None:
    module, budget = TokenModel(), ChinchillaBudget(tokens=1210, landing="floor")
    trainer = quiet_trainer(callbacks=[budget, AccumulationScheduler({0: 2})], max_epochs=-1)
    trainer.fit(module, loader(token_batches([4, 400] * 3)))
    assert module.trained_tokens == budget.tokens_seen <= 1210


class StatefulTokens:
    """A resumable loader over ready batches."""

    def __init__(self) -> None:
        self.batches = token_batches(LENGTHS)
        self.position = 0

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Any:
        self.position %= len(self.batches)
        while self.position < len(self.batches):
            self.position += 1
            x, y = self.batches[self.position - 1]
            yield [x, y]

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


@pytest.mark.filterwarnings("ignore:ChinchillaBudget. max_steps=.* ends before the budget")
@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
@pytest.mark.filterwarnings("ignore:ChinchillaBudget. the run ended after")
@pytest.mark.parametrize("stop_at_step", [1, 5, 9, 10])
@pytest.mark.parametrize("fused", [False, True], ids=["unfused", "fused"])
def test_a_resumed_run_ends_as_if_it_had_not_stopped(tmp_path: Any, stop_at_step: int, fused: bool) -> None:
    """Promise 6: weights to the last bit, tokens to the last one; overflow skips included."""

    class Overflowing(TokenModel):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = super().training_step(batch, batch_idx)
            return loss * torch.inf if batch_idx == 4 else loss

    def fit(max_steps: int, resume: bool) -> tuple[TokenModel, ChinchillaBudget]:
        module, budget = Overflowing(fused_adamw if fused else adamw), ChinchillaBudget(tokens=170)
        checkpoint = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=0, save_last=True)
        trainer = quiet_trainer(
            callbacks=[AccumulationScheduler({0: 1, 3: 2}, unit="step"), budget, checkpoint],
            plugins=[AutocastPrecision("16-mixed", scaler=LossScaler(init_scale=1024.0, growth_interval=3))],
            enable_checkpointing=True,
            max_epochs=-1,
            max_steps=max_steps,
        )
        trainer.fit(module, StatefulTokens(), ckpt_path=tmp_path / "last.ckpt" if resume else None)
        return module, budget

    straight, _ = fit(-1, resume=False)
    fit(stop_at_step, resume=False)
    resumed, budget = fit(-1, resume=True)
    assert budget.tokens_seen == 170
    for a, b in zip(weights(resumed), weights(straight), strict=True):
        assert torch.equal(a, b)


def test_resuming_a_spent_budget_trains_no_further(tmp_path: Any) -> None:
    trainer = spend(ChinchillaBudget(tokens=20), TokenModel())
    trainer.save_checkpoint(tmp_path / "spent.ckpt")
    module = TokenModel()
    again = quiet_trainer(callbacks=[ChinchillaBudget(tokens=20)], max_epochs=-1)
    again.fit(module, loader(token_batches(LENGTHS)), ckpt_path=tmp_path / "spent.ckpt")
    assert module.trained_tokens == 0


def test_it_validates_at_the_end() -> None:
    validated_after: list[int] = []

    class Validated(TokenModel):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            validated_after.append(self.trained_tokens)

    trainer = quiet_trainer(callbacks=[ChinchillaBudget(tokens=20)], max_epochs=-1, num_sanity_val_steps=0)
    trainer.fit(Validated(), loader(token_batches(LENGTHS)), loader(token_batches([4])))
    assert validated_after == [20]


def test_the_progress_is_logged() -> None:
    trainer = spend(ChinchillaBudget(tokens=100), TokenModel())
    assert trainer.callback_metrics["mp/tokens"] == 100
    assert trainer.callback_metrics["mp/budget_fraction"] == 1.0


@pytest.mark.filterwarnings("ignore:ChinchillaBudget. max_steps=.* ends before the budget")
def test_ending_before_the_budget_is_said() -> None:
    with pytest.warns(UserWarning, match=r"ended after 9 of 1,000 budgeted tokens \(0.9%\)"):
        spend(ChinchillaBudget(tokens=1000), TokenModel(), max_steps=2)


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tokens": 0}, r"ChinchillaBudget\(tokens=0\): it must be a whole number of tokens, 1 or more"),
        ({"tokens": -5}, r"ChinchillaBudget\(tokens=-5\)"),
        ({"tokens_per_parameter": 0}, "must be a positive finite number"),
        ({"tokens_per_parameter": float("nan")}, "must be a positive finite number"),
        ({"tokens": 10, "landing": "soft"}, r"landing='soft'\) is unknown.*\('exact', 'floor', 'ceil', 'nearest'\)"),
    ],
)
def test_wrong_arguments_are_refused(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ChinchillaBudget(**arguments)
