"""Which parameters are hidden matrices, for Muon, and which are the rest."""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from torch import nn

from lightning_mp.core.messages import listed

Named = list[tuple[str, nn.Parameter]]

# Names of output layers in nanoGPT, torchtitan, litgpt, timm, torchvision and transformers.
_HEADS = {"lm_head", "head", "heads", "output", "classifier", "score", "unembed", "embed_out", "output_layer", "fc_out"}


class MatricesAndRest(NamedTuple):
    """Trainable parameters with their names, as ``torch.optim`` takes them."""

    matrices: Named
    rest: Named


def matrices_and_rest(module: nn.Module, *, matrices: Sequence[str] = (), rest: Sequence[str] = ()) -> MatricesAndRest:
    """Splits a module's trainable parameters into hidden matrices and the rest.

    Follows Muon's author and the projects that use it: matrices that act between hidden layers are orthogonalised;
    embeddings, output layers, norms and biases go to AdamW (Jordan et al. 2024, "Muon: An optimizer for hidden layers
    in neural networks"). A parameter is a hidden matrix if it has two axes, unless

    - it belongs to an ``nn.Embedding``, even if a head shares it;
    - its name is that of an output layer (``lm_head``, ``head``, ``output``, ``classifier``, ...) outside numbered
      blocks;
    - no parameter has such a name, and it is the weight of the last ``nn.Linear``.

    Convolution kernels have more than two axes and are part of the rest: ``torch.optim.Muon`` takes matrices only.

    Args:
        module: the module that is trained.
        matrices: glob patterns of names to treat as matrices regardless of the rule.
        rest: glob patterns of names to treat as the rest regardless of the rule.

    Returns:
        ``(matrices, rest)``, each a list of ``(name, parameter)``. Both name every parameter once, tied ones by their
        first name; frozen ones are left out.

    Raises:
        ValueError: if a pattern matches no trainable parameter, if one name is matched by both, or if ``matrices``
            names a parameter that does not have two axes.

    Example:
        >>> net = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 10))
        >>> split = matrices_and_rest(net)
        >>> [name for name, _ in split.matrices]
        ['1.weight']
    """
    trainable = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
    asked = {name for name, _ in trainable if _matches(name, matrices)}
    kept = {name for name, _ in trainable if _matches(name, rest)}
    for argument, patterns in (("matrices", matrices), ("rest", rest)):
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name, _ in trainable):
                raise ValueError(
                    f"matrices_and_rest({argument}={list(patterns)!r}): {pattern!r} matches no trainable parameter."
                    f" Their names are {listed([name for name, _ in trainable])}."
                )
    if asked & kept:
        raise ValueError(f"matrices_and_rest: {listed(sorted(asked & kept))} is named in matrices and in rest.")
    outer = _outer_weights(module)
    split = MatricesAndRest([], [])
    for name, parameter in trainable:
        if name in asked and parameter.ndim != 2:
            raise ValueError(
                f"matrices_and_rest(matrices={list(matrices)!r}): {name} has the shape {tuple(parameter.shape)}, and"
                " torch.optim.Muon takes matrices. Leave it out of the pattern."
            )
        is_hidden = parameter.ndim == 2 and id(parameter) not in outer
        chosen = name in asked or (is_hidden and name not in kept)
        (split.matrices if chosen else split.rest).append((name, parameter))
    return split


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _is_output_layer(name: str) -> bool:
    """By its name; what a numbered block calls ``output``, such as an attention's, is hidden."""
    *path, last = name.split(".")
    return last in _HEADS and not any(part.isdigit() for part in path)


def _outer_weights(module: nn.Module) -> set[int]:
    """The ids of embeddings and output layers."""
    layers = list(module.named_modules(remove_duplicate=False))
    tables = [layer for _, layer in layers if isinstance(layer, nn.Embedding | nn.EmbeddingBag)]
    embeddings = {id(parameter) for layer in tables for parameter in layer.parameters()}
    heads = {id(p) for name, layer in layers if _is_output_layer(name) for p in layer.parameters()}
    if not heads:
        linear = [layer.weight for _, layer in layers if isinstance(layer, nn.Linear)]
        heads = {id(linear[-1])} if linear else set()
    return embeddings | heads
