"""Modules of other stages: taken out of the model, with something in their place that says where they are."""

from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_mp.ground.modules.names import named_modules

#: Attribute of a model that was split.
_SPLIT = "pipeline_split"


@dataclass(frozen=True)
class StageSplit:
    """How a model was split."""

    stage: int  # this rank's
    first_layers: tuple[int, ...]  # index of the first layer of each stage
    layer_names: tuple[str, ...]  # of the whole model, in order
    layer_parameters: tuple[int, ...]  # how many parameters each layer has
    state_names: tuple[str, ...]  # keys of the whole model's state dict, in order
    parameter_names: tuple[str, ...]  # of the whole model, in order, each parameter once
    stages_of_parameters: Mapping[str, tuple[int, ...]]  # of each parameter that several stages hold, those stages
    names_of: Mapping[str, tuple[str, ...]]  # all names of such a parameter. In both, the key is its first name

    @property
    def stages(self) -> int:
        """How many there are."""
        return len(self.first_layers)


class StagePlaceholder(nn.Module):
    """Replaces a module of another stage. It has no parameters, and calling it is an error."""

    def __init__(self, name: str, stages: Sequence[int], split: StageSplit, meta_module: nn.Module) -> None:
        super().__init__()
        # Past nn.Module's own __setattr__, which would make the meta_module a part of the model.
        self.__dict__["_placed"] = (name, tuple(stages), split, meta_module)

    @property
    def meta_module(self) -> nn.Module:
        """The module whose place this is, without memory."""
        meta_module: nn.Module = self.__dict__["_placed"][3]
        return meta_module

    def _where(self) -> str:
        name, stages, split, _ = self.__dict__["_placed"]
        return (
            f"{name} is on stage {', '.join(map(str, stages))} of the pipeline, and this rank has stage {split.stage}."
            " Call lightning_mp.pipelining.pipelined_loss(self, batch), which runs all layers; use weights of all"
            " stages before trainer.fit or from a checkpoint."
        )

    @override
    def forward(self, *_: Any, **__: Any) -> NoReturn:
        """Raises, and names the stage that has the module."""
        raise RuntimeError(self._where())

    @override
    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            raise AttributeError(
                f"{name!r} was requested from a module that is not on this rank: {self._where()}"
            ) from None

    @override
    def extra_repr(self) -> str:
        """The class of the module, and its stage."""
        _, stages, _, meta_module = self.__dict__["_placed"]
        return f"{type(meta_module).__name__}, stage {', '.join(map(str, stages))}"


def detach_stages(model: nn.Module, absent: Mapping[str, Sequence[int]], split: StageSplit) -> None:
    """Frees modules that other stages hold, and leaves an :class:`StagePlaceholder` in each of their places.

    A parameter that they share with a module that stays keeps its memory.
    """
    modules = dict(named_modules(model))
    taken = {id(modules[name]): StagePlaceholder(name, stages, split, modules[name]) for name, stages in absent.items()}
    for place in list(_places(model)):
        if id(place.child) in taken:
            setattr(place.parent, place.name, taken[id(place.child)])
    kept = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    for placeholder in taken.values():
        release(placeholder.meta_module, kept)
    if split.stages > 1:
        vars(model)[_SPLIT] = split  # not in a placeholder: a stage has none if the others run functions only


def release(module: nn.Module, kept: Container[int]) -> None:
    """Frees the memory of a module's tensors and keeps their shapes."""
    for tensor in (*module.parameters(), *module.buffers()):
        if id(tensor) not in kept:
            tensor.data = _without_memory(tensor)
            tensor.grad = None


@contextmanager
def full_model(model: nn.Module) -> Iterator[None]:
    """Inside, the modules of other stages are in their places, with shapes and names, and without memory or values.

    For code that makes something of all parameters, as ``configure_optimizers`` does.
    """
    out = [place for place in _places(model) if isinstance(place.child, StagePlaceholder)]
    for place in out:
        assert isinstance(place.child, StagePlaceholder)
        setattr(place.parent, place.name, place.child.meta_module)
    try:
        yield
    finally:
        for place in out:
            setattr(place.parent, place.name, place.child)


def stage_split_of(model: nn.Module) -> StageSplit | None:
    """How a model was split; None if it is whole."""
    split: StageSplit | None = vars(model).get(_SPLIT)
    return split


class _Place(NamedTuple):
    parent: nn.Module
    name: str
    child: nn.Module


def _places(model: nn.Module) -> Iterator[_Place]:
    """Every place of every module, also of those that have several."""
    for full_name, child in list(model.named_modules(remove_duplicate=False)):
        parent, _, name = full_name.rpartition(".")
        if full_name:
            yield _Place(model.get_submodule(parent), name, child)


def _without_memory(tensor: Tensor) -> Tensor:
    # On the CPU, not on "meta", which fused optimizers refuse.
    return torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)
