"""The language model: causal, tied, counted right, and started where GPT-2 starts."""

import math

import pytest
import torch
from torch.nn import functional as F

from lightning_mp.language_model import GPT, GPTConfig, LanguageModel, config_for_parameters, generate

CONFIG = GPTConfig(layers=2, heads=2, width=32, block_tokens=16)


def test_a_later_token_does_not_change_earlier_logits():
    model = GPT(CONFIG).eval()
    tokens = torch.randint(0, 256, (2, 16))
    changed = tokens.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 256
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :9], after[:, :9])
    assert not torch.equal(before[:, 9:], after[:, 9:])


def test_an_earlier_token_does_change_later_logits():
    model = GPT(CONFIG).eval()
    tokens = torch.randint(0, 256, (1, 16))
    changed = tokens.clone()
    changed[:, 0] = (changed[:, 0] + 1) % 256
    difference = (model(tokens) - model(changed)).abs().amax(dim=(0, 2))
    assert (difference > 0).all()


def test_the_head_is_the_token_table():
    model = GPT(CONFIG)
    assert model.head.weight is model.token_embedding.weight


@pytest.mark.parametrize(
    "config",
    [CONFIG, GPTConfig(1, 1, 16), GPTConfig(3, 2, 48), GPTConfig(2, 4, 96, block_tokens=8, vocab=100)],
    ids=str,
)
def test_the_closed_form_counts_the_parameters(config):
    assert sum(parameter.numel() for parameter in GPT(config).parameters()) == config.parameters


def test_gpt2_small_is_found_by_its_size():
    config = config_for_parameters(124_000_000, block_tokens=1024, vocab=50257)
    assert (config.layers, config.heads, config.width) == (12, 12, 768)
    # Radford et al. 2019: 124,439,808 with biases; without them 102,144 fewer
    # (per block 9 w of matrices and 2 w of norms, and the last norm's w).
    assert config.parameters == 124_439_808 - (12 * 11 + 1) * 768


@pytest.mark.parametrize("parameters", [10_000, 100_000, 1_000_000, 10_000_000, 124_000_000, 1_000_000_000])
def test_a_shape_is_near_the_wished_size_and_has_usable_heads(parameters):
    config = config_for_parameters(parameters)
    assert config.parameters == pytest.approx(parameters, rel=0.08)
    assert config.width % 16 == 0
    assert (config.width // config.heads) % 8 == 0


def test_the_loss_starts_at_that_of_a_uniform_guess():
    model = LanguageModel(layers=3, heads=2, width=48)
    inputs, labels = torch.randint(0, 256, (2, 8, 128))
    assert model.loss([inputs, labels]).item() == pytest.approx(math.log(256), abs=0.05)


def test_weights_start_as_in_gpt2():
    model = GPT(GPTConfig(layers=8, heads=2, width=128))
    block = model.blocks[0]
    assert block.mlp.up.weight.std().item() == pytest.approx(0.02, rel=0.03)
    assert block.mlp.down.weight.std().item() == pytest.approx(0.02 / 4, rel=0.03)
    assert block.attention.output.weight.std().item() == pytest.approx(0.02 / 4, rel=0.03)
    assert model.token_embedding.weight.std().item() == pytest.approx(0.02, rel=0.03)


def test_the_loss_is_the_mean_over_the_labels_that_are_left():
    model = LanguageModel(layers=1, heads=1, width=16)
    inputs, labels = torch.randint(0, 256, (2, 2, 8))
    labels[1, 3:] = -100
    kept = torch.cat([labels[0], labels[1, :3]])
    logits = model(inputs)
    expected = F.cross_entropy(torch.cat([logits[0], logits[1, :3]]), kept)
    torch.testing.assert_close(model.loss([inputs, labels]), expected)


def test_the_plain_attention_kernel_agrees_with_the_fused_one():
    model = LanguageModel(layers=2, heads=2, width=32, block_tokens=64)
    for block in model.model.blocks:
        torch.nn.init.normal_(block.attention.query_key_value.weight, std=0.2)
    tokens = torch.randint(0, 256, (2, 64))
    exact = model(tokens)
    with torch.autocast("cpu", torch.bfloat16):
        low = model(tokens)
    assert low.dtype == torch.bfloat16
    assert F.cosine_similarity(low.float().flatten(), exact.flatten(), dim=0) > 0.999


def test_only_matrices_decay():
    model = LanguageModel(layers=1, heads=1, width=16, weight_decay=0.3)
    decayed, kept = model.configure_optimizers()["optimizer"].param_groups
    assert decayed["weight_decay"] == 0.3
    assert {p.ndim for p in decayed["params"]} == {2}
    assert kept["weight_decay"] == 0
    assert {p.ndim for p in kept["params"]} == {1}
    assert len(decayed["params"]) + len(kept["params"]) == len(list(model.parameters()))


def test_generation_keeps_the_prompt_and_follows_the_seed():
    model = GPT(CONFIG).eval()
    texts = [generate(model, b"def ", 30, seed=seed) for seed in (0, 0, 1)]
    assert all(text.startswith(b"def ") and len(text) == 34 for text in texts)
    assert texts[0] == texts[1] != texts[2]


def test_generation_draws_only_from_the_most_likely():
    model = GPT(CONFIG).eval()
    prompt = torch.tensor([list(b"def ")])
    assert generate(model, b"def ", 1, top_k=1)[-1] == model(prompt)[0, -1].argmax()
