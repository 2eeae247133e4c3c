"""What the named FLOPs conventions ask about a module: its weights of matrix products, and the shape of a decoder."""

from dataclasses import dataclass

from torch import nn

from lightning_mp.flops.conventions import CONVENTIONS, flops_per_token
from lightning_mp.modules.whole_parameters import whole_parameters

__all__ = ["MatmulParameters", "matmul_parameters", "module_flops_per_token"]


@dataclass(frozen=True, slots=True)
class MatmulParameters:
    """How many weights take part in matrix products."""

    total: int
    """All of them: everything with two dimensions or more but embedding tables; a tied head counts."""
    frozen: int
    """Those of them that do not learn."""


def matmul_parameters(module: nn.Module) -> MatmulParameters:
    """Counts the weights of matrix products, each once.

    Tables that are only looked up (``nn.Embedding``) are left out; one that is shared with a head counts. Of a mixture
    of experts all experts count: for those that one token meets, count with
    :func:`~lightning_mp.flops.flop_counter.count_flops`.

    Args:
        module: may be sharded, see :func:`~lightning_mp.modules.whole_parameters.whole_parameters`.

    Example:
        >>> matmul_parameters(nn.Sequential(nn.Embedding(10, 4), nn.LayerNorm(4), nn.Linear(4, 10)))
        MatmulParameters(total=40, frozen=0)
    """
    weights = [
        parameter
        for parameter in whole_parameters(module)
        if len(parameter.shape) >= 2
        and not all(isinstance(owner, nn.Embedding | nn.EmbeddingBag) for owner in parameter.owners)
    ]
    return MatmulParameters(
        total=sum(weight.elements for weight in weights),
        frozen=sum(weight.elements for weight in weights if not weight.learns),
    )


def module_flops_per_token(module: nn.Module, convention: str, context_tokens: int) -> int:
    """FLOPs per token of a module under a named convention.

    Layers and width come from a Hugging Face configuration, ``num_hidden_layers``, ``num_attention_heads`` and
    ``head_dim`` or ``hidden_size``, of the module or of one inside of it.

    Args:
        module: may be sharded, see :func:`~lightning_mp.modules.whole_parameters.whole_parameters`.
        convention: a name from :data:`~lightning_mp.flops.conventions.CONVENTIONS`.
        context_tokens: sequence length.

    Raises:
        ValueError: the convention is unknown, or asks for a shape that the module does not tell.
    """
    if convention not in CONVENTIONS:
        raise ValueError(f"Unknown FLOPs convention {convention!r}. Use one of {', '.join(CONVENTIONS)}, or 'exact'.")
    weights = matmul_parameters(module)
    if CONVENTIONS[convention].attention is None:
        return flops_per_token(weights.total, convention=convention, frozen_parameters=weights.frozen)
    layers, width = _layers_and_width(module, convention)
    return flops_per_token(
        weights.total,
        layers=layers,
        width=width,
        context_tokens=context_tokens,
        convention=convention,
        frozen_parameters=weights.frozen,
    )


def _layers_and_width(module: nn.Module, convention: str) -> tuple[int, int]:
    for part in module.modules():
        config = getattr(part, "config", None)
        layers = getattr(config, "num_hidden_layers", None)
        heads = getattr(config, "num_attention_heads", None)
        hidden = getattr(config, "hidden_size", None)
        if layers and heads and hidden:
            head_size = getattr(config, "head_dim", None) or hidden // heads
            return int(layers), int(heads * head_size)
    raise ValueError(
        f"The {convention!r} convention needs the number of layers and the attention width, and this module has no"
        " Hugging Face configuration that tells them. Give the number itself, flops_per_token(N, layers=..., width=...,"
        f" context_tokens=..., convention={convention!r}), or 'exact'."
    )
