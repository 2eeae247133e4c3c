"""Splits a LightningModule by tensor parallelism and shards it into FSDP2 units."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

from lightning_mp.core import private_sharding_api
from lightning_mp.core.messages import listed
from lightning_mp.core.patches import Patches
from lightning_mp.core.precisions import low_dtype
from lightning_mp.distributed.materialize import materialise, not_initialisable
from lightning_mp.distributed.odd_parameters import refuse_odd_parameters, units_of_one_dtype
from lightning_mp.distributed.sharding_rules import refuse_half_tied_units
from lightning_mp.modules.forward_wrapper import class_forward
from lightning_mp.modules.names import is_inside, named_modules
from lightning_mp.policy.operations import FAMILIES, operation_of_module
from lightning_mp.policy.policy import PrecisionPolicy
from lightning_mp.policy.resolved import PolicyModule, ResolvedPolicy
from lightning_mp.policy.rules import LOW, Dtype, Rule, dtype_name
from lightning_mp.policy.sharding_units import ShardingUnit, sharding_units
from lightning_mp.tensor_parallel.apply import TensorParallelSplit

#: Methods of a LightningModule that begin with a forward.
STEPS = ("training_step", "validation_step", "test_step", "predict_step")
# Matrix products that are no modules of torch: a linear layer with its weight the other way round.
_PRODUCTS = ("transformers.pytorch_utils.Conv1D",)


def gathered_dtypes(model: nn.Module, policy: PrecisionPolicy | None, low: torch.dtype) -> ResolvedPolicy:
    """Weights that autocast would cast to 16 bit at their use are gathered so; all others in fp32.

    Linear and convolutional layers come in 16 bit, norms, embeddings and modules that torch does not know in fp32: what
    they compute is then the same as on one device, where nothing is gathered. A policy rule about a module takes
    precedence: ``{"class:Embedding": "low"}`` halves the bytes of embeddings and rounds them. Norms stay in fp32 under
    such a rule, because their kernels refuse 16-bit weights with fp32 inputs. A weight that several modules share is
    gathered in fp32 unless all of them use 16 bit.

    >>> model = nn.Sequential(nn.Embedding(4, 4), nn.Linear(4, 4))
    >>> [(m.name, m.dtype) for m in gathered_dtypes(model, None, torch.bfloat16).modules if m.has_parameters]
    [('0', torch.float32), ('1', 'low')]
    """
    resolved = policy.resolve(model) if policy is not None else None
    decided = {module.name: module for module in resolved.modules} if resolved is not None else {}

    def dtype_of(name: str, part: nn.Module) -> Dtype:
        ruled = decided.get(name)
        if resolved is not None and ruled is not None and resolved.deciding_rule(ruled) is not None:
            asked = resolved.compute_dtype(ruled)
            return torch.float32 if asked == LOW and _is_norm(part) else asked
        return LOW if _is_product(part) else torch.float32

    return _gathered(model, dtype_of)


def _gathered(model: nn.Module, dtype_of: Callable[[str, nn.Module], Dtype]) -> ResolvedPolicy:
    """The dtypes of modules' own weights, as a policy; a weight that several share with different dtypes is fp32."""
    by_parameter: dict[int, list[str]] = {}
    dtypes: dict[str, Dtype] = {}
    modules: dict[str, nn.Module] = {}
    for name, module in named_modules(model):
        if any(module is other for other in modules.values()):
            continue
        modules[name] = module
        dtypes[name] = dtype_of(name, module)
        for parameter in module.parameters(recurse=False):
            by_parameter.setdefault(id(parameter), []).append(name)
    for names in by_parameter.values():
        if len({dtypes[name] for name in names}) > 1:
            for name in names:
                dtypes[name] = torch.float32
    wanted = list(dict.fromkeys(dtypes.values()))
    rules = tuple(Rule("module", "*", dtype, f"weights in {dtype_name(dtype)}") for dtype in wanted)
    found = tuple(
        PolicyModule(
            name,
            type(module).__name__,
            None,
            next(module.parameters(recurse=False), None) is not None,
            wanted.index(dtypes[name]),
            dtypes[name],
        )
        for name, module in modules.items()
    )
    return ResolvedPolicy(rules, found, {})


def _is_product(module: nn.Module) -> bool:
    operation = operation_of_module(module)
    if operation is not None:
        return operation in FAMILIES["matmuls"]
    return any(f"{kind.__module__}.{kind.__qualname__}" in _PRODUCTS for kind in type(module).__mro__)


def _is_norm(module: nn.Module) -> bool:
    operation = operation_of_module(module)
    return operation is not None and operation not in FAMILIES["matmuls"]


def shard_model(
    module: "pl.LightningModule",
    names: Sequence[str],
    split: TensorParallelSplit | None,
    *,
    data_mesh: DeviceMesh,
    plugin: Precision,
    device: torch.device,
    reshard_after_forward: bool | int | None,
) -> None:
    """Brings unit after unit to life, onto the device, splits its layers and shards it; the model itself last."""
    refuse_odd_parameters(module, "FSDP2Strategy")
    lost = not_initialisable(module)
    if lost:
        raise MisconfigurationException(
            f"FSDP2Strategy: modules of class {', '.join(lost)} are on the meta device and have no reset_parameters(),"
            " so nothing can give their parameters and buffers a value. Define it, or build the model without"
            " init_module(empty_init=True)."
        )
    modules = dict(named_modules(module))
    roots = [""] if module.automatic_optimization else _roots_in_manual_optimization(module, names)
    done: set[int] = set()
    for unit in units_of_one_dtype(module, units_for(module, [*names, *roots], plugin)):
        owned = []
        for name in unit.modules:
            for part_name, part in named_modules(modules[name]):
                if id(part) not in done:
                    done.add(id(part))
                    owned.append((f"{name}.{part_name}".strip("."), part))
        materialise([part for _, part in owned], device)
        if split is not None:
            split.layers([name for name, _ in owned])
        parts = [modules[name] for name in unit.modules]
        fully_shard(
            parts if len(parts) > 1 else parts[0],
            mesh=data_mesh,
            mp_policy=unit.mixed_precision,
            reshard_after_forward=reshard_after_forward,
        )
        for part in parts:
            private_sharding_api.allow_unused_layers(part)
    if split is not None:
        split.finish(device)


def units_for(module: "pl.LightningModule", names: Sequence[str], plugin: Precision) -> list[ShardingUnit]:
    """The units with the dtypes that a precision plugin sets, inner ones first."""
    precision = str(plugin.precision)
    policy = getattr(plugin, "policy", None)
    low = low_dtype(precision)
    if getattr(plugin, "eval_precision", precision) != precision:
        low = None  # what is gathered in 16 bit could not be evaluated in fp32
    if low is not None and precision.endswith("-mixed"):
        return sharding_units(gathered_dtypes(module, policy, low), names, low)
    if low is not None and hasattr(plugin, "storage"):  # fp32 shards are the masters
        from lightning_mp.policy.weights_in_float32 import kept_in_float32, with_exact_parametrizations

        kept = kept_in_float32(module, with_exact_parametrizations(policy, module), low)
        return sharding_units(_gathered(module, lambda _, part: torch.float32 if part in kept else LOW), names, low)
    in_own_dtype = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
    inner_first = sorted(names, key=lambda name: -(name.count(".") + 1 if name else 0))
    return [ShardingUnit((name,), in_own_dtype) for name in inner_first]


def gather_in_steps(module: nn.Module, patches: Patches) -> None:
    """Lets the step methods of a unit gather and free its weights as its forward does, until the run ends.

    Inside of them ``self(...)`` gathers nothing again, and leaves the weights for what comes after it.
    """
    if not isinstance(module, FSDPModule):
        return
    for name in STEPS:
        own = vars(module)
        before = {name: own[name]} if name in own else {}
        setattr(module, name, _with_weights_at_hand(module, getattr(module, name)))
        register_fsdp_forward_method(module, name)
        gathering = own.pop(name)
        own.update(before)
        patches.replace(module, name, gathering)


def _with_weights_at_hand(module: FSDPModule, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        with private_sharding_api.without_forward_hooks_of_sharding(module):
            return method(*args, **kwargs)

    return run


def _roots_in_manual_optimization(module: "pl.LightningModule", names: Sequence[str]) -> list[str]:
    """The outermost modules with a forward, each gathered when it is called."""
    roots: list[str] = []
    for name, part in named_modules(module):
        has_forward = class_forward(part) is not None
        inside = any(is_inside(name, root) for root in (*roots, *names))
        if name and has_forward and not inside and name not in names and next(part.parameters(), None) is not None:
            roots.append(name)
    parts = dict(named_modules(module))
    held = {id(parameter) for name in (*roots, *names) for parameter in parts[name].parameters()}
    own = [name for name, parameter in module.named_parameters() if id(parameter) not in held]
    if own:
        raise MisconfigurationException(
            f"FSDP2Strategy in manual optimization: {listed(own)} of {type(module).__name__} belongs"
            " to no module that is called, so nothing would gather it. Put it into a submodule with a forward of its"
            " own."
        )
    refuse_half_tied_units(module, roots, "put the modules that share it into one submodule with a forward.")
    return roots
