"""What was seen of a tensor while a module ran, and the reading behind it."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

Role = Literal[
    "batch", "parameter", "buffer", "input", "output", "loss", "input_gradient", "output_gradient", "parameter_gradient"
]


@dataclass(frozen=True)
class Place:
    """Where a tensor was seen."""

    role: Role  # what it is there
    module: str  # full name of the module whose call it belongs to; "" is the training step itself
    module_class: str  # class name of that module
    tensor: str  # which tensor, in words: "argument 'input'", "output[1]", "gradient of weight"
    enclosing: str = ""  # full name of the module whose forward made that call
    call: int = 0  # number of the call, over all modules


@dataclass(frozen=True)
class OverflowObservation:
    """A tensor seen during a run, in host numbers."""

    place: Place  # where
    shape: tuple[int, ...]  # its shape on this rank
    dtype: torch.dtype  # its dtype
    nan: bool  # whether it holds a nan
    posinf: bool  # whether it holds +inf
    neginf: bool  # whether it holds -inf
    largest: float  # largest finite absolute value

    @property
    def finite(self) -> bool:
        """Whether every element is."""
        return not (self.nan or self.posinf or self.neginf)

    @property
    def only_neginf(self) -> bool:
        """Whether -inf is all that is wrong: what masks are made of."""
        return self.neginf and not (self.nan or self.posinf)

    @property
    def kind(self) -> str:
        """The non-finite values it holds, as "nan and inf"; empty if there are none."""
        found = [name for name, held in (("nan", self.nan), ("inf", self.posinf), ("-inf", self.neginf)) if held]
        return " and ".join(found)


def take_reading(tensor: Tensor) -> Tensor | None:
    """Four numbers about a tensor, left on its device: has nan, has +inf, has -inf, largest finite absolute value.

    None for tensors that cannot be non-finite: integers, and empty ones.
    """
    local = tensor.detach()
    if isinstance(local, DTensor):
        local = local.to_local()
    if local.is_sparse:
        local = local.coalesce().values()
    if local.is_complex():
        local = torch.view_as_real(local)
    if not local.is_floating_point() or local.is_nested or not local.numel():
        return None
    if local.element_size() == 1:
        local = local.float()
    finite = torch.where(local.isfinite(), local, 0).abs().amax()
    return torch.stack(
        [flag.float() for flag in (local.isnan().any(), local.isposinf().any(), local.isneginf().any(), finite)]
    )


def read_observations(seen: list[tuple[Place, Tensor, tuple[int, ...], torch.dtype]]) -> list[OverflowObservation]:
    """Brings all readings to the host, in one transfer per device."""
    rows: list[list[float]] = [[]] * len(seen)
    for device in {reading.device for _, reading, _, _ in seen}:
        indices = [i for i, (_, reading, _, _) in enumerate(seen) if reading.device == device]
        for index, row in zip(indices, torch.stack([seen[i][1] for i in indices]).tolist(), strict=True):
            rows[index] = row
    return [
        OverflowObservation(place, shape, dtype, bool(nan), bool(posinf), bool(neginf), largest)
        for (place, _, shape, dtype), (nan, posinf, neginf, largest) in zip(seen, rows, strict=True)
    ]
