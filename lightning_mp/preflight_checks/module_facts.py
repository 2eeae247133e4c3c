"""What a preflight reads off a module: its parameters, the sizes of its products, its norms, its own scalers."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_mp.modules.names import named_modules
from lightning_mp.modules.norms import BATCH_NORMS
from lightning_mp.preflight_checks.found import FoundLayer, FoundWeight


def weights_of(module: nn.Module) -> tuple[FoundWeight, ...]:
    """Every parameter once.

    >>> net = nn.Sequential(nn.Embedding(4, 2), nn.Linear(2, 4, bias=False))
    >>> net[1].weight = net[0].weight
    >>> [weight.names for weight in weights_of(net)]
    [('0.weight', '1.weight')]
    """
    names: dict[Tensor, list[str]] = {}
    for owner, part in named_modules(module):
        for name, parameter in part.named_parameters(recurse=False):
            names.setdefault(parameter, []).append(f"{owner}.{name}".lstrip("."))
    return tuple(
        FoundWeight(
            names=tuple(own),
            dtype=str(parameter.dtype).removeprefix("torch."),
            elements=0 if nn.parameter.is_lazy(parameter) else parameter.numel(),
            is_trainable=parameter.requires_grad,
            memory=_address(parameter),
        )
        for parameter, own in names.items()
    )


def _address(parameter: Tensor) -> int | None:
    """Where its numbers begin; None for fake tensors, and for parts of flat buffers."""
    if type(parameter) is not nn.Parameter or parameter.device.type == "meta" or not parameter.numel():
        return None
    return parameter.data_ptr() or None


def seen_in_a_step(
    weights: tuple[FoundWeight, ...], optimized: frozenset[str], with_gradient: frozenset[str] | None
) -> tuple[FoundWeight, ...]:
    """The same weights, with what a step has shown of them."""
    return tuple(
        replace(
            weight,
            is_optimized=not optimized.isdisjoint(weight.names),
            has_gradient=None if with_gradient is None else not with_gradient.isdisjoint(weight.names),
        )
        for weight in weights
    )


def layers_of(module: nn.Module) -> tuple[FoundLayer, ...]:
    """Layers that multiply matrices, and norms with running statistics.

    >>> [(layer.name, layer.sizes) for layer in layers_of(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()))]
    [('0', (('in_channels', 3), ('out_channels', 8)))]
    """
    found: dict[int, FoundLayer] = {}
    for name, part in named_modules(module):
        sizes = tuple(_sizes(part))
        learns = isinstance(part, BATCH_NORMS) and part.training and part.track_running_stats
        if sizes or learns:
            own = list(part.parameters(recurse=False))
            frozen = bool(own) and not any(parameter.requires_grad for parameter in own)
            found.setdefault(
                id(part), FoundLayer(name=name, sizes=sizes, learns_statistics=bool(learns), is_frozen=frozen)
            )
    return tuple(found.values())


def _sizes(part: nn.Module) -> Iterator[tuple[str, int]]:
    if isinstance(part, nn.Linear):
        yield from (("in_features", part.in_features), ("out_features", part.out_features))
    elif isinstance(part, nn.Conv1d | nn.Conv2d | nn.Conv3d) and part.groups == 1:
        yield from (("in_channels", part.in_channels), ("out_channels", part.out_channels))
    elif isinstance(part, nn.MultiheadAttention):
        yield from (("embed_dim", part.embed_dim), ("head_dim", part.head_dim))
    elif type(part).__name__ == "Conv1D":  # GPT-2's linear layer in transformers, with a transposed weight
        rows, columns = part.get_parameter("weight").shape
        yield from (("in_features", rows), ("out_features", columns))


def own_scalers(module: nn.Module) -> tuple[str, ...]:
    """Names of attributes that are enabled gradient scalers."""
    return tuple(
        f"{owner}.{name}".lstrip(".")
        for owner, part in named_modules(module)
        for name, value in vars(part).items()
        if isinstance(value, torch.amp.GradScaler) and value.is_enabled()
    )


def untied_embeddings(module: nn.Module) -> tuple[str, ...]:
    """Of Hugging Face models whose config ties embeddings: those that are not."""
    found = []
    for name, part in named_modules(module):
        if "PreTrainedModel" not in {cls.__name__ for cls in type(part).__mro__}:
            continue
        owner: Any = part
        if not _requests_tied(owner):
            continue
        first, last = owner.get_input_embeddings(), owner.get_output_embeddings()
        if last is not None and first is not None and first.weight is not last.weight:
            found.append(f"input and output embeddings of {name or type(part).__name__}")
    return tuple(found)


def _requests_tied(model: Any) -> bool:
    config = model.config
    settings: Mapping[str, Any] = config.to_dict() if hasattr(config, "to_dict") else {}
    return bool(settings.get("tie_word_embeddings", False)) and hasattr(model, "get_output_embeddings")
