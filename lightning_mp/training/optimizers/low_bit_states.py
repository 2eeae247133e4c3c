"""Optimizer states in tensor subclasses, such as torchao's 8-bit moments, are plain tensors in checkpoints."""

from collections.abc import Sequence
from importlib import import_module
from typing import Any
from weakref import WeakSet

from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_mp.ground.core import private_optimizer_api
from lightning_mp.training.optimizers.parts import parts_of

_CLASS = "tensor_subclass"
_hooked: "WeakSet[Optimizer]" = WeakSet()


def refuse_whole_checkpoints(optimizers: Sequence[Optimizer], strategy: str) -> None:
    """Refuses torchao's optimizers where sharded states are to be saved as whole ones: their blocks cannot be joined.

    Raises:
        MisconfigurationException: names the optimizer.
    """
    for optimizer in (part for each in optimizers for part in _parts_of_torchao(each)):
        raise MisconfigurationException(
            f"{strategy}(save_distributed_checkpoint=False) cannot save the quantised state of torchao's"
            f" {type(optimizer).__name__} as one file. Use save_distributed_checkpoint=True, which resumes on any"
            " number of ranks."
        )


def save_plain_tensors(optimizer: Optimizer) -> None:
    """Has an optimizer of torchao save its tensor subclasses as the plain tensors in them, and load them again.

    Lightning reads checkpoints with a function as ``map_location``, which torch refuses for subclasses, up to 2.15 at
    least (``torch._utils._get_restore_location``; not reported). Where the state is sharded, its DTensors stay what
    they are. The hooks stay on the optimizer, for a checkpoint that is written after the fit.
    """
    if optimizer in _hooked or not _parts_of_torchao(optimizer):
        return
    _hooked.add(optimizer)
    private_optimizer_api.make_room_for_hooks(optimizer)
    optimizer.register_state_dict_post_hook(_save)
    optimizer.register_load_state_dict_pre_hook(_load)


def _parts_of_torchao(optimizer: Optimizer) -> list[Optimizer]:
    """The optimizer, or those in a joint one, whose class or a base of it is torchao's."""
    return [
        part
        for part in parts_of(optimizer)
        if any(kind.__module__.startswith("torchao.optim") for kind in type(part).__mro__)
    ]


def _save(_: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    return {**state_dict, "state": to_plain_tensors(state_dict["state"])}


def _load(_: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    return {**state_dict, "state": from_plain_tensors(state_dict["state"])}


def to_plain_tensors(value: Any) -> Any:
    """A piece of optimizer state with subclasses that are made of plain tensors taken apart.

    Example:
        >>> import torch
        >>> state = {0: {"step": torch.tensor(1.0)}}
        >>> to_plain_tensors(state)
        {0: {'step': tensor(1.)}}
    """
    if isinstance(value, Tensor):
        if isinstance(value, DTensor) or not hasattr(value, "__tensor_flatten__"):
            return value
        names, attributes = value.__tensor_flatten__()
        return {
            _CLASS: f"{type(value).__module__}.{type(value).__qualname__}",
            "tensors": {name: to_plain_tensors(getattr(value, name)) for name in names},
            "attributes": attributes,
            "size": tuple(value.shape),
            "stride": value.stride(),
        }
    if type(value) is dict:
        return {key: to_plain_tensors(entry) for key, entry in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(to_plain_tensors, value))
    return value


def from_plain_tensors(value: Any) -> Any:
    """The inverse of :func:`to_plain_tensors`."""
    if type(value) is dict:
        if _CLASS in value:
            tensors = {name: from_plain_tensors(entry) for name, entry in value["tensors"].items()}
            kind = _subclass(value[_CLASS])
            return kind.__tensor_unflatten__(tensors, value["attributes"], value["size"], value["stride"])
        return {key: from_plain_tensors(entry) for key, entry in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(from_plain_tensors, value))
    return value


def _subclass(path: str) -> Any:
    module, _, name = path.rpartition(".")
    kind = getattr(import_module(module), name, None) if module.startswith("torchao.") else None
    if not (isinstance(kind, type) and issubclass(kind, Tensor)):
        raise ValueError(
            f"The checkpoint holds optimizer states of {path!r}, which is no tensor class of torchao. Resume with the"
            " torchao that wrote it, or load the weights alone: MyModule.load_from_checkpoint(path)."
        )
    return kind
