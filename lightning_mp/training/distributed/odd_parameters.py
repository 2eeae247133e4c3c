"""Parameters that sharding cannot hold, refused by name; and units whose parameters have several dtypes, split."""

from collections.abc import Iterator, Sequence

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from lightning_mp.ground.core.messages import listed
from lightning_mp.ground.modules.names import is_inside, named_modules
from lightning_mp.training.policy.sharding_units import ShardingUnit

_WITH_SPARSE_GRADIENTS = (nn.Embedding, nn.EmbeddingBag)


def refuse_odd_parameters(model: nn.Module, owner: str) -> None:
    """Refuses complex parameters and sparse gradients, on which torch's sharding ends in errors of its internals.

    >>> refuse_odd_parameters(nn.Linear(2, 2), "FSDP2Strategy")
    """
    complex_ones = [name for name, parameter in model.named_parameters() if parameter.is_complex()]
    if complex_ones:
        raise MisconfigurationException(
            f"{owner} cannot shard complex parameters, and {listed(complex_ones)} of"
            f" {type(model).__name__} are complex: torch gathers and reduces real numbers. Store them as"
            " torch.view_as_real(...) and use torch.view_as_complex(...) in the forward, or use strategy='ddp'."
        )
    sparse = [
        name
        for name, module in named_modules(model)
        if isinstance(module, _WITH_SPARSE_GRADIENTS) and module.sparse and module.weight.requires_grad
    ]
    if sparse:
        raise MisconfigurationException(
            f"{owner} cannot reduce sparse gradients, and {listed(sparse)} of {type(model).__name__}"
            " have sparse=True. Leave sparse out: a sharded table's gradient is small already. Or use strategy='ddp'."
        )


def units_of_one_dtype(model: nn.Module, units: Sequence[ShardingUnit]) -> list[ShardingUnit]:
    """Makes separate units of modules whose parameters have another dtype than the rest of their unit.

    FSDP2 reduces what is trained in a unit in one dtype. float64 is neither rounded to be gathered nor to be reduced,
    as autocast leaves it alone, too; a policy for fp32 parameters is no policy for it.

    >>> model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).double())
    >>> [(unit.modules, unit.mixed_precision.reduce_dtype) for unit in units_of_one_dtype(
    ...     model, [ShardingUnit(("",), MixedPrecisionPolicy(reduce_dtype=torch.float32))])]
    [(('1',), None), (('',), torch.float32)]
    """
    modules = dict(named_modules(model))
    taken: set[int] = set()
    found: list[ShardingUnit] = []
    for unit in units:
        inside = [
            (f"{name}.{inner}".strip("."), part)
            for name in unit.modules
            for inner, part in named_modules(modules[name])
        ]
        dtypes_of = {name: dtypes for name, part in inside if (dtypes := set(_own_dtypes(part, taken)))}
        everything: set[torch.dtype] = set().union(*dtypes_of.values())
        # What a single module holds itself can be in no unit but its own.
        held = dtypes_of.get(unit.modules[0], everything) if len(unit.modules) == 1 else everything
        own = _most_common([dtypes & held for dtypes in dtypes_of.values()])
        rest = unit.modules
        for dtype in sorted(everything - {own}, key=str):
            names = [name for name, dtypes in dtypes_of.items() if dtype in dtypes]
            for name in names:
                held_inside = {each for part in modules[name].modules() for each in _own_dtypes(part, taken)}
                _refuse_a_mixture(name, dtype, held_inside)
            outermost = [n for n in names if not any(other and is_inside(n, other) for other in names)]
            found.append(ShardingUnit(tuple(outermost), _policy(unit, dtype)))
            rest = tuple(name for name in rest if name not in outermost)
        if rest:
            found.append(ShardingUnit(rest, _policy(unit, own)))
        taken |= {id(parameter) for _, part in inside for parameter in part.parameters(recurse=False)}
    return found


def _own_dtypes(module: nn.Module, taken: set[int]) -> Iterator[torch.dtype]:
    """Of what is trained, and float64, which must not be rounded."""
    for parameter in module.parameters(recurse=False):
        matters = parameter.requires_grad or parameter.dtype == torch.float64
        if id(parameter) not in taken and parameter.is_floating_point() and matters:
            yield parameter.dtype


def _most_common(dtypes: Sequence[set[torch.dtype]]) -> torch.dtype:
    several = [dtype for some in dtypes for dtype in sorted(some, key=lambda dtype: dtype == torch.float64)]
    return max(several, key=several.count, default=torch.float32)


def _policy(unit: ShardingUnit, dtype: torch.dtype) -> MixedPrecisionPolicy:
    return MixedPrecisionPolicy(cast_forward_inputs=False) if dtype == torch.float64 else unit.mixed_precision


def _refuse_a_mixture(name: str, dtype: torch.dtype, dtypes: set[torch.dtype]) -> None:
    if dtypes != {dtype}:
        others = ", ".join(sorted(str(other) for other in dtypes - {dtype}))
        raise MisconfigurationException(
            f"FSDP2Strategy: {name or 'the model itself'} holds parameters in {dtype} and in {others}, and FSDP2"
            " reduces a unit in one dtype. Give them one dtype, put them into separate modules, or use strategy='ddp'."
        )
