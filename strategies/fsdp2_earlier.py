"""A model that an earlier run has sharded: whether it can continue so, and what a step that failed has left in it."""

from collections.abc import Iterator, Mapping

from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor


def check_earlier_layout(module: nn.Module, wanted: Mapping[str, int], owner: str) -> None:
    """A second run of the same module keeps its layout."""
    sizes: dict[str, int] = {}
    for parameter in module.parameters():
        if isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
            sizes.update(zip(mesh.mesh_dim_names or (), mesh.shape, strict=False))
    if not sizes.keys() & {"data_parallel", *wanted}:
        return
    for name, size in wanted.items():
        earlier = sizes.get(name, 1)
        if earlier != size:
            raise MisconfigurationException(
                f"The model is sharded already (by configure_model, or an earlier run) with {name}_size={earlier}, and"
                f" {owner} now has {name}_size={size}. Use the sizes that it was sharded with, or make a new model and"
                " load its checkpoint."
            )


def clear_failed_step(module: nn.Module) -> None:
    """Frees weights that an exception has left gathered in the middle of a forward or backward, and their gradients.

    Until torch 2.13, which has ``FSDPModule.reset_iter_state``, weights that are gathered for a whole step stay so.
    """
    for parameter in module.parameters():
        if not isinstance(parameter, DTensor):
            parameter.grad = None  # a backward that comes would add to it
    for part in _outermost_units(module):
        getattr(part, "reset_iter_state", part.reshard)()


def _outermost_units(module: nn.Module) -> Iterator[FSDPModule]:
    if isinstance(module, FSDPModule):
        yield module
        return
    for child in module.children():
        yield from _outermost_units(child)
