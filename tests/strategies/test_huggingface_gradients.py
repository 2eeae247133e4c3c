"""Accumulated gradients of Hugging Face models against one big batch in plain PyTorch."""

import math
from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
from huggingface_models import (
    BLOCK_TOKENS,
    IGNORED,
    PAD,
    PRECISIONS,
    PROJECTS,
    VOCABULARY,
    Batch,
    LanguageModel,
    llama,
    plugin,
    sgd,
    streamed_dicts,
)
from small_models import fit, loader, quiet_trainer, weights
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

from lightning_mp import AccumulationScheduler, ChinchillaBudget, OverflowMonitor

# the projects' schedule is not what is tested here, and longer than a budget of some steps
pytestmark = pytest.mark.filterwarnings("ignore:ChinchillaBudget. LambdaLR.num_training_steps=100. plans many more")


def one_big_batch(batches: list[Batch]) -> dict[str, Tensor]:
    width = max(batch["input_ids"].shape[1] for batch in batches)
    fill = {"input_ids": PAD, "attention_mask": 0, "labels": IGNORED}
    return {
        key: torch.cat([nn.functional.pad(b[key], (0, width - b[key].shape[1]), value=value) for b in batches])
        for key, value in fill.items()
    }


def token_mean_gradient(model: PreTrainedModel, batches: list[Batch], *, shifted: bool = True) -> list[Tensor]:
    """Sum of the cross-entropy of every single token of one big batch over the number of tokens, by plain PyTorch."""
    batch = one_big_batch(batches)
    logits, labels = model(**batch).logits, batch["labels"]
    if shifted:
        logits, labels = logits[:, :-1], labels[:, 1:]
    per_token = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none", ignore_index=IGNORED)
    mean = per_token.sum() / (labels != IGNORED).sum()
    return gradients_of(mean, model)


def gradients_of(loss: Tensor, model: PreTrainedModel) -> list[Tensor]:
    return [g for g in torch.autograd.grad(loss, list(model.parameters()), allow_unused=True) if g is not None]


def mean_of_means_gradient(model: PreTrainedModel, batches: list[Batch]) -> list[Tensor]:
    losses = torch.stack([model(**batch).loss for batch in batches])
    return gradients_of(losses.mean(), model)


def distance(gradients: list[Tensor], reference: list[Tensor]) -> float:
    """Two-norm of the difference over two-norm of the reference."""
    difference = [a - b for a, b in zip(gradients, reference, strict=True)]
    return float(nn.utils.get_total_norm(difference) / nn.utils.get_total_norm(reference))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", PROJECTS)
def test_the_accumulated_gradient_is_the_token_mean_of_one_big_batch(name: str) -> None:
    """D30. In float32 with Lightning's own precision; 5 ragged micro-batches a window, 2 in the last (D29)."""
    make_model, make_loader = PROJECTS[name]
    module = LanguageModel(make_model(), sgd)
    model = deepcopy(module.model)
    quiet_trainer(callbacks=[AccumulationScheduler({0: 5})]).fit(module, make_loader())

    batches = list(make_loader())
    windows = [batches[:5], batches[5:10], batches[10:]]
    assert len(module.gradients) == len(windows)
    for gradients, rate, window in zip(module.gradients, module.learning_rates, windows, strict=True):
        reference = token_mean_gradient(model, window)
        # Float32 rounding: the sums run in another order. Measured 1.2e-7 to 1.8e-7.
        assert distance(gradients, reference) < 3e-6
        assert distance(mean_of_means_gradient(model, window), reference) > 1e-3
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), reference, strict=True):
                parameter -= rate * gradient
    assert distance(weights(module.model), weights(model)) < 3e-6


@pytest.mark.parametrize("precision", ["32-true", *PRECISIONS])
def test_a_micro_batch_without_any_label_weighs_nothing(precision: str) -> None:
    """All of it is prompt, so its mean loss is nan; the window's gradient is that of the others."""
    batches = list(streamed_dicts())[:3]
    batches[1] = batches[1] | {"labels": torch.full_like(batches[1]["labels"], IGNORED)}
    module = LanguageModel(llama(), sgd)
    model = deepcopy(module.model)
    monitor = OverflowMonitor()
    trainer = quiet_trainer(
        plugins=[] if precision == "32-true" else [plugin(precision)],
        callbacks=[AccumulationScheduler({0: 3}), monitor],
    )
    trainer.fit(module, loader(batches))
    assert math.isnan(module.losses[1])
    assert (monitor.attempted_steps, monitor.skipped_steps) == (1, 0)
    reference = token_mean_gradient(model, [batches[0], batches[2]])
    # A few times the unit round-off: 2^-24, 2^-11, 2^-8. Measured 1.4e-7, 3.1e-4, 2.5e-3.
    tolerance = {"32-true": 3e-6, "16-mixed": 3e-3, "bf16-mixed": 2e-2}[precision]
    assert distance(module.gradients[0], reference) < tolerance


def every_third_label(batch: Batch) -> Batch:
    """As in masked language modelling: the first token bears a loss, most tokens do not."""
    chosen = torch.arange(batch["labels"].shape[1]) % 3 == 0
    return {**batch, "labels": torch.where(chosen, batch["labels"], IGNORED)}


def masked_bert() -> BertForMaskedLM:
    return BertForMaskedLM(small_bert())


def small_bert() -> BertConfig:
    return BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=BLOCK_TOKENS,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )


def t5() -> T5ForConditionalGeneration:
    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCABULARY,
            d_model=16,
            d_kv=8,
            d_ff=32,
            num_layers=1,
            num_heads=2,
            dropout_rate=0.0,
            decoder_start_token_id=PAD,
        )
    )


@pytest.mark.parametrize("make_model", [masked_bert, t5])
def test_a_model_that_does_not_shift_its_labels_is_counted_in_full(make_model: Callable[[], PreTrainedModel]) -> None:
    batches = list(streamed_dicts())
    if make_model is masked_bert:
        batches = [every_third_label(batch) for batch in batches]
    module = LanguageModel(make_model(), sgd)
    model = deepcopy(module.model)
    budget = ChinchillaBudget(tokens=sum(int((batch["labels"] != IGNORED).sum()) for batch in batches) + 5)
    fit(module, batches, AccumulationScheduler({0: 5}), budget, max_epochs=-1)
    assert module.loss_bearing_tokens == budget.tokens_seen == budget.budget_tokens
    assert distance(module.gradients[0], token_mean_gradient(model, batches[:5], shifted=False)) < 3e-6
    assert distance(module.gradients[0], mean_of_means_gradient(model, batches[:5])) > 1e-3


def test_a_classifier_is_weighted_by_its_samples() -> None:
    """One label per text is no token label; the last micro-batch holds 1 text, the others 3 (D29)."""
    batches = [{**batch, "labels": batch["input_ids"][:, 0] % 2} for batch in streamed_dicts()][:3]
    batches[2] = {key: value[:1] for key, value in batches[2].items()}
    module = LanguageModel(BertForSequenceClassification(small_bert()), sgd)
    model = deepcopy(module.model)
    fit(module, batches, AccumulationScheduler({0: 4}))
    sums = [model(**batch).loss * len(batch["labels"]) for batch in batches]
    assert len(module.gradients) == 1
    assert distance(module.gradients[0], gradients_of(torch.stack(sums).sum() / 7, model)) < 3e-6
    assert distance(module.gradients[0], mean_of_means_gradient(model, batches)) > 1e-3
