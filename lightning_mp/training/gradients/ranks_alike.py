"""Checks during one ``fit`` that ranks run the same layers and reduce the same gradients."""

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self
from weakref import WeakSet
from zlib import crc32

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_mp.ground.core import private_sharding_api
from lightning_mp.ground.core.host_copy import HostCopy
from lightning_mp.ground.core.messages import listed
from lightning_mp.ground.core.patches import Patch, Patches
from lightning_mp.ground.core.ranks import world_size
from lightning_mp.ground.core.run_state import RunState


@dataclass
class _Together:
    """What the ranks of one mesh gather and reduce together."""

    groups: Sequence[dist.ProcessGroup | None]  # over which they compare, one after another; None for all ranks
    parameters: set[int] = field(default_factory=set)  # ids of the sharded parameters
    # indices of the units that this rank has gathered since the last step, in order
    gathered: list[int] = field(default_factory=list)
    compared: list[int] = field(default_factory=list)
    on_its_way: HostCopy | None = None


class AgreedUnits:
    """Sees which units this rank gathers and which parameters get gradients; before each step ranks compare the two.

    A unit's weights are gathered by all ranks of its mesh together, and collective operations have no names: where one
    rank gathers a unit and another rank one of the same size, each gets what the other has sent, and no error. The same
    holds for the reduction of a unit in which ranks have gradients for different parameters.

    Ranks compare by one reduction of two numbers per optimizer step, largest and smallest checksum; where units lie on
    several meshes (experts, copies beside tensor parallelism), by one for each dimension of each mesh. On a CPU the
    answer is there before the step is made. Elsewhere it is read at the next step, so that nothing waits for the
    device, and before the optimizer's state goes into a checkpoint.
    """

    def __init__(self, model: nn.Module, device: torch.device, *, waits: bool | None = None) -> None:
        self._device = device
        self._waits = device.type == "cpu" if waits is None else waits
        self._names: list[str] = []
        self._by_ranks: dict[tuple[int, ...], _Together] = {}
        self._cleanups: list[Callable[[], Any]] = []
        self._attached: WeakSet[Optimizer] = WeakSet()
        seen: set[int] = set()
        for name, module in model.named_modules():
            if isinstance(module, FullyShardedDataParallel):
                note = self._note(name, self._on(None))
                self._cleanups.append(module.register_forward_pre_hook(note).remove)
            elif isinstance(module, FSDPModule):
                for group in private_sharding_api.sharding_groups(module):
                    mesh = private_sharding_api.sharding_mesh(group)
                    if id(group) in seen or mesh.size() == 1:
                        continue
                    seen.add(id(group))
                    together = self._on(mesh)
                    together.parameters.update(map(id, private_sharding_api.sharded_parameters(group)))
                    note = self._note(name, together)
                    self._cleanups.append(private_sharding_api.before_each_gather(group, note))

    @classmethod
    def of(cls, model: nn.Module, optimizers: Sequence[Optimizer], device: torch.device) -> Self | None:
        """Watches a model that FSDP shards over several ranks; None for any other."""
        if world_size() == 1:
            return None
        if not any(isinstance(module, FSDPModule | FullyShardedDataParallel) for module in model.modules()):
            return None
        watching = cls(model, device)
        return watching.attach(optimizers) if watching._by_ranks else None

    def attach(self, optimizers: Sequence[Optimizer]) -> Self:
        """Settles before the state of these goes into a checkpoint."""
        for optimizer in optimizers:
            if optimizer not in self._attached:
                self._attached.add(optimizer)
                self._cleanups.append(optimizer.register_state_dict_pre_hook(lambda _: self.flush_pending()).remove)
        return self

    def detach(self) -> None:
        """Stops watching."""
        for undo in self._cleanups:
            undo()
        self._cleanups = []

    def compare(self, optimizer: Optimizer) -> None:
        """Compares what this rank has run since the last time; called on all ranks when the gradients are there."""
        self.flush_pending()
        self.attach([optimizer])  # it may have been made inside of the fit
        with_gradient = [id(p) for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        numbers = {id(p): n for n, p in enumerate(p for group in optimizer.param_groups for p in group["params"])}
        for together in self._by_ranks.values():
            trained = array("l", (numbers[i] for i in with_gradient if i in together.parameters))
            checksum = crc32(trained, crc32(array("l", together.gathered)))
            together.compared, together.gathered[:] = list(together.gathered), []
            # `full` is a kernel; `torch.tensor(..., device=...)` would make the host wait for the device.
            # The smallest checksum is minus the largest of the negatives: one reduction gives both.
            both = torch.stack([self._number(checksum), self._number(-checksum)])
            for ranks in together.groups:
                dist.all_reduce(both, op=dist.ReduceOp.MAX, group=ranks)
            together.on_its_way = HostCopy(both)
        if self._waits:
            self.flush_pending()

    def flush_pending(self) -> None:
        """Reads the last comparison."""
        different = None
        for together in self._by_ranks.values():
            on_its_way, together.on_its_way = together.on_its_way, None
            if on_its_way is not None:
                largest, smallest = on_its_way.read()
                if largest != -smallest:
                    different = different or together
        if different is not None:
            raise MisconfigurationException(self._difference(different.compared))

    def _on(self, mesh: DeviceMesh | None) -> _Together:
        """The units on the ranks of a mesh; None for all ranks."""
        everybody = tuple(range(dist.get_world_size()))
        ranks = everybody if mesh is None else tuple(mesh.mesh.flatten().tolist())
        if ranks not in self._by_ranks:
            groups = [None] if mesh is None or len(ranks) == len(everybody) else mesh.get_all_groups()
            self._by_ranks[ranks] = _Together(groups)
        return self._by_ranks[ranks]

    def _note(self, name: str, together: _Together) -> Callable[..., None]:
        index = len(self._names)
        self._names.append(name)
        return lambda *_: together.gathered.append(index)

    def _number(self, value: int) -> Tensor:
        return torch.full((), value, dtype=torch.int64, device=self._device)

    def _difference(self, gathered: Sequence[int]) -> str:
        ran = list(dict.fromkeys(self._names[index] or "the model itself" for index in gathered))
        return (
            "FSDP: ranks ran different layers, or have gradients for different parameters. Rank"
            f" {dist.get_rank()} ran {listed(ran) or 'none'}. Choose layers from values that are equal on all ranks, or"
            " run all and multiply unwanted outputs by 0, or use strategy='ddp_find_unused_parameters_true'."
        )


class RankConsistencyCheck:
    """Sharded ranks run the same units; DDP reduces every parameter that is trained.

    Both are checked between the last backward of a step and the step, until the run ends. Any part of the package may
    install it; the first one counts.
    """

    def __init__(self, trainer: "pl.Trainer", optimizers: Sequence[Optimizer]) -> None:
        self._units: AgreedUnits | None = None
        self._unreduced: UnreducedParameters | None = None
        self._method: Patch | None = None
        model = trainer.strategy.model
        run = RunState.of(trainer)
        if run.find(RankConsistencyCheck) is not None or model is None:
            return
        run.keep(self)
        self._units = AgreedUnits.of(model, optimizers, trainer.strategy.root_device)
        self._unreduced = UnreducedParameters.of(model)
        if self._units is not None:
            Patches.of(trainer).at_end(self._units.detach)
        if self._units is not None or self._unreduced is not None:
            self._method = Patches.of(trainer).replace(trainer.strategy, "optimizer_step", self._optimizer_step)

    def flush_pending(self) -> None:
        """Reads the last comparison; raises if ranks differed."""
        if self._units is not None:
            self._units.flush_pending()

    def _optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], *others: Any, **named: Any) -> Any:
        assert self._method is not None

        def closure_then_inspect() -> Any:
            result = closure()
            if self._units is not None:
                self._units.compare(optimizer)
            if self._unreduced is not None:
                self._unreduced.check(optimizer)
            return result

        return self._method.original(optimizer, closure_then_inspect, *others, **named)


class UnreducedParameters:
    """Refuses the first step of an optimizer that would train such a parameter."""

    def __init__(self, frozen: Mapping[nn.Parameter, str]) -> None:
        self._frozen = frozen

    @classmethod
    def of(cls, model: nn.Module) -> Self | None:
        """Watches a model right after DDP has wrapped it; None if DDP reduces all of it, or is not used."""
        if not isinstance(model, DistributedDataParallel):
            return None
        known = {n: p for n, p in model.module.named_parameters() if n not in model.parameters_to_ignore}
        frozen = {parameter: name for name, parameter in known.items() if not parameter.requires_grad}
        if not frozen or len(known) - len(frozen) != private_sharding_api.number_reduced_by_ddp(model):
            return None  # or it was frozen after DDP has counted it
        return cls(frozen)

    def check(self, optimizer: Optimizer) -> None:
        """To be called before a step."""
        unfrozen = {parameter: name for parameter, name in self._frozen.items() if parameter.requires_grad}
        if not unfrozen:
            return
        trained = [unfrozen[p] for group in optimizer.param_groups for p in group["params"] if p in unfrozen]
        if trained:
            raise MisconfigurationException(
                f"DDP does not reduce {listed(trained)}, which were frozen when it was set up, so ranks would drift"
                " apart. Freeze them in on_train_start under strategy='ddp_find_unused_parameters_true', unfreeze them"
                " before a second fit, or use strategy=FSDP2Strategy()."
            )
