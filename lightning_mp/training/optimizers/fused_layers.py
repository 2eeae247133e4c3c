"""How layers that hold several matrices in one weight divide, where that is known of their class."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from torch import nn

Parts = int | Sequence[int]


def _thirds(attention: Any) -> Parts:
    """``[queries; keys; values]`` of one size."""
    return 3


def _gpt2(attention: Any) -> Parts:
    """Cross-attention has keys and values in one weight."""
    return 2 if attention.is_cross_attention else 3


def _gpt_neox(attention: Any) -> Parts:
    """Each head has its query, key and value side by side."""
    return (attention.head_size,) * 3


def _bloom(attention: Any) -> Parts:
    """Each head has its query, key and value side by side."""
    return (attention.head_dim,) * 3


def _phi3(attention: Any) -> Parts:
    """Grouped queries, as Llama's in one weight."""
    config, head = attention.config, attention.head_dim
    keys = config.num_key_value_heads * head
    return config.num_attention_heads * head, keys, keys


def _halves(mlp: Any) -> Parts:
    """Gate and up."""
    return 2


_TRANSFORMERS = "transformers.models"

# Class of a module -> its weight, and how the outputs of that divide. By the class, because layers of one name and
# shape divide in different ways: query_key_value is thirds in the demo, by head in GPT-NeoX.
_KNOWN: Mapping[str, tuple[str, Callable[[Any], Parts]]] = MappingProxyType(
    {
        "torch.nn.modules.activation.MultiheadAttention": ("in_proj_weight", _thirds),
        "lightning_mp.language_model.gpt.CausalSelfAttention": ("query_key_value.weight", _thirds),
        f"{_TRANSFORMERS}.gpt2.modeling_gpt2.GPT2Attention": ("c_attn.weight", _gpt2),
        f"{_TRANSFORMERS}.gpt_neox.modeling_gpt_neox.GPTNeoXAttention": ("query_key_value.weight", _gpt_neox),
        f"{_TRANSFORMERS}.bloom.modeling_bloom.BloomAttention": ("query_key_value.weight", _bloom),
        f"{_TRANSFORMERS}.phi3.modeling_phi3.Phi3Attention": ("qkv_proj.weight", _phi3),
        f"{_TRANSFORMERS}.phi3.modeling_phi3.Phi3MLP": ("gate_up_proj.weight", _halves),
    }
)

# What layers with several matrices are called, in the projects above and others.
_NAMES = ("qkv", "query_key_value", "c_attn", "attn_qkv", "qkv_proj", "to_qkv", "to_kv", "in_proj_qkv", "gate_up_proj")


def known_splits(module: nn.Module) -> dict[str, Parts]:
    """By the name of the weight, how its outputs divide, as ``matrices_and_rest(split=...)`` takes it.

    Example:
        >>> known_splits(nn.TransformerEncoderLayer(8, 2))
        {'self_attn.in_proj_weight': 3}
    """
    found: dict[str, Parts] = {}
    for name, part in module.named_modules(remove_duplicate=False):
        for kind in type(part).__mro__:
            weight, parts = _KNOWN.get(f"{kind.__module__}.{kind.__qualname__}", ("", None))
            if parts is not None:
                found[f"{name}.{weight}" if name else weight] = parts(part)
                break
    return found


def sounds_fused(name: str) -> bool:
    """Whether a weight is called as those with several matrices are.

    >>> sounds_fused("blocks.0.attn.Wqkv.weight"), sounds_fused("blocks.0.attn.out.weight")
    (True, False)
    """
    return any(part.lower().lstrip("w_") in _NAMES for part in name.split(".")[-2:])
