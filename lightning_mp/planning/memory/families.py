"""Families of Hugging Face's decoders: what their configurations leave out, and what their code saves for backward.

What is saved counts beside what the mathematics of a block needs. Norms written by hand save their squares and fp32
copies, rotations their halves, a GELU written by hand three more tensors of the MLP's width, attention that is not
fused its scores, and experts their rows in the order of the experts.

Source:
    Measured with :func:`~lightning_mp.monitors.step_memory.estimate.estimate_memory` on transformers 5.23 and torch
    2.13, for
    CUDA: activations at the end of the forward of 2 and of 4 blocks, of MLPs of one and of two sizes, and of 256 and
    of 512 tokens, beside :meth:`DecoderConfig.saved_bytes_per_token
    <lightning_mp.planning.memory.decoder_config.DecoderConfig.saved_bytes_per_token>`; rounded up.
    ``tests/planning/test_decoder_families.py`` compares the result at other shapes.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple

Trait = Literal["ungated", "biases", "positions", "tied head", "mask", "mask per block"]
"""MLPs have two matrices; linear layers and norms have biases; positions are learned; the head is the token table, also
where the configuration does not say so; a causal mask is kept, one byte per pair of positions, or one per block."""


class SavedBeside(NamedTuple):
    """Bytes of one token in one block, beside the formula."""

    per_width: int  # of the residual stream
    per_mlp_width: int  # of an MLP's inner width
    per_score: int  # of one score: heads times the length of the sequence


class Family(NamedTuple):
    """What models of one ``model_type`` have in common."""

    in_fp32: SavedBeside
    in_16_bit: SavedBeside  # under autocast
    traits: frozenset[Trait]


def _family(
    names: str, in_fp32: tuple[int, int, int], in_16_bit: tuple[int, int, int], *traits: Trait
) -> dict[str, Family]:
    return dict.fromkeys(names.split(), Family(SavedBeside(*in_fp32), SavedBeside(*in_16_bit), frozenset(traits)))


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        **_family("bloom", (0, 0, 4), (0, 0, 6), "ungated", "biases", "tied head"),
        **_family("codegen", (-7, 12, 4), (-3, 6, 6), "ungated"),
        **_family("cohere cohere2", (0, 0, 0), (10, 0, 0), "tied head"),
        **_family("falcon", (-2, 0, 4), (5, 0, 4), "ungated", "tied head"),
        **_family("gemma", (8, 0, 0), (14, 0, 0), "tied head"),
        **_family("gemma2", (28, 0, 8), (32, 0, 8), "tied head"),
        **_family("gemma3 gemma3_text", (37, 0, 0), (43, 0, 0), "tied head"),
        **_family("glm4", (29, 0, 0), (27, 0, 0)),
        **_family("glm4_moe", (29, 0, 0), (35, 6, 0)),
        **_family("gpt2", (6, 12, 0), (2, 6, 0), "ungated", "biases", "positions", "tied head"),
        **_family("gpt_bigcode", (6, 0, 0), (2, 0, 0), "ungated", "biases", "positions", "tied head", "mask"),
        **_family("gpt_neo", (0, 12, 4), (4, 6, 6), "ungated", "biases", "positions", "tied head", "mask per block"),
        **_family("gpt_neox", (8, 0, 0), (2, 0, 0), "ungated", "biases"),
        **_family("gpt_oss", (29, 12, 4), (31, 20, 6)),
        **_family("gptj", (-7, 12, 4), (1, 6, 6), "ungated"),
        **_family("granite internlm2 llama ministral mistral qwen2 smollm3", (8, 0, 0), (14, 0, 0)),
        **_family("granitemoe mixtral", (25, 0, 0), (29, 8, 0)),
        **_family("llama4 llama4_text", (44, 11, 0), (44, 6, 0)),
        **_family("mpt", (0, 0, 4), (0, 0, 6), "ungated", "tied head"),
        **_family("nemotron", (4, 0, 0), (6, 0, 0), "ungated"),
        **_family("olmo", (0, 0, 0), (6, 0, 0)),
        **_family("olmo2", (20, 0, 0), (26, 0, 0)),
        **_family("olmo3", (21, 0, 0), (27, 0, 0)),
        **_family("olmoe qwen3_moe", (37, 0, 0), (38, 8, 0)),
        **_family("opt", (8, -4, 0), (8, -2, 0), "ungated", "biases", "positions", "tied head"),
        **_family("persimmon", (13, 0, 0), (15, 0, 0), "ungated"),
        **_family("phi", (-4, 12, 0), (2, 6, 0), "ungated"),
        **_family("phi3", (18, 0, 0), (13, 0, 0)),
        **_family("phimoe", (17, 0, 0), (21, 8, 0)),
        **_family("qwen2_moe", (29, 0, 0), (37, 4, 0)),
        **_family("qwen3", (21, 0, 0), (24, 0, 0)),
        **_family("stablelm", (4, 0, 0), (8, 0, 0)),
        **_family("starcoder2", (0, 0, 0), (4, 0, 0), "ungated", "biases", "tied head"),
        **_family("deepseek_v2 deepseek_v3", (37, 0, 0), (38, 8, 0)),  # not measured: those of OLMoE
    }
)
"""By ``model_type``."""


def family_of(kind: str, *, gated: bool = True) -> Family:
    """A family that is not known is taken for Llama or, without gates, for GPT-NeoX.

    >>> family_of("gpt2").in_fp32.per_width
    6
    """
    return FAMILIES.get(kind) or FAMILIES["llama" if gated else "gpt_neox"]
