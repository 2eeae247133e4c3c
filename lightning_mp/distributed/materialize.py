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


class Materialiser:
    """Gives modules their memory on a device and their first values; makes all ranks start from those of rank 0.

    A tensor on the meta device becomes a real one, and its module's ``reset_parameters`` is called, as after
    ``nn.Module.to_empty``. A parameter that several modules share stays shared. Whole tensors exist for the modules of
    one call only, if their unit is sharded before the next call; so the peak is the largest unit and the shards.

    Random numbers are drawn as on one device, so the weights do not depend on the number of ranks.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __call__(self, modules: Sequence[nn.Module]) -> None:
        """Works on the tensors that the modules hold themselves, not on those of their children."""
        # By identity, for the length of one call: a parameter that is sharded afterwards may leave its id to another.
        made: dict[nn.Parameter, nn.Parameter] = {}
        sent: set[Tensor] = set()
        for module in modules:
            if _meta_tensors(module):
                self._make(module, made)
                module.reset_parameters()  # type: ignore[operator]  # set-up has refused modules without it
        for module in modules:
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                if tensor not in sent:
                    sent.add(tensor)
                    self._start_from_rank_zero(tensor)

    def _make(self, module: nn.Module, made: dict[nn.Parameter, nn.Parameter]) -> None:
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.is_meta:
                if parameter not in made:
                    empty = torch.empty_like(parameter, device=self._device)
                    made[parameter] = nn.Parameter(empty, parameter.requires_grad)
                setattr(module, name, made[parameter])
        for name, buffer in list(module.named_buffers(recurse=False)):
            if buffer.is_meta:
                setattr(module, name, torch.empty_like(buffer, device=self._device))

    def _start_from_rank_zero(self, tensor: Tensor) -> None:
        value = tensor.detach().to(self._device).contiguous()
        if dist.get_world_size() > 1:
            dist.broadcast(value, src=0)
        tensor.data = value


def _meta_tensors(module: nn.Module) -> bool:
    return any(t.is_meta for t in [*module.parameters(recurse=False), *module.buffers(recurse=False)])
