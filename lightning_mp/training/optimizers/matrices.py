"""Which parameters are hidden matrices, for Muon, and which are the rest."""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple, overload

from lightning.fabric.utilities.rank_zero import rank_zero_info
from torch import nn

from lightning_mp.ground.core.messages import listed
from lightning_mp.training.checkpoints.fused_qkv import fused_orders
from lightning_mp.training.optimizers.fused_layers import Parts, known_splits, sounds_fused
from lightning_mp.training.optimizers.matrix_blocks import BLOCKS, Blocks, blocks_of

Named = list[tuple[str, nn.Parameter]]

# A linear layer of transformers whose weight is [inputs, outputs].
_CONV1D = ("transformers.pytorch_utils", "Conv1D")

# Names of output layers in nanoGPT, torchtitan, litgpt, timm, torchvision and transformers.
_HEADS = {"lm_head", "head", "heads", "output", "classifier", "score", "unembed", "embed_out", "output_layer", "fc_out"}


class MatricesAndRest(NamedTuple):
    """Trainable parameters with their names, as ``torch.optim`` takes them."""

    matrices: Named
    rest: Named


class GroupsAndRest(NamedTuple):
    """The same, with the matrices in parameter groups: those with the same split into blocks share one."""

    matrices: list[dict[str, Any]]
    rest: Named


@overload
def matrices_and_rest(
    module: nn.Module, *, matrices: Sequence[str] = (), rest: Sequence[str] = (), split: None = None
) -> MatricesAndRest: ...


@overload
def matrices_and_rest(
    module: nn.Module,
    *,
    matrices: Sequence[str] = (),
    rest: Sequence[str] = (),
    split: Mapping[str, int | Sequence[int]] | Literal["auto"],
) -> GroupsAndRest: ...


def matrices_and_rest(
    module: nn.Module,
    *,
    matrices: Sequence[str] = (),
    rest: Sequence[str] = (),
    split: Mapping[str, int | Sequence[int]] | Literal["auto"] | None = None,
) -> MatricesAndRest | GroupsAndRest:
    """Splits a module's trainable parameters into hidden matrices and the rest.

    Follows Muon's author and the projects that use it: matrices that act between hidden layers are orthogonalised;
    embeddings, output layers, norms and biases go to AdamW (Jordan et al. 2024, "Muon: An optimizer for hidden layers
    in neural networks"). A parameter is a hidden matrix if it has two axes, unless

    - it belongs to an ``nn.Embedding``, even if a head shares it;
    - its name is that of an output layer (``lm_head``, ``head``, ``output``, ``classifier``, ...) outside numbered
      blocks;
    - no parameter has such a name, and it is the weight of the last ``nn.Linear``.

    Convolution kernels have more than two axes and are part of the rest: ``torch.optim.Muon`` takes matrices only.

    A weight that holds several matrices, such as fused queries, keys and values, can be orthogonalised block by block
    (``muon_split_qkv`` of Megatron-LM, ``split_sizes`` of dion): ``split={"*.query_key_value": 3}``. The result is, to
    the bit, that of a module with one weight for each block. Give the matrices to a ``torch.optim.Muon`` inside of a
    :class:`~lightning_mp.JointOptimizer`; Muon by itself does not know blocks. ``split="auto"`` divides the weights of
    ``nn.MultiheadAttention``, of the demo's GPT and of GPT-2, GPT-NeoX, BLOOM and Phi-3 in transformers. Of other
    classes with a weight of a name such as ``qkv`` a line says that it is orthogonalised as one: names do not say how
    it divides.

    Args:
        module: the module that is trained, sharded already if it will be.
        matrices: glob patterns of names to treat as matrices regardless of the rule.
        rest: glob patterns of names to treat as the rest regardless of the rule.
        split: "auto", or glob patterns of the names of matrices, or of the layers whose weight they are, and how their
            outputs divide into blocks: the number of equal blocks, or the outputs of each. Sizes whose sum is a
            divisor of the outputs are repeated, and all first ones are one block: ``(64, 64, 64)`` for layers of
            transformers in which each head of width 64 has its query, key and value side by side (GPT-NeoX, BLOOM).

    Returns:
        ``(matrices, rest)``, each a list of ``(name, parameter)``. Both name every parameter once, tied ones by their
        first name; frozen ones are left out. With ``split`` the matrices are a list of parameter groups.

    Raises:
        ValueError: if a pattern matches no trainable parameter, if one name is matched by both, if ``matrices``
            names a parameter that does not have two axes, or ``split`` one that is no matrix or does not divide so, or
            is another word than "auto".

    Example:
        >>> net = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 10))
        >>> [name for name, _ in matrices_and_rest(net).matrices]
        ['1.weight']
        >>> groups, _ = matrices_and_rest(net, split={"1": 2})
        >>> [[name for name, _ in group["params"]] for group in groups]
        [['1.weight']]
    """
    trainable = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
    requested = {name for name, _ in trainable if _matches(name, matrices)}
    kept = {name for name, _ in trainable if _matches(name, rest)}
    for argument, patterns in (("matrices", matrices), ("rest", rest)):
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name, _ in trainable):
                raise ValueError(
                    f"matrices_and_rest({argument}={list(patterns)!r}): {pattern!r} matches no trainable parameter."
                    f" Their names are {listed([name for name, _ in trainable])}."
                )
    if requested & kept:
        raise ValueError(f"matrices_and_rest: {listed(sorted(requested & kept))} is named in matrices and in rest.")
    outer = _outer_weights(module)
    found = MatricesAndRest([], [])
    for name, parameter in trainable:
        if name in requested and parameter.ndim != 2:
            raise ValueError(
                f"matrices_and_rest(matrices={list(matrices)!r}): {name} has the shape {tuple(parameter.shape)}, and"
                " torch.optim.Muon takes matrices. Leave it out of the pattern."
            )
        is_hidden = parameter.ndim == 2 and id(parameter) not in outer
        chosen = name in requested or (is_hidden and name not in kept)
        (found.matrices if chosen else found.rest).append((name, parameter))
    return found if split is None else GroupsAndRest(_groups(module, found.matrices, split), found.rest)


def _groups(module: nn.Module, matrices: Named, split: Mapping[str, Parts] | Literal["auto"]) -> list[dict[str, Any]]:
    """One parameter group for each way of splitting that occurs."""
    parts = _known(module, matrices) if split == "auto" else _matched(matrices, split)
    orders, groups = fused_orders(module), dict[Blocks | None, Named]()
    for name, parameter in matrices:
        way = None
        if name in parts:
            layer = type(module.get_submodule(name.rpartition(".")[0]))
            dim = int((layer.__module__, layer.__qualname__) == _CONV1D)
            try:
                way = blocks_of(parameter.shape[dim], parts[name], dim, orders.get(name))
            except ValueError as error:
                raise ValueError(f"matrices_and_rest(split={split!r}): {name} has {error}") from None
        groups.setdefault(way, []).append((name, parameter))
    return [{"params": named, **({} if way is None else {BLOCKS: way})} for way, named in groups.items()]


def _matched(matrices: Named, split: Mapping[str, Parts]) -> dict[str, Parts]:
    """How the matrices that patterns match divide, by name."""
    given: object = split
    if isinstance(given, str):
        raise ValueError(f"matrices_and_rest(split={split!r}): give 'auto', or patterns: {{'*.query_key_value': 3}}.")
    found: dict[str, Parts] = {}
    for pattern, parts in split.items():
        matched = [n for n, _ in matrices if fnmatchcase(n, pattern) or fnmatchcase(n.rpartition(".")[0], pattern)]
        if not matched:
            raise ValueError(
                f"matrices_and_rest(split={dict(split)!r}): {pattern!r} matches no matrix, nor a layer whose weight is"
                f" one. The names of the matrices are {listed([name for name, _ in matrices])}."
            )
        twice = [name for name in matched if name in found]
        if twice:
            raise ValueError(f"matrices_and_rest(split={dict(split)!r}): two patterns match {twice[0]}. Leave one out.")
        found.update(dict.fromkeys(matched, parts))
    return found


def _known(module: nn.Module, matrices: Named) -> dict[str, Parts]:
    """How the matrices of known classes divide, by name. Says which others may hold several matrices."""
    known = known_splits(module)
    others = [name for name, _ in matrices if name not in known and sounds_fused(name)]
    if others:
        rank_zero_info(
            f"matrices_and_rest(split='auto'): how {listed(others)} {'divide' if len(others) > 1 else 'divides'} is not"
            " known of the class, so Muon orthogonalises each weight as one matrix. If it holds several, say how its"
            f" outputs divide: split={{'*{others[0].removesuffix('.weight').rpartition('.')[2]}*': 3}}."
        )
    return known


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
