"""fp32 master weights of 16-bit parameters: where they are kept, and which of the two is right when they differ."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_mp import seams
from lightning_mp.gradients import local_shard
from lightning_mp.remainder import join, split

__all__ = [
    "FullMasters",
    "MasterStore",
    "RemainderMasters",
    "Storage",
    "distribute_like",
    "make_store",
    "refine",
    "rounds_to",
]

Storage = Literal["fp32", "remainder"]


def _local(tensor: Tensor) -> Tensor:
    return local_shard(tensor.detach())


def _as_parameter(value: Tensor, original: Tensor) -> nn.Parameter:
    parameter = nn.Parameter(value)
    # Other packages mark parameters by attributes, and their optimizers look for them.
    vars(parameter).update(vars(original))
    return parameter


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

    Args:
        working: fp16 or bf16, plain tensor.
        value: float32, the same shape and device.
    """
    return torch.where(rounds_to(value, working), value, working.float())


class MasterStore(ABC):
    """The masters of a set of 16-bit parameters.

    The parameters stay what they are all the time. A master is lent to the optimizer for one step as an fp32 parameter
    of its own; when it comes back, the weight is written anew, once.

    A parameter that was changed in place by somebody else (``load_state_dict``, clamping under ``torch.no_grad``) is
    noticed by torch's version counter, and its master follows, see :func:`refine`. Changes through ``parameter.data``
    are hidden from that counter by torch.
    """

    def __init__(self) -> None:
        self._kept: dict[Tensor, Tensor] = {}
        self._versions: dict[Tensor, int] = {}

    def __contains__(self, parameter: Tensor) -> bool:
        return parameter in self._kept

    @property
    def parameters(self) -> list[Tensor]:
        """The 16-bit parameters that have a master."""
        return list(self._kept)

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's masters, the 16-bit parameters not counted."""
        return sum(_local(kept).nbytes for kept in self._kept.values())

    def set(self, parameter: Tensor, value: Tensor) -> None:
        """Sets a master and, rounded, its parameter.

        Args:
            parameter: fp16 or bf16 parameter.
            value: any floating-point dtype and device; may be kept, not copied.
        """
        value = value.detach().to(device=parameter.device, dtype=torch.float32)
        self._kept[parameter] = self._new(parameter, value)
        self.take_back([parameter], [value])

    def refine_from(self, parameter: Tensor, value: Tensor) -> bool:
        """Sets a master from a checkpoint, where it rounds to the weight that the model has now.

        Args:
            parameter: fp16 or bf16 parameter.
            value: any dtype and device; if the parameter is distributed, distributed likewise.

        Returns:
            Whether it does everywhere.
        """
        working = _local(parameter)
        local = _local(value).to(device=working.device, dtype=torch.float32)
        self.set(parameter, distribute_like(refine(working, local), parameter))
        return bool(rounds_to(local, working).all())

    def get(self, parameter: Tensor) -> Tensor:
        """The master, in fp32. Do not change it."""
        if seams.version_of(parameter) != self._versions[parameter]:
            self._follow_change(parameter)
            self._versions[parameter] = seams.version_of(parameter)
        return self._read(parameter)

    def lend(self, parameter: Tensor) -> Tensor:
        """The master as an fp32 parameter for an optimizer; hand it to :meth:`take_back`."""
        if parameter not in self._kept:
            self.set(parameter, parameter)
        master = self.get(parameter)
        return master if isinstance(master, nn.Parameter) else _as_parameter(master, parameter)

    def take_back(self, parameters: Sequence[Tensor], masters: Sequence[Tensor]) -> None:
        """Keeps the masters and writes the 16-bit parameters, each cast once."""
        with torch.no_grad():
            self._write(parameters, masters)
        for parameter in parameters:
            self._versions[parameter] = seams.version_of(parameter)

    def follow_devices(self) -> None:
        """Moves masters to where their parameters are."""
        for parameter, kept in self._kept.items():
            kept.data = kept.data.to(parameter.device)

    @abstractmethod
    def _new(self, parameter: Tensor, value: Tensor) -> Tensor:
        """What is kept of a master."""

    @abstractmethod
    def _read(self, parameter: Tensor) -> Tensor: ...

    @abstractmethod
    def _write(self, parameters: Sequence[Tensor], masters: Sequence[Tensor]) -> None: ...

    @abstractmethod
    def _follow_change(self, parameter: Tensor) -> None: ...


class FullMasters(MasterStore):
    """Masters kept in fp32: 4 bytes each; the optimizer works on the kept tensor itself."""

    def _new(self, parameter: Tensor, value: Tensor) -> Tensor:
        return _as_parameter(value, parameter)

    def _read(self, parameter: Tensor) -> Tensor:
        return self._kept[parameter]

    def _write(self, parameters: Sequence[Tensor], masters: Sequence[Tensor]) -> None:
        seams.foreach_copy_([_local(p) for p in parameters], [_local(m) for m in masters])

    def _follow_change(self, parameter: Tensor) -> None:
        master = _local(self._kept[parameter])
        master.copy_(refine(_local(parameter), master))


class RemainderMasters(MasterStore):
    """Masters of bf16 parameters kept as the 16 bits that the parameter lacks: 2 bytes each, fp32 while lent."""

    def _new(self, parameter: Tensor, value: Tensor) -> Tensor:
        return torch.empty_like(_local(parameter), dtype=torch.int16)

    def _read(self, parameter: Tensor) -> Tensor:
        return distribute_like(join(_local(parameter), self._kept[parameter]), parameter)

    def _write(self, parameters: Sequence[Tensor], masters: Sequence[Tensor]) -> None:
        for parameter, master in zip(parameters, masters, strict=True):
            working, remainder = split(_local(master))
            _local(parameter).copy_(working)
            self._kept[parameter].copy_(remainder)

    def _follow_change(self, parameter: Tensor) -> None:
        """Nothing to do: whatever the parameter is now, the number it makes with the old remainder rounds to it."""


def make_store(storage: Storage) -> MasterStore:
    """A store by its name."""
    return FullMasters() if storage == "fp32" else RemainderMasters()
