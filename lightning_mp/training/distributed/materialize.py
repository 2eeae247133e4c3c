"""Modules on the meta device get memory and first values, one sharding unit after the other."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn


def not_initialisable(model: nn.Module) -> list[str]:
    """Classes of modules with tensors on the meta device and without ``reset_parameters``.

    >>> not_initialisable(nn.Linear(2, 2, device="meta"))
    []
    """
    return sorted(
        {
            type(module).__name__
            for module in model.modules()
            if _meta_tensors(module) and not callable(getattr(module, "reset_parameters", None))
        }
    )


def materialise(modules: Sequence[nn.Module], device: torch.device) -> None:
    """Gives modules their memory on a device and their first values; makes all ranks start from those of rank 0.

    That is about the tensors that the modules hold themselves, not about those of their children. A tensor on the meta
    device becomes a real one, and its module's ``reset_parameters`` is called, as after ``nn.Module.to_empty``. A
    parameter that several modules share stays shared. Whole tensors exist for the modules of one call only, if their
    unit is sharded before the next call; so the peak is the largest unit and the shards.

    Random numbers are drawn as on one device, so the weights do not depend on the number of ranks.
    """
    # By identity, for the length of one call: a parameter that is sharded afterwards may leave its id to another.
    made: dict[Tensor, Tensor] = {}
    for module in modules:
        if _meta_tensors(module):
            for name, parameter in list(module.named_parameters(recurse=False)):
                if parameter.is_meta:
                    empty = torch.empty_like(parameter, device=device)
                    setattr(module, name, made.setdefault(parameter, nn.Parameter(empty, parameter.requires_grad)))
            for name, buffer in list(module.named_buffers(recurse=False)):
                if buffer.is_meta:
                    setattr(module, name, torch.empty_like(buffer, device=device))
            module.reset_parameters()  # type: ignore[operator]  # set-up has refused modules without it
    tensors = (t for module in modules for t in (*module.parameters(recurse=False), *module.buffers(recurse=False)))
    for tensor in dict.fromkeys(tensors):
        value = tensor.detach().to(device).contiguous()
        if dist.get_world_size() > 1:
            dist.broadcast(value, src=0)
        tensor.data = value


def _meta_tensors(module: nn.Module) -> bool:
    return any(t.is_meta for t in [*module.parameters(recurse=False), *module.buffers(recurse=False)])
