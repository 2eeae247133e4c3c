"""FLOPs per token against an independent count and published figures."""

import pytest

from lightning_mp.planning import CONVENTIONS, flops_per_token, model_flops_utilization


def test_conventions_differ_by_the_attention_term_alone() -> None:
    shape = {"layers": 12, "width": 768, "context_tokens": 1024}
    difference = flops_per_token(10**8, **shape) - flops_per_token(10**8, convention="6N")
    assert difference == 12 * 12 * 768 * 1024


def test_palm_540b_reproduces_the_published_mfu() -> None:
    """PaLM appendix B and section 4.1: 540.35B parameters, 118 layers, 48 heads of 256, 2048 tokens, 6144 TPU v4 chips
    at 275 TFLOP/s, 238.3k tokens/s: MFU 46.2% with attention, 45.7% without."""
    parameters, tokens_per_second, peak = 540_350_000_000, 238.3e3, 6144 * 275e12
    with_attention = flops_per_token(parameters, layers=118, width=48 * 256, context_tokens=2048)
    without = flops_per_token(parameters, convention="6N")
    assert round(model_flops_utilization(tokens_per_second, with_attention, peak), 3) == 0.462
    assert round(model_flops_utilization(tokens_per_second, without, peak), 3) == 0.457


@pytest.mark.parametrize(
    ("layers", "width", "gpus", "batch", "seconds", "mfu"),
    [(96, 12_288, 64, 64, 13.75, 0.514), (105, 20_480, 280, 280, 37.83, 0.560), (128, 25_600, 512, 512, 71.49, 0.563)],
    ids=["175B", "530B", "1T"],
)
def test_megatron_models_reproduce_the_published_mfu(
    layers: int, width: int, gpus: int, batch: int, seconds: float, mfu: float
) -> None:
    """Korthikanti et al. 2022, tables 3 and 5: A100s, 2,048 tokens, a vocabulary of 51,200, attention in full. Their
    formula 72 B L s h^2 (1 + s/6h + v/12hL) is ours with N of all matrices."""
    tokens, vocabulary = 2048, 51_200
    parameters = 12 * layers * width**2 + vocabulary * width
    per_token = flops_per_token(parameters, layers=layers, width=width, context_tokens=tokens)
    published = 72 * layers * width**2 * (1 + tokens / (6 * width) + vocabulary / (12 * width * layers))
    assert per_token == pytest.approx(published, rel=1e-12)
    speed = batch * tokens / seconds
    assert round(model_flops_utilization(speed / gpus, per_token, 312e12), 3) == pytest.approx(mfu, abs=5e-4)


def test_megatron_counts_the_half_that_a_causal_mask_leaves() -> None:
    """Against the layer formula of Megatron-LM: 4 h (h + h g/n + s/2) for attention and 4 h f for the MLP, a token."""
    layers, width, inner, vocabulary, tokens, groups = 4, 64, 256, 1000, 128, 0.25
    attention = 4 * width * (width + width * groups + tokens / 2)
    forward = layers * (attention + 4 * width * inner) + 2 * width * vocabulary
    parameters = int(layers * (2 * width**2 + 2 * width**2 * groups + 2 * width * inner) + width * vocabulary)
    counted = flops_per_token(parameters, layers=layers, width=width, context_tokens=tokens, convention="megatron")
    assert counted == 3 * forward


@pytest.mark.parametrize("row", CONVENTIONS.values(), ids=lambda row: row.name)
def test_each_convention_names_formula_parameters_and_source(row) -> None:
    assert "N" in row.formula
    assert "arXiv:" in row.source
    assert row.parameters.startswith(("all ", "as the caller counts"))
