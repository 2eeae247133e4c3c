"""What one rank of several holds: the step of one device, divided as DDP or FSDP2 does."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, prod
from types import MappingProxyType

from torch import nn

from lightning_mp.core.precisions import PrecisionSpec
from lightning_mp.modules.names import named_modules
from lightning_mp.planning.memory.live_storages import PARTS, MemorySample, Part
from lightning_mp.policy.module_selection import ModulePattern, as_patterns, select_modules
from lightning_mp.policy.operations import FAMILIES, operation_of_module

_REDUCED_BYTES = 4  # FSDP2 reduces gradients in fp32 with every plugin of this package
_SHARDED: frozenset[Part] = frozenset({"weights", "masters", "optimizer states", "gradients"})
_UNITS_AT_ONCE = 2  # the unit that runs and the next one, which is gathered meanwhile


def under_ddp(samples: Sequence[MemorySample], *, gradients_are_views: bool = False) -> list[MemorySample]:
    """Every rank holds everything; gradients are there a second time, in the buckets that are reduced.

    Source:
        Li et al. 2020, arXiv:2006.15704, section 3.2; torch's DistributedDataParallel makes the buckets when it wraps
        the model.
    """
    buckets = 0 if gradients_are_views else max((s.bytes_by_part.get("gradients", 0) for s in samples), default=0)
    return [_with(sample, {"communication buffers": buckets}) for sample in samples]


def under_fsdp2(
    samples: Sequence[MemorySample],
    module: nn.Module,
    ranks: int,
    precision: PrecisionSpec,
    units: ModulePattern | Sequence[ModulePattern] | None = None,
) -> list[MemorySample]:
    """Weights, gradients, masters and optimizer states are sharded; weights are gathered unit by unit.

    A rank holds the first ``ceil(n / ranks)`` rows of each parameter. What is in no unit is gathered for the whole
    forward and backward; of the units two are, because the next one is gathered while one runs. Weights of matrix
    products are gathered in the format of computing, so they are cast nowhere else. In backward come the gradients of
    one whole unit, and their fp32 copies that are reduced.

    Source:
        Rajbhandari et al. 2020, arXiv:1910.02054 (stage 3); Zhao et al. 2023, arXiv:2304.11277.
    """
    found = _units(module, units)
    whole = sum(unit.elements for unit in found)
    share = sum(unit.shard_elements(ranks) for unit in found) / whole if whole else 1.0
    root, *inner = found
    sizes = [unit.gathered_bytes(precision) for unit in inner]
    most = max((sum(sizes[i : i + _UNITS_AT_ONCE]) for i in range(len(sizes))), default=0)
    gathered = root.gathered_bytes(precision) + most
    largest = max(inner or [root], key=lambda unit: unit.elements)
    reduced = (precision.activation_bytes + _REDUCED_BYTES) * largest.learning
    result = []
    for sample in samples:
        sharded = {
            part: ceil(size * share) if part in _SHARDED else size for part, size in sample.bytes_by_part.items()
        }
        sharded.pop("weight casts", None)
        if sample.phase == "optimizer step":
            sharded["temporaries"] = ceil(sharded.get("temporaries", 0) * share)
            extra: Mapping[Part, int] = {}
        else:
            buffers = reduced if sample.phase == "backward" else 0
            extra = {"gathered weights": gathered, "communication buffers": buffers}
        result.append(_with(MemorySample(sample.phase, sharded), extra))
    return result


@dataclass(frozen=True)
class _Unit:
    """What FSDP2 gathers together: shape, whether it learns, and whether it is of a matrix product."""

    parameters: tuple[tuple[tuple[int, ...], bool, bool], ...]

    @property
    def elements(self) -> int:
        return sum(prod(shape) for shape, _, _ in self.parameters)

    @property
    def learning(self) -> int:
        return sum(prod(shape) for shape, learns, _ in self.parameters if learns)

    def shard_elements(self, ranks: int) -> int:
        return sum(ceil(shape[0] / ranks) * prod(shape[1:]) if shape else 1 for shape, _, _ in self.parameters)

    def gathered_bytes(self, precision: PrecisionSpec) -> int:
        low = precision.activation_bytes
        return sum(
            prod(shape) * (low if in_product or not precision.autocast else precision.weight_bytes)
            for shape, _, in_product in self.parameters
        )


def _units(module: nn.Module, units: ModulePattern | Sequence[ModulePattern] | None) -> list[_Unit]:
    """The root unit, which holds what is in no other, and the others in the order of the model."""
    if units is None:
        inner = [
            child
            for _, part in named_modules(module)
            if isinstance(part, nn.ModuleList | nn.ModuleDict) and len(part) > 1
            for child in part.children()
        ]
    else:
        inner = list(select_modules(module, as_patterns(units, "estimate_memory"), "estimate_memory").values())
    products = {
        id(parameter)
        for _, part in named_modules(module)
        if operation_of_module(part) in FAMILIES["matmuls"]
        for parameter in part.parameters(recurse=False)
    }
    seen: set[int] = set()
    found = [_unit_of(part, products, seen) for part in inner]
    return [_unit_of(module, products, seen), *(unit for unit in found if unit.parameters)]


def _unit_of(module: nn.Module, products: Collection[int], seen: set[int]) -> _Unit:
    own = [parameter for parameter in module.parameters() if id(parameter) not in seen]
    seen.update(id(parameter) for parameter in own)
    return _Unit(tuple((tuple(p.shape), p.requires_grad, id(p) in products) for p in own))


def _with(sample: MemorySample, extra: Mapping[Part, int]) -> MemorySample:
    both = {**sample.bytes_by_part, **extra}
    return MemorySample(sample.phase, MappingProxyType({part: both[part] for part in PARTS if both.get(part)}))
