"""Wrong types and rare combinations: refused in words, or made to work."""

from typing import Any

import huggingface_models as hf
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler, StochasticWeightAveraging
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from small_models import TokenModel, fit, loader, quiet_trainer, token_batches
from transformers import BatchEncoding, LlavaConfig, LlavaForConditionalGeneration

from lightning_mp import AccumulationScheduler, AutocastPrecision, ChinchillaBudget

# the projects' schedule is not what is tested here, and longer than a budget of some steps
pytestmark = pytest.mark.filterwarnings("ignore:ChinchillaBudget. LambdaLR.num_training_steps=100. plans many more")


@pytest.mark.parametrize("rival", [GradientAccumulationScheduler({0: 2}), StochasticWeightAveraging(1e-2)])
def test_the_budget_refuses_what_sets_accumulation_itself(rival: Callback) -> None:
    trainer = quiet_trainer(callbacks=[rival, ChinchillaBudget(tokens=42)], max_epochs=4)
    with pytest.raises(MisconfigurationException, match=f"ChinchillaBudget .*{type(rival).__name__}"):
        trainer.fit(TokenModel(), loader(token_batches([7] * 6)))


def test_cached_batches_get_their_labels_back() -> None:
    """A BatchEncoding is handed on as the same object, not as a copy."""
    batches = [BatchEncoding(dict(batch)) for batch in hf.streamed_dicts()]
    before = [batch["labels"].clone() for batch in batches]
    module = hf.LanguageModel(hf.llama())
    fit(module, batches, ChinchillaBudget(tokens=100), max_epochs=-1)
    assert module.loss_bearing_tokens == 100
    assert all(torch.equal(a, b["labels"]) for a, b in zip(before, batches, strict=True))


def test_labels_that_are_shifted_already_count_in_full_under_a_hugging_face_backbone() -> None:
    class OwnLoss(hf.LanguageModel):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            x, y = batch
            logits = self.model(input_ids=x).logits
            logits.register_hook(self._count_positions)
            return torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())

    ids = torch.randint(0, 31, (8, 2, 9))
    module = OwnLoss(hf.gpt2())
    batches = loader([[i[:, :-1], i[:, 1:]] for i in ids])
    quiet_trainer(max_epochs=-1, callbacks=[ChinchillaBudget(tokens=50)]).fit(module, batches)
    assert module.loss_bearing_tokens == 50


def test_a_vision_language_model_shifts_inside_too() -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {**sizes, "vocab_size": 32, "num_key_value_heads": 2, "max_position_embeddings": 32, "model_type": "llama"}
    vision = {**sizes, "image_size": 8, "patch_size": 4, "model_type": "clip_vision_model"}
    config = LlavaConfig(text_config=text, vision_config=vision, image_token_index=31)
    module = hf.LanguageModel(LlavaForConditionalGeneration(config))
    fit(module, list(hf.streamed_dicts()), ChinchillaBudget(tokens=100), max_epochs=-1)
    assert module.loss_bearing_tokens == 100


def test_a_budget_used_for_a_second_model_counts_its_parameters() -> None:
    budget = ChinchillaBudget(0.5)
    small, large = TokenModel(), TokenModel(vocabulary=40)
    for module in (small, large):
        fit(module, token_batches([7] * 6), budget, max_epochs=-1)
    assert budget.budget_tokens == round(0.5 * sum(p.numel() for p in large.parameters()))


def test_a_budget_may_be_written_as_a_float() -> None:
    budget = ChinchillaBudget(tokens=1e9)
    assert budget.budget_tokens == 10**9
    assert type(budget.budget_tokens) is int


def test_a_first_micro_batch_of_one_token_can_be_landed_on() -> None:
    module = TokenModel()
    fit(module, token_batches([1] + [7] * 5), ChinchillaBudget(tokens=30), max_epochs=-1)
    assert module.trained_tokens == 30


def test_schedules_with_numpy_integers() -> None:
    assert AccumulationScheduler({np.int64(0): np.int64(2)}).schedule == {0: 2}  # type: ignore[dict-item]


def test_a_plugin_forgets_the_device_of_its_last_trainer() -> None:
    plugin = AutocastPrecision("bf16-mixed")
    fit(TokenModel(), token_batches([7]), plugin=plugin)
    assert plugin.device is None
