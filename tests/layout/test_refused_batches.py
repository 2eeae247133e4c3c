"""Batches that a budget or a weight cannot work with.

Every refusal is one line that says what was wrong and what to do instead, and what it offers works.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from refusing import Batches, refused, tokens, trains
from small_models import Regression, ResumableLoader, TokenModel, fit, quiet_trainer, regression_batches, token_batches
from torch import Tensor

from lightning_mp import AccumulationScheduler, ChinchillaBudget


def pairs() -> Batches:
    return [tuple(batch) for batch in tokens()]


def dicts() -> Batches:
    return [{"input_ids": x, "labels": y} for x, y in tokens()]


def words() -> Batches:
    return [["a", "bb"], ["ccc", "d"]] * 3


class DictModel(TokenModel):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step([batch["input_ids"], batch["labels"]], batch_idx)


class WordModel(TokenModel):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.head(self.embedding(torch.tensor([len(word) for word in batch]))).float().square().mean()


@pytest.mark.parametrize("landing", ["exact", "floor", "ceil"])
def test_a_budget_smaller_than_one_batch_is_refused(landing: Any) -> None:
    refused(
        "The budget of 3 tokens is smaller than one micro-batch, which has 7 tokens over all ranks."
        " Raise the budget or make the batch smaller.",
        TokenModel(),
        tokens(),
        callbacks=[ChinchillaBudget(tokens=3, landing=landing)],
        max_epochs=-1,
    )
    raised = ChinchillaBudget(tokens=7, landing=landing)
    trains(TokenModel(), tokens(), callbacks=[raised], max_epochs=-1)
    smaller_batches = ChinchillaBudget(tokens=3, landing=landing)
    trains(TokenModel(), token_batches([3] * 6), callbacks=[smaller_batches], max_epochs=-1)
    assert (raised.tokens_seen, smaller_batches.tokens_seen) == (7, 3)


def test_exact_landing_on_tuples_is_refused() -> None:
    refused(
        "landing='exact' must hide surplus labels, but a batch of type 'tuple' has no labels that"
        " can be replaced. Give batches as a list [inputs, labels] or a dict with 'labels', give trim=, or choose"
        " landing='floor' or landing='ceil'.",
        TokenModel(),
        pairs(),
        callbacks=[ChinchillaBudget(tokens=20)],
        max_epochs=-1,
    )


@pytest.mark.parametrize(
    ("module", "batches", "landing", "tokens_seen"),
    [
        (TokenModel, tokens, "exact", 20),
        (DictModel, dicts, "exact", 20),
        (TokenModel, pairs, "floor", 14),
        (TokenModel, pairs, "ceil", 21),
    ],
    ids=["a list", "a dict", "floor", "ceil"],
)
def test_what_is_offered_for_tuples_lands(
    module: Callable[[], TokenModel], batches: Callable[[], Batches], landing: Any, tokens_seen: int
) -> None:
    budget = ChinchillaBudget(tokens=20, landing=landing)
    project = module()
    trains(project, batches(), callbacks=[budget], max_epochs=-1)
    assert budget.tokens_seen == project.trained_tokens == tokens_seen


def test_exact_landing_beside_a_count_function_is_refused() -> None:
    refused(
        "landing='exact' trims labels, and with count= it is not known how that changes the count."
        " Give trim= too, choose landing='floor' or landing='ceil', or leave count= out.",
        TokenModel(),
        tokens(),
        callbacks=[ChinchillaBudget(tokens=20, count=lambda batch: batch[0].numel())],
        max_epochs=-1,
    )
    # `numel` is 8 or 10 a batch.
    ends = {}
    for landing in ("floor", "ceil"):
        budget = ChinchillaBudget(tokens=20, count=lambda batch: batch[0].numel(), landing=landing)
        trains(TokenModel(), tokens(), callbacks=[budget], max_epochs=-1)
        ends[landing] = budget.tokens_seen
    assert ends["floor"] <= 20 <= ends["ceil"]


NO_TOKENS = (
    " cannot count tokens in a batch of type 'list': there is no integer tensor with two dimensions or more at"
    " batch['labels'] or batch[1]. Pass count=, a function from a batch to its number of tokens"
)


def test_a_budget_without_tokens_to_count_is_refused() -> None:
    message = f"ChinchillaBudget{NO_TOKENS} (and landing='ceil' or 'floor')."
    refused(message, Regression(), regression_batches(6), callbacks=[ChinchillaBudget(tokens=20)], max_epochs=-1)
    budget = ChinchillaBudget(tokens=20, count=lambda batch: len(batch[0]), landing="floor")
    trains(Regression(), regression_batches(6), callbacks=[budget], max_epochs=-1)
    assert budget.tokens_seen == 20


def test_a_weight_by_tokens_without_tokens_to_count_is_refused() -> None:
    def scheduler(**arguments: Any) -> AccumulationScheduler:
        return AccumulationScheduler({0: 2}, weight_by="token", **arguments)

    message = f"AccumulationScheduler(weight_by='token'){NO_TOKENS}."
    refused(message, Regression(), regression_batches(6), callbacks=[scheduler()])
    trains(Regression(), regression_batches(6), callbacks=[scheduler(count=lambda batch: len(batch[0]))])


def test_the_keys_of_a_batch_without_labels_are_named() -> None:
    class Named(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return super().training_step([batch["x"], batch["target"]], batch_idx)

    batches = [{"x": x, "target": y} for x, y in regression_batches(6)]
    message = NO_TOKENS.replace("'list'", "'dict' with the keys 'x', 'target'")
    for part in (AccumulationScheduler({0: 1}, unit="token"), ChinchillaBudget(tokens=20)):
        with pytest.raises(MisconfigurationException, match=re.escape(type(part).__name__ + message)):
            fit(Named(), batches, part, max_epochs=-1)


def test_samples_that_cannot_be_counted_are_refused() -> None:
    message = (
        "No samples can be counted in a batch of type 'list': it holds no tensor with a batch dimension."
        " Pass AccumulationScheduler count=, a function from a batch to its number of items, without"
        " weight_by='sample'; or weight_by='batch'. Thresholds and targets can then be in steps or tokens."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        fit(WordModel(), words(), AccumulationScheduler({0: 2}, weight_by="sample"))
    for arguments in ({"count": len}, {"weight_by": "batch"}, {}):
        trainer = fit(WordModel(), words(), AccumulationScheduler({0: 2}, **arguments))
        assert trainer.global_step == 3


def test_batches_that_do_not_look_alike_are_refused() -> None:
    class Mixed(TokenModel):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if batch[0].is_floating_point():
                return self.head(batch[0]).float().square().mean()
            return super().training_step(batch, batch_idx)

    batches = [*token_batches([7] * 2), *regression_batches(2)]
    message = (
        "The first batch had token labels, this batch of type 'list' has none."
        " All batches of a run must have the same structure; otherwise pass count=."
    )
    with pytest.raises(MisconfigurationException, match=f"^{re.escape(message)}$"):
        fit(Mixed(), batches, AccumulationScheduler({0: 2}))
    trains(Mixed(), batches, callbacks=[AccumulationScheduler({0: 2}, count=lambda batch: len(batch[0]))])


@pytest.mark.filterwarnings("ignore:ChinchillaBudget. max_steps=.* ends before the budget")
def test_a_run_that_ends_before_its_budget_can_be_resumed_to_its_end(tmp_path: Path) -> None:
    """What the warning offers: resume from the last checkpoint with max_epochs=-1."""
    trainer = quiet_trainer(max_steps=2, callbacks=[ChinchillaBudget(tokens=40)])
    message = (
        r"ended after 14 of 40 budgeted tokens \(35\.0%\): something else ended it, such as max_steps.*max_epochs=-1"
    )
    with pytest.warns(UserWarning, match=message) as caught:
        trainer.fit(TokenModel(), ResumableLoader(tokens()))
    assert sum("budgeted tokens" in str(warning.message) for warning in caught) == 1
    path = tmp_path / "early.ckpt"
    trainer.save_checkpoint(path)
    budget = ChinchillaBudget(tokens=40)
    module = TokenModel()
    fit(module, ResumableLoader(tokens()), budget, max_epochs=-1, ckpt_path=path)
    assert budget.tokens_seen == 40
    assert module.trained_tokens == 26
