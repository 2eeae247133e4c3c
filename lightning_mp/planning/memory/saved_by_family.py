"""What the code of Hugging Face's families saves for backward beside what the mathematics of a block needs.

Norms written by hand save their squares and fp32 copies, rotations their halves, a GELU written by hand three more
tensors of the MLP's width, attention that is not fused its scores, and experts their rows in the order of the experts.

Source:
    Measured with :func:`~lightning_mp.step_memory.estimate.estimate_memory` on transformers 5.23 and torch 2.13, for
    CUDA: activations at the end of the forward of 2 and of 4 blocks, of MLPs of one and of two sizes, and of 256 and
    of 512 tokens, beside :meth:`DecoderConfig.saved_bytes_per_token
    <lightning_mp.planning.memory.decoder_config.DecoderConfig.saved_bytes_per_token>`; rounded up.
    ``tests/planning/test_decoder_families.py`` compares the result at other shapes.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from lightning_mp.planning.memory.decoder_config import DecoderConfig


class SavedBeside(NamedTuple):
    """Bytes of one token in one block, beside the formula."""

    per_width: int  # of the residual stream
    per_mlp_width: int  # of an MLP's inner width
    per_score: int  # of one score: heads times the length of the sequence


def _alike(
    families: str, in_fp32: tuple[int, int, int], in_16_bit: tuple[int, int, int]
) -> dict[str, tuple[SavedBeside, SavedBeside]]:
    return dict.fromkeys(families.split(), (SavedBeside(*in_fp32), SavedBeside(*in_16_bit)))


SAVED_BESIDE: Mapping[str, tuple[SavedBeside, SavedBeside]] = MappingProxyType(
    {
        **_alike("bloom mpt", (0, 0, 4), (0, 0, 6)),
        **_alike("codegen", (-7, 12, 4), (-3, 6, 6)),
        **_alike("cohere cohere2", (0, 0, 0), (10, 0, 0)),
        **_alike("falcon", (-2, 0, 4), (5, 0, 4)),
        **_alike("gemma granite internlm2 llama ministral mistral qwen2 smollm3", (8, 0, 0), (14, 0, 0)),
        **_alike("gemma2", (28, 0, 8), (32, 0, 8)),
        **_alike("gemma3 gemma3_text", (37, 0, 0), (43, 0, 0)),
        **_alike("glm4", (29, 0, 0), (27, 0, 0)),
        **_alike("glm4_moe", (29, 0, 0), (35, 6, 0)),
        **_alike("gpt2", (6, 12, 0), (2, 6, 0)),
        **_alike("gpt_bigcode", (6, 0, 0), (2, 0, 0)),
        **_alike("gpt_neo", (0, 12, 4), (4, 6, 6)),
        **_alike("gpt_neox", (8, 0, 0), (2, 0, 0)),
        **_alike("gpt_oss", (29, 12, 4), (31, 20, 6)),
        **_alike("gptj", (-7, 12, 4), (1, 6, 6)),
        **_alike("granitemoe mixtral", (25, 0, 0), (29, 8, 0)),
        **_alike("llama4 llama4_text", (44, 11, 0), (44, 6, 0)),
        **_alike("nemotron", (4, 0, 0), (6, 0, 0)),
        **_alike("olmo", (0, 0, 0), (6, 0, 0)),
        **_alike("olmo2", (20, 0, 0), (26, 0, 0)),
        **_alike("olmo3", (21, 0, 0), (27, 0, 0)),
        **_alike("olmoe qwen3_moe", (37, 0, 0), (38, 8, 0)),
        **_alike("opt", (8, -4, 0), (8, -2, 0)),
        **_alike("persimmon", (13, 0, 0), (15, 0, 0)),
        **_alike("phi", (-4, 12, 0), (2, 6, 0)),
        **_alike("phi3", (18, 0, 0), (13, 0, 0)),
        **_alike("phimoe", (17, 0, 0), (21, 8, 0)),
        **_alike("qwen2_moe", (29, 0, 0), (37, 4, 0)),
        **_alike("qwen3", (21, 0, 0), (24, 0, 0)),
        **_alike("stablelm", (4, 0, 0), (8, 0, 0)),
        **_alike("starcoder2", (0, 0, 0), (4, 0, 0)),
        **_alike("deepseek_v2 deepseek_v3", (37, 0, 0), (38, 8, 0)),  # not measured: those of OLMoE
    }
)
"""By ``model_type``: in fp32, and under 16-bit autocast."""


def saved_by_code(config: DecoderConfig, element_bytes: int, context_tokens: float) -> tuple[float, float]:
    """Bytes per token and block beside the formula: of what every tensor-parallel rank has, and of heads and MLPs.

    A family that is not known is taken for Llama or, without gates, for GPT-NeoX.

    >>> saved_by_code(DecoderConfig(layers=1, width=100, vocabulary=8, family="gpt2"), 4, 1024)[0]
    600.0
    """
    beside = _beside(config)[0 if element_bytes == 4 else 1]
    of_heads_and_mlp = beside.per_mlp_width * config.mlp_widths + beside.per_score * config.heads * context_tokens
    return float(beside.per_width * config.width), float(of_heads_and_mlp)


def saves_scores(config: DecoderConfig) -> bool:
    """Whether its attention is not fused."""
    return any(beside.per_score for beside in _beside(config))


def _beside(config: DecoderConfig) -> tuple[SavedBeside, SavedBeside]:
    return SAVED_BESIDE.get(config.family) or SAVED_BESIDE["llama" if config.gated else "gpt_neox"]
