"""Models under Lightning's ``FSDPStrategy`` (FSDP1): what it cannot shard is refused, batch norms stay in fp32."""

import torch
from lightning.pytorch.strategies import FSDPStrategy, Strategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from lightning_mp.ground.core.messages import listed
from lightning_mp.ground.core.run_state import RunState
from lightning_mp.ground.modules.names import named_modules
from lightning_mp.ground.modules.norms import BATCH_NORMS
from lightning_mp.training.distributed.odd_parameters import refuse_odd_parameters


class FSDP1Model:
    """Looks at a model before the strategy wraps it, and once more after."""

    def __init__(self, model: nn.Module, strategy: FSDPStrategy) -> None:
        refuse_odd_parameters(model, "FSDPStrategy")
        _refuse_float64(model)
        _keep_batch_norms_in_fp32(model, strategy)
        places: dict[int, list[tuple[str, nn.Module]]] = {}
        for name, module in named_modules(model):
            for inner, parameter in module.named_parameters(recurse=False):
                places.setdefault(id(parameter), []).append((f"{name}.{inner}".strip("."), module))
        self._tied = [several for several in places.values() if len(several) > 1]

    @classmethod
    def inspect_before_wrapping(cls, model: nn.Module, strategy: Strategy) -> None:
        """Looks at a model that FSDP1 is about to wrap; at no other."""
        if isinstance(strategy, FSDPStrategy) and not _is_wrapped(model):
            _run_of(strategy).keep(cls(model, strategy))

    @classmethod
    def inspect_after_wrapping(cls, strategy: Strategy) -> None:
        """Inspects the wrapped model."""
        run = _run_of(strategy)
        before = run.find(cls)
        run.drop(before)
        if before is not None and strategy.model is not None:
            before._check_units(strategy.model)

    def _check_units(self, wrapped: nn.Module) -> None:
        unit_of: dict[int, FullyShardedDataParallel] = {}
        for unit in FullyShardedDataParallel.fsdp_modules(wrapped):  # outer ones first
            unit_of |= {id(module): unit for module in unit.modules()}
        for several in self._tied:
            if len({id(unit_of.get(id(module))) for _, module in several}) > 1:
                (first, _), (second, _), *_ = several
                raise MisconfigurationException(
                    f"FSDPStrategy: {first} and {second} are one parameter (tied weights) in two units of"
                    " auto_wrap_policy, each of which would free what the other needs. Leave both modules out of"
                    " auto_wrap_policy, or use strategy='ddp'."
                )


def _run_of(strategy: Strategy) -> RunState:
    assert strategy.lightning_module is not None
    return RunState.of(strategy.lightning_module.trainer)


def _is_wrapped(model: nn.Module) -> bool:
    return any(isinstance(module, FullyShardedDataParallel) for module in model.modules())


def _refuse_float64(model: nn.Module) -> None:
    wide = [name for name, parameter in model.named_parameters() if parameter.dtype == torch.float64]
    if wide:
        raise MisconfigurationException(
            f"FSDPStrategy gathers all parameters in one dtype, and {listed(wide)} are float64: they"
            " would be rounded to that of the precision plugin. Use strategy=FSDP2Strategy(), which keeps them, store"
            " them in fp32, or use strategy='ddp'."
        )


def _keep_batch_norms_in_fp32(model: nn.Module, strategy: FSDPStrategy) -> None:
    """FSDP wraps them apart, in fp32, where it has a policy for wrapping: the one given here wraps nothing else.

    Without it they would get 16-bit weights for fp32 statistics, which torch refuses (Lightning's own plugin makes the
    statistics 16 bit, too).
    """
    has_one = any(isinstance(module, BATCH_NORMS) for module in model.modules())
    if has_one and strategy.kwargs.get("auto_wrap_policy") is None and strategy.mixed_precision is None:
        strategy.kwargs["auto_wrap_policy"] = ModuleWrapPolicy(set())
