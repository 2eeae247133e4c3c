"""Two changed lines in a Hugging Face user's project: a GPT-2 and a Llama that train as their owner means them to."""

from typing import Any

import pytest
import torch
from huggingface_models import PRECISIONS, PROJECTS, LanguageModel, label_tokens, llama, plugin, project, streamed_dicts
from small_models import fit, quiet_trainer, weights

from lightning_mp import AccumulationScheduler, ChinchillaBudget, OverflowMonitor, OverflowPostMortem

# the projects' schedule is not what is tested here, and longer than a budget of some steps
pytestmark = pytest.mark.filterwarnings("ignore:ChinchillaBudget. LambdaLR.num_training_steps=100. plans many more")

DTYPES = {"16-mixed": torch.float16, "bf16-mixed": torch.bfloat16}


@pytest.mark.parametrize("surplus", [0, 1, 17])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", PROJECTS)
def test_a_hugging_face_project_lands_on_its_token_budget(name: str, precision: str, surplus: int) -> None:
    """Counted by the loss's own gradient, so it also shows that the labels are shifted as the model shifts them."""
    module, data = project(name)
    tokens_per_epoch = label_tokens(data)
    head_dtypes: set[torch.dtype] = set()
    module.model.get_output_embeddings().register_forward_hook(lambda *args: head_dtypes.add(args[2].dtype))
    budget = ChinchillaBudget(tokens=tokens_per_epoch + surplus)
    monitor = OverflowMonitor()
    scheduler = AccumulationScheduler({0: 1, 3: 2, 6: 5}, unit="step")
    trainer = quiet_trainer(
        max_epochs=-1, gradient_clip_val=1.0, plugins=[plugin(precision)], callbacks=[monitor, scheduler, budget]
    )
    trainer.fit(module, data)
    assert module.loss_bearing_tokens == tokens_per_epoch + surplus
    assert budget.tokens_seen == tokens_per_epoch + surplus
    assert budget.fraction == 1.0
    assert head_dtypes == {DTYPES[precision]}
    assert {p.dtype for p in module.parameters()} == {torch.float32}
    assert trainer.global_step == monitor.attempted_steps == len(module.learning_rates)
    # 12 micro-batches in an epoch: 1 + 1 + 1, then 2 + 2 + 2, then what is left of 5; a surplus opens an eighth window.
    assert trainer.global_step == (7 if surplus == 0 else 8)
    assert monitor.skipped_steps == 0


@pytest.mark.parametrize("name", PROJECTS)
def test_an_overflow_in_a_hugging_face_model_is_skipped_and_named(name: str, caplog: Any) -> None:
    """The scale is too high for the first steps; the warm-up of the learning rate does not count them."""
    module, data = project(name)
    monitor, post_mortem = OverflowMonitor(), OverflowPostMortem()
    before = weights(module)
    trainer = quiet_trainer(plugins=[plugin("16-mixed", init_scale=2.0**24)], callbacks=[monitor, post_mortem])
    trainer.fit(module, data)
    assert "was skipped at loss scale" in caplog.text
    assert 0 < monitor.skipped_steps < monitor.attempted_steps == trainer.global_step
    assert monitor.loss_scale == 2.0 ** (24 - monitor.skipped_steps)
    assert post_mortem.reports[0].step_index == 0
    assert len(post_mortem.reports) == monitor.skipped_steps
    names = dict(module.named_parameters())
    assert all(report.parameters and set(report.parameters) <= set(names) for report in post_mortem.reports)
    steps_made = monitor.attempted_steps - monitor.skipped_steps
    warm_up = [2e-2 * min(step / 4, (100 - step) / 96) for step in range(steps_made)]
    assert module.learning_rates == pytest.approx(warm_up)
    assert not all(torch.equal(old, new) for old, new in zip(before, weights(module), strict=True))
    assert all(bool(p.isfinite().all()) for p in module.parameters())


def test_landing_leaves_the_labels_of_the_data_set_alone() -> None:
    """The last batch is trimmed; the data set, whose tensors it shares, is not."""
    batches = list(streamed_dicts())
    before = [batch["labels"].clone() for batch in batches]
    module = LanguageModel(llama())
    budget = ChinchillaBudget(tokens=label_tokens(batches[:3]) + 1)
    fit(module, batches, budget, max_epochs=-1)
    assert module.loss_bearing_tokens == budget.budget_tokens
    assert all(torch.equal(batch["labels"], labels) for batch, labels in zip(batches, before, strict=True))
