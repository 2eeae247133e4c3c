"""Which weights of a module are held in 16 bit, and the cast in place."""

import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Self, cast

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize
from torchmetrics import Metric

from lightning_mp.core.patches import Patch
from lightning_mp.core.precisions import CAST_DTYPES, HALF_DTYPES
from lightning_mp.gradients.gradient_ops import local_shard
from lightning_mp.modules.names import named_modules
from lightning_mp.modules.norms import NORMS_WITH_STATISTICS
from lightning_mp.policy.policy import PrecisionPolicy
from lightning_mp.precision.masters.half_range import check_half_range
from lightning_mp.precision.masters.store import MasterStore, distribute_like, refine


def keeps_float32(module: nn.Module) -> bool:
    """Whether a module's own weights stay fp32: those of norms with running statistics, which are few."""
    return isinstance(module, NORMS_WITH_STATISTICS)


def kept_by_policy(module: nn.Module, policy: PrecisionPolicy | None, dtype: torch.dtype) -> list[nn.Module]:
    """Modules whose weights a policy puts into another dtype than the 16-bit one."""
    if policy is None:
        return []
    names = policy.resolve(module).modules_not_used_in(dtype)
    return [part for name, part in named_modules(module) if name in names]


@dataclass(eq=False)
class HalfWeights:
    """A module's weights in 16 bit, for one run: what was cast, to be cast again or taken back."""

    module: nn.Module  # the model
    dtype: torch.dtype  # fp16 or bf16
    in_float32: Collection[nn.Module]  # modules in it whose own weights the policy keeps in fp32
    parameters: Sequence[nn.Parameter]  # those that are cast
    before: dict[nn.Parameter, Tensor]  # what they were
    values: dict[nn.Parameter, Tensor]  # what trainable ones were, or their masters of an earlier fit
    module_dtype: torch.dtype | None  # ``module.dtype`` before
    widened: Mapping[nn.Parameter, torch.dtype]  # the dtype of 16-bit weights that the policy keeps in fp32

    @classmethod
    def cast(
        cls, module: nn.Module, dtype: torch.dtype, in_float32: Collection[nn.Module], former: MasterStore | None
    ) -> Self:
        """Casts in place; weights that fp16 cannot hold are refused."""
        check_half_range(module, dtype, in_float32)
        module_dtype = getattr(module, "dtype", None)
        widened = {p: p.dtype for p in _own_parameters(in_float32) if p.dtype in HALF_DTYPES}
        before = cast_weights_(module, dtype, in_float32)
        values = {p: data for p, data in before.items() if p.requires_grad}
        if former is not None:
            values = {p: former.full_value(p, data) for p, data in values.items()}
        return cls(module, dtype, in_float32, list(before), before, values, module_dtype, widened)

    def cast_again(self) -> dict[nn.Parameter, Tensor]:
        """After :func:`uncast_weights_`; returns what the parameters were."""
        check_half_range(self.module, self.dtype, self.in_float32)
        with warnings.catch_warnings():  # it was said at set-up
            warnings.filterwarnings("ignore", message="MasterWeightsPrecision stores only fp32 weights")
            return cast_weights_(self.module, self.dtype, self.in_float32)

    def take_trained(self) -> tuple[dict[nn.Parameter, Tensor], set[nn.Parameter]]:
        """The first values of masters, and which weights were 16 bit; from then on nothing is restored."""
        values, self.values = self.values, {}
        were_16_bit = {parameter for parameter in values if self.before[parameter].dtype != torch.float32}
        self.before, self.module_dtype = {}, None
        return values, were_16_bit

    def restore(self) -> None:
        """After an evaluation, or a set-up that failed: the next one starts from the same weights."""
        before, self.before = self.before, {}
        restore_weights_(self.module, before, self.module_dtype)

    def read_widened(self, weights: Mapping[str, Any]) -> None:
        """Takes a checkpoint's fp32 weights where they were loaded in 16 bit before the policy widened them."""
        for name, parameter in self.module.named_parameters():
            value = weights.get(name)
            if parameter in self.widened and isinstance(value, Tensor) and not isinstance(parameter, DTensor):
                refined = refine(parameter.detach().to(self.widened[parameter]), value.to(parameter.device))
                parameter.data.copy_(refined)


def cast_weights_(
    module: nn.Module, dtype: torch.dtype, in_float32: Collection[nn.Module] = ()
) -> dict[nn.Parameter, Tensor]:
    """Casts a module's weights in place; parameters stay the same objects.

    Cast are fp32, fp16 and bf16 parameters, and buffers that weights are computed with (those of parametrizations such
    as ``spectral_norm``). All other buffers, the weights of norms with running statistics (:func:`keeps_float32`),
    parameters of other dtypes (fp64, complex) and the states of torchmetrics stay as they are.

    Example:
        >>> import torch
        >>> layer = torch.nn.Linear(2, 1)
        >>> before = cast_weights_(layer, torch.bfloat16)
        >>> layer.weight.dtype, before[layer.weight].dtype
        (torch.bfloat16, torch.float32)
    """
    held = {parameter: parameter.data for parameter in module.parameters()}
    buffers = [
        (owner, name, buffer) for owner in module.modules() for name, buffer in owner.named_buffers(recurse=False)
    ]
    widened = _own_parameters(in_float32)
    kept = widened | _own_parameters(owner for owner in module.modules() if keeps_float32(owner))
    with_weights = _buffers_of_weights(module, kept)
    other = {name: p.dtype for name, p in module.named_parameters() if p.dtype not in CAST_DTYPES}
    if other:
        rank_zero_warn(
            f"MasterWeightsPrecision stores only fp32 weights in {dtype}. These keep their dtype and have"
            f" no masters: {other}."
        )
    # `to` and not `parameter.data =`: modules that override `_apply` (RNNs, FSDP2) need it.
    _to(module, dtype)
    for parameter, data in held.items():
        if data.dtype not in CAST_DTYPES:
            _put_back(parameter, data)
        elif parameter in kept:
            _put_back(parameter, data.float() if parameter in widened else data)
    for owner, name, buffer in buffers:
        if (owner, name) not in with_weights:
            setattr(owner, name, buffer)
    _report_units(module, kept)
    return {p: data for p, data in held.items() if p not in kept and data.dtype in CAST_DTYPES}


def restore_weights_(module: nn.Module, before: Mapping[nn.Parameter, Tensor], dtype: torch.dtype | None) -> None:
    """Undoes :func:`cast_weights_`, for weights that were not trained.

    Elements that have changed since, as after loading a checkpoint, keep their values.
    """
    values = {}
    for parameter, data in before.items():
        if is_lazy(parameter) or data.dtype == parameter.dtype:
            continue
        if data.shape != parameter.shape:  # it was lazy
            values[parameter] = parameter.detach().to(data.dtype)
            continue
        working, value = (local_shard(tensor.detach()) for tensor in (parameter, data.to(parameter.device)))
        same = value.to(working.dtype) == working
        full = value if same.all() else torch.where(same, value, working).to(data.dtype)
        values[parameter] = distribute_like(full, parameter)
    uncast_weights_(module, values)
    if dtype is None:
        return
    parameters = {parameter: parameter.data for parameter in module.parameters()}
    buffers = [(owner, name, b) for owner in module.modules() for name, b in owner.named_buffers(recurse=False)]
    _to(module, dtype)  # for `module.dtype`, which can be set in no other way
    for parameter, data in parameters.items():
        if parameter.dtype != data.dtype:
            _put_back(parameter, data)
    for owner, name, buffer in buffers:
        setattr(owner, name, buffer)
    _report_units(module, parameters.keys())


def uncast_weights_(module: nn.Module, values: Mapping[nn.Parameter, Tensor]) -> None:
    """Gives parameters other values, in the dtype that these have; their gradients are dropped."""
    for parameter, value in values.items():
        parameter.grad = None
        _put_back(parameter, value)
    _report_units(module, values.keys())


def _report_units(module: nn.Module, changed: Collection[nn.Parameter]) -> None:
    for unit in module.modules():
        if isinstance(unit, FSDPModule) and any(parameter in changed for parameter in unit.parameters()):
            unit.to(next(unit.parameters()).device)  # changes nothing, but lets FSDP2 find what was put back


def unit_of_two_dtypes(module: nn.Module, in_float32: Collection[nn.Module]) -> tuple[str, list[str], list[str]] | None:
    """The first FSDP2 unit whose trainable weights would not all have one dtype, which FSDP2 does not take."""
    kept = _own_parameters(in_float32)
    owners: dict[nn.Parameter, str] = {}
    for name, part in module.named_modules():
        if isinstance(part, FSDPModule):
            owners |= dict.fromkeys(module.get_submodule(name).parameters(), name)
    for unit in dict.fromkeys(owners.values()):
        names = {p: name for name, p in module.named_parameters() if owners.get(p) == unit and p.requires_grad}
        wide = [name for p, name in names.items() if p in kept]
        narrow = [name for p, name in names.items() if p not in kept]
        if wide and narrow:
            return unit, wide, narrow
    return None


def _to(module: nn.Module, dtype: torch.dtype) -> None:
    """``module.to(dtype)``, but a metric's states keep their dtype, as they do in its ``half()`` and ``float()``."""
    metrics = [part for part in module.modules() if isinstance(part, Metric)]
    with ExitStack() as stack:
        for metric in metrics:
            # A sum in bf16 stops at 256. What a metric holds as a module (a feature extractor) is cast.
            stack.callback(Patch(metric, "_apply", partial(nn.Module._apply, metric)).undo)
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", message="Casting complex values to real")
        module.to(dtype)


def _own_parameters(modules: Iterable[nn.Module]) -> set[nn.Parameter]:
    return {parameter for module in modules for parameter in module.parameters(recurse=False)}


def _buffers_of_weights(module: nn.Module, kept: Collection[nn.Parameter]) -> set[tuple[nn.Module, str]]:
    """Buffers that torch's parametrizations, and its older ``spectral_norm``, multiply weights with that are cast."""
    found = set()
    for owner in module.modules():
        if parametrize.is_parametrized(owner):
            for parametrization in cast(nn.ModuleDict, owner.parametrizations).values():
                if any(p not in kept for p in parametrization.parameters(recurse=False)):
                    parts = parametrization.children()
                    found |= {(part, name) for child in parts for part in child.modules() for name in _own(part)}
        for name, parameter in owner.named_parameters(recurse=False):
            if name.endswith("_orig") and parameter not in kept:
                vectors = {f"{name.removesuffix('_orig')}_{vector}" for vector in "uv"}
                found |= {(owner, buffer) for buffer in vectors.intersection(_own(owner))}
    return found


def _own(module: nn.Module) -> set[str]:
    return {name for name, _ in module.named_buffers(recurse=False)}


def _put_back(parameter: nn.Parameter, data: Tensor) -> None:
    if isinstance(data, DTensor):
        torch.utils.swap_tensors(parameter, nn.Parameter(data, parameter.requires_grad))
    else:
        parameter.data = data
