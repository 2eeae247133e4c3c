"""Ranks that run different sharding units get each other's weights and gradients: noticed, once per step."""

from array import array
from collections.abc import Callable, Sequence
from typing import Any, Self
from zlib import crc32

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_mp.core import private_sharding_api
from lightning_mp.core.host_copy import HostCopy
from lightning_mp.core.messages import listed

__all__ = ["AgreedUnits"]


class AgreedUnits:
    """Sees which units this rank gathers and which parameters get gradients; before each step ranks compare the two.

    A unit's weights are gathered by all ranks together, and collective operations have no names: where one rank gathers
    a unit and another rank one of the same size, each gets what the other has sent, and no error. The same holds for
    the reduction of a unit in which ranks have gradients for different parameters.

    Ranks compare by one reduction of two numbers per optimizer step, largest and smallest checksum. On a CPU the answer
    is there before the step is made. Elsewhere it is read at the next step, so that nobody waits for the device, and
    before the optimizer's state goes into a checkpoint.

    Args:
        model: as the strategy has wrapped it.
        device: of this rank.
        waits: read the answer before the step; None where that costs nothing.
    """

    def __init__(self, model: nn.Module, device: torch.device, *, waits: bool | None = None) -> None:
        self._device = device
        self._waits = device.type == "cpu" if waits is None else waits
        self._names: list[str] = []
        self._gathered: list[int] = []
        self._compared: list[int] = []
        self._on_its_way: HostCopy | None = None
        self._ends: list[Callable[[], Any]] = []
        seen: set[int] = set()
        for name, module in model.named_modules():
            if isinstance(module, FullyShardedDataParallel):
                self._ends.append(module.register_forward_pre_hook(self._note(name)).remove)
            elif isinstance(module, FSDPModule):
                for group in private_sharding_api.sharding_groups(module):
                    if id(group) not in seen:
                        seen.add(id(group))
                        self._ends.append(private_sharding_api.before_each_gather(group, self._note(name)))

    @classmethod
    def of(cls, model: nn.Module, optimizers: Sequence[Optimizer], device: torch.device) -> Self | None:
        """Watches a model that all ranks shard alike; None for any other.

        Models whose parameters lie on meshes of some ranks only, as experts do, may run other units there.
        """
        if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
            return None
        if not any(isinstance(module, FSDPModule | FullyShardedDataParallel) for module in model.modules()):
            return None
        sharded = [parameter for parameter in model.parameters() if isinstance(parameter, DTensor)]
        if any(parameter.device_mesh.size() != dist.get_world_size() for parameter in sharded):
            return None
        return cls(model, device).attach(optimizers)

    def attach(self, optimizers: Sequence[Optimizer]) -> Self:
        """Settles before the state of these goes into a checkpoint."""
        for optimizer in optimizers:
            self._ends.append(optimizer.register_state_dict_pre_hook(lambda _: self.settle()).remove)
        return self

    def detach(self) -> None:
        """Stops watching."""
        for end in self._ends:
            end()
        self._ends = []

    def compare(self, optimizer: Optimizer) -> None:
        """Compares what this rank has run since the last time; to be called on all ranks when the gradients are there.

        Raises:
            MisconfigurationException: on all ranks, if they differed now or, where nobody waits, the last time.
        """
        self.settle()
        with_gradient = [isinstance(p.grad, DTensor) for group in optimizer.param_groups for p in group["params"]]
        checksum = crc32(bytes(with_gradient), crc32(array("l", self._gathered)))
        self._compared, self._gathered = self._gathered, []
        # `full` is a kernel; `torch.tensor(..., device=...)` would make the host wait for the device.
        both = torch.stack([self._number(checksum), self._number(-checksum)])
        dist.all_reduce(both, op=dist.ReduceOp.MAX)
        self._on_its_way = HostCopy(both)
        if self._waits:
            self.settle()

    def settle(self) -> None:
        """Reads the last comparison.

        Raises:
            MisconfigurationException: on all ranks, if they differed.
        """
        on_its_way, self._on_its_way = self._on_its_way, None
        if on_its_way is None:
            return
        largest, smallest = on_its_way.read()
        if largest != -smallest:
            raise MisconfigurationException(self._difference())

    def _note(self, name: str) -> Callable[..., None]:
        index = len(self._names)
        self._names.append(name)
        return lambda *_: self._gathered.append(index)

    def _number(self, value: int) -> Tensor:
        return torch.full((), value, dtype=torch.int64, device=self._device)

    def _difference(self) -> str:
        ran = list(dict.fromkeys(self._names[index] or "the model itself" for index in self._compared))
        return (
            "Ranks have run different sharding units, or in another order, or have gradients for different parameters"
            f" inside of one. Rank {dist.get_rank()} has run {listed(ran) or 'none'}; other ranks'"
            " messages name theirs. FSDP gathers and reduces a unit on all ranks together, so each rank has got weights"
            " and gradients of other units than it asked for, and the losses of this step are wrong. Let every rank run"
            " the same layers in every micro-batch: decide (experts, dropped layers, tasks) by what all ranks know"
            " alike, or run all of them and multiply what is not wanted by 0. Or keep the whole model on every rank:"
            " strategy='ddp_find_unused_parameters_true'."
        )
