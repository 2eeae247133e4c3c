"""FLOPs per token against an independent count and published figures."""

import math

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy
from torch.utils.flop_counter import FlopCounterMode

from lightning_mp.demo.model import GPT, GPTConfig
from lightning_mp.planning import CONVENTIONS, flops_per_token, model_flops_utilization


def matmul_parameters(config: GPTConfig) -> int:
    """Blocks without norms, and the tied head; no position table."""
    return 12 * config.layers * config.width**2 + config.vocab * config.width


def counted_flops(config: GPTConfig, batch: int, tokens: int) -> int:
    """Forward and backward with attention decomposed into matmuls, as torch counts them."""
    model = GPT(config)
    ids = torch.randint(0, config.vocab, (batch, tokens))
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
    return int(counter.get_total_flops())


@pytest.mark.parametrize("tokens", [16, 40])
@pytest.mark.parametrize(
    "config", [GPTConfig(2, 2, 32, block_tokens=40), GPTConfig(3, 4, 48, block_tokens=64, vocab=100)], ids=str
)
def test_palm_convention_equals_the_flop_counter_exactly(config: GPTConfig, tokens: int) -> None:
    batch = 3
    per_token = flops_per_token(
        matmul_parameters(config), layers=config.layers, width=config.width, context_tokens=tokens, convention="palm"
    )
    assert counted_flops(config, batch, tokens) == batch * tokens * per_token


def test_matmul_parameters_are_all_but_norms_and_positions() -> None:
    config = GPTConfig(3, 4, 48, block_tokens=64, vocab=100)
    norms_and_positions = (2 * config.layers + 1) * config.width + config.block_tokens * config.width
    assert matmul_parameters(config) == config.parameters - norms_and_positions


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


@pytest.mark.parametrize("row", CONVENTIONS.values(), ids=lambda row: row.name)
def test_each_convention_names_formula_parameters_and_source(row) -> None:
    assert "N" in row.formula
    assert "arXiv:" in row.source
    assert "parameters" in row.parameters or "all but" in row.parameters


def test_an_unknown_convention_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match="Unknown FLOPs convention 'megatron'. Use one of 6N, palm"):
        flops_per_token(1, convention="megatron")


@pytest.mark.parametrize("missing", ["layers", "width", "context_tokens"])
def test_what_a_convention_needs_is_asked_for_by_name(missing: str) -> None:
    arguments = {"layers": 2, "width": 8, "context_tokens": 4, missing: None}
    with pytest.raises(ValueError, match=rf"The 'palm' convention \(6 N \+ 12 L H Q T\) needs `{missing}`"):
        flops_per_token(100, **arguments)


@pytest.mark.parametrize("bad", [0, -1, 1.5, True])
def test_counts_must_be_positive_integers(bad: float) -> None:
    with pytest.raises(ValueError, match="`parameters` must be a positive integer, got"):
        flops_per_token(bad, convention="6N")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-1, 1, 1), "`tokens_per_second` must be a finite number of at least 0"),
        ((1, math.nan, 1), "`flops_per_token` must be a finite number of at least 0"),
        ((1, 1, 0), "`peak_flops_per_second` must be a positive finite number"),
    ],
)
def test_bad_rates_are_refused(arguments: tuple[float, float, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        model_flops_utilization(*arguments)
