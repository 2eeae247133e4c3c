"""What a LightningModule says about itself for pipeline parallelism: its layers in order, its input and its loss."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, cast

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from lightning_mp.ground.core.messages import listed
from lightning_mp.ground.core.settings_repr import SettingsRepr
from lightning_mp.ground.modules.names import is_inside, near_misses, unwrapped_name

_HOW = (
    " Define `def pipeline_layers(self): return [self.embedding, *self.blocks, self.head]`: modules that run one after"
    " the other, each on what the one before returned; names of modules or globs over them ('blocks.*') also work,"
    " and lightning_mp.pipelining.PipelineLayer(function, *modules) where there is code between modules."
)


class PipelineLayer(SettingsRepr):
    """A pipeline layer that is not a single module: a function, and the modules that it uses.

    Args:
        function: called with the output of the previous layer and with the microbatch, which every stage has; so masks
            and positions need not be sent from stage to stage. It returns a tensor or a tuple of tensors.
        modules: the modules whose parameters and buffers it uses.

    Example:
        A model that adds positions between its embedding and its blocks:

        >>> import torch
        >>> from torch import nn
        >>> tokens, positions = nn.Embedding(10, 4), nn.Embedding(6, 4)
        >>> def embed(ids, batch):
        ...     return tokens(ids) + positions.weight[: ids.shape[1]]
        >>> layer = PipelineLayer(embed, tokens, positions)
        >>> layer.function(torch.zeros(2, 6, dtype=torch.int64), None).shape
        torch.Size([2, 6, 4])
    """

    def __init__(self, function: Callable[[Any, Any], Any], *modules: nn.Module) -> None:
        if not callable(function) or isinstance(function, nn.Module):
            raise ValueError(
                f"PipelineLayer({function!r}): the first argument must be a function of (hidden, batch); a module is a"
                " layer by itself."
            )
        if not all(isinstance(module, nn.Module) for module in modules):
            raise ValueError("PipelineLayer(function, *modules): after the function come the modules that it uses.")
        self.function = function
        self.modules = modules


@dataclass(frozen=True)
class Layer:
    """A layer as it was found in the model."""

    name: str  # of its first module, or a number where it has none
    module_names: tuple[str, ...]  # full names of its modules
    call: Callable[[Any, Any], Any]  # from (hidden, batch) to hidden


def read_layers(module: nn.Module) -> list[Layer]:
    """The layers of a module, from its ``pipeline_layers``."""
    declared = getattr(module, "pipeline_layers", None)
    declared = declared() if callable(declared) else declared
    is_sequence = isinstance(declared, nn.Sequential | nn.ModuleList)
    if not is_sequence and (not isinstance(declared, Iterable) or isinstance(declared, str | nn.Module)):
        raise MisconfigurationException(
            f"{type(module).__name__} does not say what its layers are: pipeline_layers is {declared!r}.{_HOW}"
        )
    parts = _named_parts(module)
    layers: list[Layer] = []
    for position, entry in enumerate(cast(Iterable[Any], declared)):
        layers.extend(_read(entry, position, module, parts))
    if not layers:
        raise MisconfigurationException(f"{type(module).__name__}.pipeline_layers is empty.{_HOW}")
    _refuse_nested(layers)
    return layers


class _Parts(NamedTuple):
    """Modules of the model, those in wrappers (torch.compile, FSDP1) as they are called: in the outermost one."""

    by_name: dict[str, nn.Module]
    name_of: dict[int, str]


def _named_parts(module: nn.Module) -> _Parts:
    parts = _Parts({}, {})
    for wrapped_name, part in module.named_modules(remove_duplicate=False):
        name = unwrapped_name(wrapped_name)
        parts.by_name.setdefault(name, part)
        parts.name_of[id(part)] = name
    return parts


def _read(entry: Any, position: int, module: nn.Module, parts: _Parts) -> list[Layer]:
    if isinstance(entry, str):
        return [Layer(name, (name,), _call_of(part)) for name, part in _fitting(module, entry, parts.by_name)]
    used = entry.modules if isinstance(entry, PipelineLayer) else (entry,)
    if not all(isinstance(part, nn.Module) for part in used):
        raise MisconfigurationException(
            f"{type(module).__name__}.pipeline_layers: entry {position} is {entry!r}, which is neither a module, nor"
            f" the name of one, nor a PipelineLayer.{_HOW}"
        )
    strangers = [type(part).__name__ for part in used if id(part) not in parts.name_of]
    if strangers:
        raise MisconfigurationException(
            f"{type(module).__name__}.pipeline_layers: entry {position} uses {listed(strangers)},"
            " which is not part of the module, so nothing would train or save it. Make it an attribute in __init__ and"
            " return that one, not a new one at each call."
        )
    own = tuple(parts.name_of[id(part)] for part in used)
    if isinstance(entry, PipelineLayer):
        return [Layer(own[0] if own else str(position), own, entry.function)]
    return [Layer(own[0], own, _call_of(entry))]


def _call_of(part: nn.Module) -> Callable[[Any, Any], Any]:
    def call(hidden: Any, batch: Any) -> Any:
        return part(*hidden) if isinstance(hidden, tuple) else part(hidden)

    return call


def _fitting(module: nn.Module, pattern: str, parts: Mapping[str, nn.Module]) -> list[tuple[str, nn.Module]]:
    found = [(name, part) for name, part in parts.items() if name and fnmatchcase(name, pattern)]
    # By names only: after the split some places hold other classes.
    # A glob also matches what is inside the modules that it matches.
    outer = [(name, part) for name, part in found if not any(is_inside(name, other) for other, _ in found)]
    if not outer:
        raise MisconfigurationException(
            f"{type(module).__name__}.pipeline_layers: {pattern!r} matches no"
            f" module.{near_misses(pattern, parts)}{_HOW}"
        )
    return outer


def _refuse_nested(layers: Iterable[Layer]) -> None:
    every = {name for layer in layers for name in layer.module_names}
    for name in sorted(every):
        inside = sorted(other for other in every if is_inside(other, name))
        if inside:
            raise MisconfigurationException(
                f"pipeline_layers: {inside[0]} is inside of {name or 'the module itself'}, and both are in layers. Name"
                " either the whole or its parts."
            )


def pipeline_input(module: nn.Module, batch: Any) -> Any:
    """What the first layer gets: ``module.pipeline_input(batch)``, or what is plain from the batch.

    Without that method it is the batch itself if it is a tensor, its first entry if it is a list or a tuple, and
    ``batch["input_ids"]`` if it is a mapping with such an entry.

    >>> import torch
    >>> pipeline_input(nn.Module(), (torch.tensor([1.0]), torch.tensor([2])))
    tensor([1.])
    """
    own = getattr(module, "pipeline_input", None)
    if own is not None:
        return own(batch)
    if isinstance(batch, Tensor):
        return batch
    if isinstance(batch, list | tuple) and batch and isinstance(batch[0], Tensor):
        return batch[0]
    if isinstance(batch, Mapping) and isinstance(batch.get("input_ids"), Tensor):
        return batch["input_ids"]
    raise MisconfigurationException(
        f"{type(module).__name__}: it is not known what part of a batch of type {type(batch).__name__!r} goes into the"
        " first layer. Define `def pipeline_input(self, batch)`, which returns it."
    )


def run_layers(layers: Iterable[Layer], hidden: Any, batch: Any) -> Any:
    """One layer after the other."""
    for layer in layers:
        hidden = layer.call(hidden, batch)
    return hidden


def loss_of(module: nn.Module, output: Any, batch: Any) -> dict[str, Tensor]:
    """What ``module.pipeline_loss(output, batch)`` returns, as a mapping with the key "loss"."""
    own = getattr(module, "pipeline_loss", None)
    if own is None:
        raise MisconfigurationException(
            f"{type(module).__name__} has no loss for its pipeline. Define `def pipeline_loss(self, output, batch)`,"
            " which takes what the last layer returns and the microbatch, and returns the mean loss, or a mapping with"
            " 'loss' and other scalars."
        )
    returned = own(output, batch)
    values = dict(returned) if isinstance(returned, Mapping) else {"loss": returned}
    wrong = [name for name, value in values.items() if isinstance(value, Tensor) and value.numel() != 1]
    if wrong or not isinstance(values.get("loss"), Tensor):
        raise MisconfigurationException(
            f"{type(module).__name__}.pipeline_loss must return a scalar tensor, or a mapping of scalars with a tensor"
            f" under 'loss'; got {listed([f'{name}: {_shown(value)}' for name, value in values.items()])}."
        )
    device = values["loss"].device
    return {
        name: value.reshape(()) if isinstance(value, Tensor) else torch.tensor(float(value), device=device)
        for name, value in values.items()
    }


def _shown(value: Any) -> str:
    return f"tensor {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
