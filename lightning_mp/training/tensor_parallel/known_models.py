"""Models that "auto" can split, and what has to be known of their attention."""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Literal

from torch import nn

from lightning_mp.ground.modules.names import named_modules

Style = Literal[
    "column",
    "column_gather",
    "column_qkv",
    "row",
    "row_split",
    "vocabulary",
    "vocab_parallel_head",
    "sequence",
    "whole_sequence",
    "whole",
]
"""How a layer is split; see :func:`~lightning_mp.training.tensor_parallel.layers.split_layer`."""

_LLAMA, _GPT2 = "transformers.models.llama.modeling_llama", "transformers.models.gpt2.modeling_gpt2"
_DEMO = "lightning_mp.language_model.gpt"

#: The layers whose outputs are heads.
_LLAMA_HEADS = ("q_proj", "k_proj", "v_proj")

# Class of a module -> its children.
_AUTO: Mapping[str, Mapping[str, Style]] = MappingProxyType(
    {
        f"{_LLAMA}.LlamaAttention": {"q_proj": "column", "k_proj": "column", "v_proj": "column", "o_proj": "row"},
        f"{_LLAMA}.LlamaMLP": {"gate_proj": "column", "up_proj": "column", "down_proj": "row"},
        f"{_LLAMA}.LlamaModel": {"embed_tokens": "vocabulary"},
        f"{_LLAMA}.LlamaForCausalLM": {"lm_head": "vocab_parallel_head"},
        f"{_GPT2}.GPT2Attention": {"c_attn": "column_qkv", "c_proj": "row"},
        f"{_GPT2}.GPT2MLP": {"c_fc": "column", "c_proj": "row"},
        f"{_GPT2}.GPT2Model": {"wte": "vocabulary"},
        f"{_GPT2}.GPT2LMHeadModel": {"lm_head": "vocab_parallel_head"},
        f"{_DEMO}.CausalSelfAttention": {"query_key_value": "column_qkv", "output": "row"},
        f"{_DEMO}.MLP": {"up": "column", "down": "row"},
        f"{_DEMO}.GPT": {"token_embedding": "vocabulary", "head": "vocab_parallel_head"},
    }
)
# Added where the sequence is split: the blocks; in them norms and dropout, which work on parts; and modules whose
# layers are split, which need the whole.
_BLOCK_PARTS: Mapping[str, Mapping[str, Style]] = MappingProxyType(
    {
        f"{_LLAMA}.LlamaModel": {"layers": "sequence"},
        f"{_LLAMA}.LlamaDecoderLayer": {
            "input_layernorm": "sequence",
            "self_attn": "whole_sequence",
            "post_attention_layernorm": "sequence",
            "mlp": "whole_sequence",
        },
        f"{_GPT2}.GPT2Model": {"h": "sequence"},
        f"{_GPT2}.GPT2Block": {
            "ln_1": "sequence",
            "attn": "whole_sequence",
            "ln_2": "sequence",
            "mlp": "whole_sequence",
        },
        f"{_GPT2}.GPT2Attention": {"resid_dropout": "sequence"},
        f"{_GPT2}.GPT2MLP": {"dropout": "sequence"},
        f"{_DEMO}.GPT": {"blocks": "sequence"},
        f"{_DEMO}.Block": {
            "attention_norm": "sequence",
            "attention": "whole_sequence",
            "mlp_norm": "sequence",
            "mlp": "whole_sequence",
        },
    }
)


def automatic_styles(model: nn.Module, *, sequence: bool = False) -> dict[str, Style]:
    """The style of every layer of the models that are known, by its name."""
    found: dict[str, Style] = {}
    for name, module in named_modules(model):
        for kind in _classes(module):
            children = dict(_AUTO.get(kind, {}))
            if getattr(module, "is_cross_attention", False):
                # Keys and values of another sequence in one matrix, queries in another: attention stays whole.
                children = {"c_attn": "column_gather", "c_proj": "row_split"}
            if sequence:
                children |= _BLOCK_PARTS.get(kind, {})
            for child, style in children.items():
                found[f"{name}.{child}" if name else child] = style
    return found


def head_counts(model: nn.Module, styles: Mapping[str, Style]) -> Iterator[tuple[str, str, int]]:
    """Names of attention modules that are split by heads, with what they call each number of heads, and the number."""
    for name, module in named_modules(model):
        kinds = set(_classes(module))
        if f"{_LLAMA}.LlamaAttention" in kinds and "column" in (
            styles.get(f"{name}.{child}") for child in _LLAMA_HEADS
        ):
            for heads in ("num_attention_heads", "num_key_value_heads"):
                yield name, heads, getattr(module.config, heads)
        elif f"{_GPT2}.GPT2Attention" in kinds and styles.get(f"{name}.c_attn") == "column_qkv":
            yield name, "num_heads", module.num_heads  # type: ignore[misc]
        elif f"{_DEMO}.CausalSelfAttention" in kinds and styles.get(f"{name}.query_key_value") == "column_qkv":
            yield name, "heads", module.heads  # type: ignore[misc]


def attention_dropout(attention: nn.Module) -> float:
    """The probability with which an attention module leaves out weights; 0 where that is not known."""
    kinds = set(_classes(attention))
    if f"{_LLAMA}.LlamaAttention" in kinds:
        return float(attention.attention_dropout)  # type: ignore[arg-type]
    if f"{_GPT2}.GPT2Attention" in kinds:
        return float(attention.attn_dropout.p)  # type: ignore[union-attr,arg-type]
    return 0.0


def adapt_attention(attention: nn.Module, ranks: int) -> None:
    """Tells an attention module that its fused matrix gives this rank's heads only, where its code has to know."""
    if f"{_GPT2}.GPT2Attention" in _classes(attention):
        attention.split_size //= ranks  # type: ignore[operator,assignment]  # where queries end and keys begin


def class_path(module: nn.Module) -> str:
    """Where the class of a module is from, as ``torch.nn.modules.linear.Linear``."""
    return f"{type(module).__module__}.{type(module).__qualname__}"


def _classes(module: nn.Module) -> list[str]:
    return [f"{kind.__module__}.{kind.__qualname__}" for kind in type(module).__mro__]
