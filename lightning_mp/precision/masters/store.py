"""fp32 master weights of 16-bit parameters: where they are kept, and which of the two is right when they differ."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_mp.core import private_api
from lightning_mp.core.precisions import HALF_DTYPES
from lightning_mp.gradients.gradient_ops import local_shard
from lightning_mp.precision.masters.bf16_remainder import (
    RemainderBlock,
    join,
    round_to_24_bits,
    split,
    split_24_bits,
)
from lightning_mp.precision.masters.changed_weights import ChangedWeights

#: The largest fp16 number.
HALF_MAX = torch.finfo(torch.float16).max

Storage = Literal["fp32", "remainder", "24bit"]


def unwrapped(tensor: Tensor) -> Tensor:
    """The tensor inside of a subclass that only changes how operations are computed, as torchao's MXFP8 weights do."""
    while type(tensor) is not Tensor and not isinstance(tensor, DTensor) and hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        inner = getattr(tensor, names[0])
        if len(names) != 1 or inner.shape != tensor.shape or inner.dtype != tensor.dtype:
            break
        tensor = inner
    return tensor


def _local(tensor: Tensor) -> Tensor:
    local = local_shard(tensor.detach())
    return local if type(local) is Tensor else unwrapped(local)


def _as_parameter(value: Tensor, original: Tensor) -> nn.Parameter:
    parameter = nn.Parameter(value)
    # Other packages mark parameters by attributes, and their optimizers look for them.
    vars(parameter).update(vars(original))
    return parameter


def _give_memory(parameter: Tensor, value: Tensor) -> None:
    """Lets a parameter hold another value's memory. It stays the same object: optimizers know it by that."""
    if isinstance(parameter, DTensor):
        torch.utils.swap_tensors(parameter, _as_parameter(distribute_like(_local(value), parameter), parameter))
    else:
        parameter.data = value.detach()


def distribute_like(local: Tensor, tensor: Tensor) -> Tensor:
    """A local part as a tensor that is distributed like another one."""
    if not isinstance(tensor, DTensor):
        return local
    return DTensor.from_local(
        local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def rounds_to(value: Tensor, working: Tensor) -> Tensor:
    """Where a float32 number rounds to a 16-bit one, to nearest, whichever way ties go.

    Example:
        >>> import torch
        >>> rounds_to(torch.tensor([1.001, 1.1]), torch.tensor([1.0, 1.0], dtype=torch.bfloat16))
        tensor([ True, False])
    """
    same = value.to(working.dtype) == working
    if working.dtype == torch.bfloat16:
        same |= split(value)[0] == working
    return same


def refine(working: Tensor, value: Tensor) -> Tensor:
    """The float32 number behind each 16-bit weight: ``value`` where it rounds to the weight, else the weight itself.

    The weight says what the model is; a master only adds the bits below it.
    """
    return torch.where(rounds_to(value, working), value, working.float())


def refine_full(weight: Tensor, value: Tensor) -> Tensor:
    """The float32 number behind each weight of a float32 tensor that may have been saved in 16 bit.

    Where all of it are 16-bit numbers, it is refined as they are (:func:`refine`); else it is in full precision already
    and stays, whatever ``value`` is.

    Example:
        >>> import torch
        >>> refine_full(torch.tensor([1.0, 3.0]), torch.tensor([1.001, 3.0]))
        tensor([1.0010, 3.0000])
        >>> refine_full(torch.tensor([1.002, 3.0]), torch.tensor([1.001, 3.0]))
        tensor([1.0020, 3.0000])
    """
    for dtype in (torch.bfloat16, torch.float16):
        working = weight.to(dtype)
        if torch.equal(working.float(), weight):
            return refine(working, value)
    return weight


class MasterStore(ABC):
    """The masters of a set of 16-bit parameters.

    The parameters themselves are never replaced. For one step, the optimizer gets each master as a separate fp32
    parameter; after the step the weight is written once.

    The master of a parameter that other code has changed (``load_state_dict``, clamping, a projection) follows at the
    next step, see :func:`refine`. The host knows which may have changed
    (:mod:`~lightning_mp.precision.masters.changed_weights`); only these are compared. Until that step the master is
    kept, because the change may be temporary: averaged weights that are swapped in.
    """

    def __init__(self) -> None:
        self._kept: dict[Tensor, Tensor] = {}
        # Masters that were given as fp32 numbers, until they are trained: bits below the weight are not missing.
        self._exact_fp32: set[Tensor] = set()
        # Parameters that began as 16-bit numbers: fp32 weights of a checkpoint were rounded when they were loaded.
        self._began_16_bit: Collection[Tensor] = ()
        self._changed = ChangedWeights()
        #: Optimizer steps so far: rounding that is stochastic depends on it.
        self.steps = 0

    def __contains__(self, parameter: Tensor) -> bool:
        return parameter in self._kept

    def takes(self, parameter: Tensor) -> bool:
        """Whether it has a master, or gets one in the next step."""
        return parameter in self._kept or (parameter.requires_grad and parameter.dtype in HALF_DTYPES)

    # -- a fit ---------------------------------------------------------------------------------------------------------

    def begin(
        self,
        optimizers: Sequence[Optimizer],
        values: Mapping[nn.Parameter, Tensor],
        were_16_bit: Collection[nn.Parameter],
        *,
        broadcast: bool,
    ) -> None:
        """Watches the weights from now on, and makes the masters of the optimizers' parameters from what these were.

        ``broadcast`` takes the values of rank 0.
        """
        self._changed.watch()
        self._began_16_bit = were_16_bit
        for parameter in (p for o in optimizers for group in o.param_groups for p in group["params"]):
            if parameter not in values or parameter in self:
                continue
            value = values[parameter].detach().to(device=parameter.device, dtype=torch.float32)
            if broadcast:
                # DDP has given every rank the 16-bit weights of rank 0; below them ranks may still differ.
                dist.broadcast(value, src=0)
            self.set(parameter, value, is_exact_fp32=parameter not in self._began_16_bit)

    def end(self) -> None:
        """The fit is over: weights may be changed unseen, and masters are where their parameters are."""
        self._changed.end()
        self.follow_devices()

    def read_weights(self, module: nn.Module, weights: Mapping[str, Any]) -> None:
        """Takes the fp32 weights of a checkpoint that were just loaded into a 16-bit module."""
        for name, parameter in module.named_parameters():
            value = weights.get(name)
            if parameter in self._began_16_bit and isinstance(value, Tensor) and value.is_floating_point():
                self.refine_from(parameter, value, is_exact_fp32=True)

    def full_value(self, parameter: Tensor, value: Tensor) -> Tensor:
        """In fp32 what a parameter of an earlier fit was before it was cast again; ``value`` as it is without a master.

        The parameter is 16 bit.
        """
        if value.dtype == torch.float32 or parameter not in self:
            return value
        working, master = local_shard(parameter.detach()), local_shard(self.get(parameter).detach())
        return distribute_like(refine(working, master.to(working.device)), parameter)

    # -- masters -------------------------------------------------------------------------------------------------------

    @property
    def parameters(self) -> list[Tensor]:
        """The 16-bit parameters that have a master."""
        return list(self._kept)

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's masters, the 16-bit parameters not counted."""
        return sum(_local(kept).nbytes for kept in self._kept.values())

    def set(self, parameter: Tensor, value: Tensor, *, is_exact_fp32: bool = False) -> None:
        """Sets a master and, rounded, its parameter."""
        value = unwrapped(value.detach()).to(device=parameter.device, dtype=torch.float32)
        self._keep(parameter, value)
        self.write_back([parameter], [value])
        if is_exact_fp32:
            self._exact_fp32.add(parameter)

    def refine_from(self, parameter: Tensor, value: Tensor, *, is_exact_fp32: bool = False) -> bool:
        """Sets a master from a checkpoint, where it rounds to the weight that the model has now."""
        working = _local(parameter)
        local = self._rounded(_local(value).to(device=working.device, dtype=torch.float32))
        if parameter in self._exact_fp32 and not self._changed.version_moved(parameter):
            refined = refine_full(_local(self.get(parameter)), local)
        else:
            refined = refine(working, local)
        agrees = torch.equal(refined, local)
        self.set(parameter, distribute_like(refined, parameter), is_exact_fp32=is_exact_fp32)
        return agrees

    def get(self, parameter: Tensor) -> Tensor:
        """The master of the parameter as it is now, in fp32, without waiting for the device. Do not change it."""
        return self._read(parameter)

    def swap_in(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """The masters as fp32 parameters for an optimizer, the same objects every time.

        Hand them to :meth:`write_back`; until they are lent again, they may have no memory.
        """
        self._update(parameters)
        with torch.no_grad():
            return self._lend(parameters)

    def in_place(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """What is kept of masters, for code that writes this and the parameters itself, and then calls `written`."""
        self._update(parameters)
        return [_local(self._kept[parameter]) for parameter in parameters]

    def _update(self, parameters: Sequence[Tensor]) -> None:
        """Makes the masters that are missing, and has the others follow what other code made of their weights."""
        for parameter in parameters:
            if parameter not in self._kept:
                self.set(parameter, parameter)
        with torch.no_grad():
            self._follow([parameter for parameter in parameters if self._changed.may_be(parameter)])

    def written(self, parameters: Sequence[Tensor]) -> None:
        """These and their masters belong together."""
        self._exact_fp32.difference_update(parameters)
        self._changed.written(parameters)

    def write_back(self, parameters: Sequence[Tensor], masters: Sequence[Tensor]) -> None:
        """Keeps the masters and writes the 16-bit parameters, each cast once."""
        with torch.no_grad():
            self._write(parameters, masters)
        self.written(parameters)

    def follow_devices(self) -> None:
        """Moves masters to where their parameters are."""
        for parameter, kept in self._kept.items():
            kept.data = kept.data.to(parameter.device)

    @abstractmethod
    def _keep(self, parameter: Tensor, value: Tensor) -> None:
        """Makes room for a master, or takes the value as it."""

    def _rounded(self, value: Tensor) -> Tensor:
        """What is kept of a master."""
        return value

    @abstractmethod
    def _read(self, parameter: Tensor) -> Tensor: ...

    @abstractmethod
    def _follow(self, parameters: Sequence[Tensor]) -> None:
        """Takes what other code made of these, without waiting for the device."""

    @abstractmethod
    def _lend(self, parameters: Sequence[Tensor]) -> list[Tensor]: ...

    @abstractmethod
    def _write(self, parameters: Sequence[Tensor], masters: Sequence[Tensor]) -> None: ...


class FullMasters(MasterStore):
    """Masters kept in fp32: 4 bytes each; the optimizer works on the kept tensor itself.

    Those of fp16 weights are held within ±65,504, the largest fp16 number: beyond it the weight would be infinite.
    """

    def _keep(self, parameter: Tensor, value: Tensor) -> None:
        if parameter in self._kept:
            _give_memory(self._kept[parameter], value)
        else:
            self._kept[parameter] = _as_parameter(value, parameter)

    def _read(self, parameter: Tensor) -> Tensor:
        kept = self._kept[parameter]
        if not self._changed.may_be(parameter):
            return kept
        return distribute_like(refine(_local(parameter).to(kept.device), _local(kept)), parameter)

    def _follow(self, parameters: Sequence[Tensor]) -> None:
        for parameter in parameters:
            _local(self._kept[parameter]).copy_(_local(self._read(parameter)))

    def _lend(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        return [self._kept[parameter] for parameter in parameters]

    def _write(self, parameters: Sequence[Tensor], masters: Sequence[Tensor]) -> None:
        sources = [_local(m) for m in masters]
        half = [m for p, m in zip(parameters, sources, strict=True) if p.dtype == torch.float16]
        if half:
            private_api.foreach_clamp_(half, HALF_MAX)
        private_api.foreach_copy_([_local(p) for p in parameters], sources)


class RemainderMasters(MasterStore):
    """Masters of bf16 parameters kept as the 16 bits that the parameter lacks: 2 bytes each, fp32 while lent.

    Or, as int8, 8 bits of them: masters are rounded to 24 bits when they come back
    (:func:`~lightning_mp.precision.masters.bf16_remainder.round_to_24_bits`).

    Those that are lent together lie in one memory from then on (:class:`RemainderBlock`), so that few kernels join and
    split them all.
    """

    def __init__(self, dtype: torch.dtype = torch.int16) -> None:
        super().__init__()
        self._dtype = dtype
        self._lent: dict[Tensor, nn.Parameter] = {}
        self._blocks: dict[Tensor, RemainderBlock] = {}

    def _keep(self, parameter: Tensor, value: Tensor) -> None:
        self._dissolve(parameter)
        self._kept[parameter] = torch.empty_like(_local(parameter), dtype=self._dtype)

    def _rounded(self, value: Tensor) -> Tensor:
        return round_to_24_bits(value, self.steps) if self._dtype == torch.int8 else value

    def _read(self, parameter: Tensor) -> Tensor:
        return distribute_like(join(_local(parameter), self._kept[parameter]), parameter)

    def _follow(self, parameters: Sequence[Tensor]) -> None:
        for parameter in parameters:
            # Set to zero from outside, it would be a nan with a remainder below zero.
            self._kept[parameter].masked_fill_((_local(parameter) == 0) & (self._kept[parameter] < 0), 0)

    def _lend(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        for members in _by_device(parameters):
            masters = self._block_of(members).join([_local(p) for p in members])
            for parameter, master in zip(members, masters, strict=True):
                if parameter in self._lent:
                    _give_memory(self._lent[parameter], master)
                    vars(self._lent[parameter]).update(vars(parameter))
                else:
                    self._lent[parameter] = _as_parameter(distribute_like(master, parameter), parameter)
        return [self._lent[parameter] for parameter in parameters]

    def _block_of(self, members: Sequence[Tensor]) -> RemainderBlock:
        block = self._blocks.get(members[0])
        if block is not None and block.holds(members):
            return block
        for parameter in members:
            self._dissolve(parameter)
        block = RemainderBlock(members, [_local(p) for p in members], self._dtype)
        for parameter, room in zip(members, block.remainders, strict=True):
            room.copy_(self._kept[parameter])
            self._kept[parameter] = room
            self._blocks[parameter] = block
        return block

    def _dissolve(self, parameter: Tensor) -> None:
        """Splits up a block that is not stepped as a whole, so that it keeps no unused memory."""
        block = self._blocks.get(parameter)
        for member in block.parameters if block is not None else ():
            del self._blocks[member]
            self._kept[member] = self._kept[member].clone()

    def _write(self, parameters: Sequence[Tensor], masters: Sequence[Tensor]) -> None:
        given = dict(zip(parameters, masters, strict=True))
        for members in _by_device(parameters):
            block = self._blocks.get(members[0])
            if block is not None and block.is_lent and block.holds(members):
                block.split([_local(p) for p in members], [_local(given[p]) for p in members], self.steps)
                continue
            for parameter in members:
                master = _local(given[parameter])
                exact = self._dtype == torch.int16
                working, remainder = split(master) if exact else split_24_bits(master, self.steps)
                _local(parameter).copy_(working)
                self._kept[parameter].copy_(remainder)
        for parameter in parameters:
            if parameter in self._lent:
                _give_memory(self._lent[parameter], _local(self._lent[parameter]).new_empty(0))


def _by_device(parameters: Sequence[Tensor]) -> list[list[Tensor]]:
    devices: dict[torch.device, list[Tensor]] = {}
    for parameter in parameters:
        devices.setdefault(parameter.device, []).append(parameter)
    return list(devices.values())


def make_store(storage: Storage) -> MasterStore:
    """A store by its name."""
    if storage == "fp32":
        return FullMasters()
    return RemainderMasters(torch.int16 if storage == "remainder" else torch.int8)


# A fit leaves 16-bit weights. The next one may have another Trainer and plugin, and continues from the masters as well.
_of_modules: WeakKeyDictionary[nn.Module, MasterStore] = WeakKeyDictionary()


def remember_masters(module: nn.Module, store: MasterStore) -> None:
    """Keeps the masters of a module's last fit for as long as the module lives."""
    _of_modules[module] = store


def former_masters(module: nn.Module) -> MasterStore | None:
    """The masters of a module's last fit, if it has had one."""
    return _of_modules.get(module)
