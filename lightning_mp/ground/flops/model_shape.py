"""What the named FLOPs conventions need to know of a module: weights of matrix products, and a decoder's shape."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from lightning_mp.ground.flops.conventions import CONVENTIONS, flops_per_token
from lightning_mp.ground.flops.experts import configurations, elements_used
from lightning_mp.ground.modules.whole_parameters import whole_parameters

_LARGEST_DISAGREEMENT = 1.25  # conventions differ by less among themselves


@dataclass(frozen=True, slots=True)
class MatmulParameters:
    """How many weights take part in matrix products."""

    #: Those that a token uses: all with two dimensions or more but embedding tables; a tied head counts, and of a
    #: mixture of experts the experts that a token is sent to.
    total: int
    frozen: int  # those of them that do not learn


def matmul_parameters(module: nn.Module) -> MatmulParameters:
    """Counts the weights of matrix products, each once.

    Tables that are only looked up (``nn.Embedding``) are left out; one that is shared with a head counts. Modules named
    ``experts`` are a mixture of experts, of which a token is routed to ``num_experts_per_tok`` as the Hugging Face
    configuration says.

    >>> matmul_parameters(nn.Sequential(nn.Embedding(10, 4), nn.LayerNorm(4), nn.Linear(4, 10)))
    MatmulParameters(total=40, frozen=0)
    """
    weights = [
        parameter
        for parameter in whole_parameters(module)
        if len(parameter.shape) >= 2
        and not all(isinstance(owner, nn.Embedding | nn.EmbeddingBag) for owner in parameter.owners)
    ]
    met = elements_used(module, weights)
    return MatmulParameters(
        total=sum(met), frozen=sum(each for each, weight in zip(met, weights, strict=True) if not weight.learns)
    )


def module_flops_per_token(module: nn.Module, convention: str, context_tokens: int) -> int:
    """FLOPs per token of a module under a named convention.

    Layers and width come from a Hugging Face configuration, ``num_hidden_layers``, ``num_attention_heads`` and
    ``head_dim`` or ``hidden_size``, of the module or of one inside of it. A sliding window (``sliding_window``, in the
    layers that ``layer_types`` names) takes the place of the sequence length where it is shorter.
    """
    if convention not in CONVENTIONS:
        raise ValueError(f"Unknown FLOPs convention {convention!r}. Use one of {', '.join(CONVENTIONS)}, or 'exact'.")
    weights = matmul_parameters(module)
    products = flops_per_token(weights.total, convention="6N", frozen_parameters=weights.frozen)
    attention = CONVENTIONS[convention].attention
    if not attention:
        return products
    config, width = _configuration_and_width(module, convention)
    pairs = _attended_pairs(config, context_tokens, is_halved=attention == 6)
    return products + sum(attention * width * each for each in pairs) // context_tokens


def far_above_count(convention: str, flops_per_token: float, counted_flops_per_token: float) -> str | None:
    """Why not to believe a convention, where it is more than a quarter above what was counted; None where it is not."""
    ratio = flops_per_token / counted_flops_per_token
    if ratio <= _LARGEST_DISAGREEMENT:
        return None
    return (
        f"the convention {convention!r} takes {flops_per_token:.4g} FLOPs per token, {ratio:.2f} times what was counted"
        f" ({counted_flops_per_token:.4g}): a token does not use all parameters, as in a mixture of experts. Use"
        " 'exact'."
    )


def _attended_pairs(config: Any, context_tokens: int, *, is_halved: bool) -> Iterator[int]:
    """Of each layer: pairs of query and key in a sequence; twice as many for a convention that takes their half."""
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    every_layer = ["sliding_attention" if window else "full_attention"] * int(config.num_hidden_layers)
    for kind in getattr(config, "layer_types", None) or every_layer:
        if kind == "full_attention" or (kind == "sliding_attention" and not window):
            yield context_tokens**2
        elif kind == "sliding_attention":
            assert window
            width = min(int(window), context_tokens)
            # The first tokens of a window see less: width T - width^2 / 2 pairs under a causal mask.
            yield 2 * width * context_tokens - width**2 if is_halved else width * context_tokens
        else:
            raise ValueError(
                f"A layer of this module has {kind!r}, which no convention has a formula for. Use 'exact', or give the"
                " number itself."
            )


def _configuration_and_width(module: nn.Module, convention: str) -> tuple[Any, int]:
    for config in configurations(module):
        layers = getattr(config, "num_hidden_layers", None)
        heads = getattr(config, "num_attention_heads", None)
        hidden = getattr(config, "hidden_size", None)
        if layers and heads and hidden:
            head_size = getattr(config, "head_dim", None) or hidden // heads
            return config, int(heads * head_size)
    raise ValueError(
        f"The {convention!r} convention needs the number of layers and the attention width, and this module has no"
        " Hugging Face configuration that contains them. Give the number itself, flops_per_token(N, layers=...,"
        f" width=..., context_tokens=..., convention={convention!r}), or 'exact'."
    )
