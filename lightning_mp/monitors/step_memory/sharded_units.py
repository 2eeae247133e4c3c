"""What FSDP2 gathers, frees and reduces in one forward and backward, unit by unit, on fake tensors.

The order is that of torch's ``fully_shard``. Parameters here represent what a unit has gathered; the optimizer holds
shards.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from math import ceil
from typing import Any, Literal, get_args

import torch
from lightning.fabric.utilities.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_mp.ground.core.nested_tensors import tensors_in
from lightning_mp.ground.core.precisions import PrecisionSpec
from lightning_mp.ground.modules.names import named_modules
from lightning_mp.monitors.step_memory.live_storages import LiveStorages, Part
from lightning_mp.training.policy.policy import PrecisionPolicy
from lightning_mp.training.policy.sharding_units import units_in_dtypes
from lightning_mp.training.policy.unit_selection import Shard, read_shard, unit_names

GradientSync = Literal["window", "micro_batch"]
SYNCS: tuple[GradientSync, ...] = get_args(GradientSync)
_REDUCED_DTYPE = torch.float32  # with every plugin of this package


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """How FSDP2 shards a model, and when it reduces gradients."""

    ranks: int
    units: Shard = "auto"
    sync: GradientSync = "micro_batch"


@dataclass(eq=False)
class _Unit:
    """What is gathered together, and where in a step it is."""

    modules: Sequence[nn.Module]
    parameters: list[nn.Parameter]
    is_cast: bool  # shards are cast to be gathered
    state: Literal["idle", "forward", "before backward", "after backward"] = "idle"
    to_run: list[nn.Module] = field(default_factory=list)  # of modules that are gathered together
    places: list[int] = field(default_factory=list)  # in the order of forwards
    is_gathered: bool = False
    buffer: Tensor | None = None  # what the ranks have sent, until it is copied to the parameters
    padding: Tensor | None = None  # of parameters that do not divide by the ranks
    summed: dict[nn.Parameter, Tensor] = field(default_factory=dict)  # whole gradients of earlier micro-batches


class ShardedUnits:
    """The units of a model of stand-ins, which gather and reduce while it runs.

    Create it in a fake tensor mode.

    Source:
        Zhao et al. 2023, arXiv:2304.11277; torch's ``distributed/fsdp/_fully_shard/_fsdp_param_group.py``.
    """

    def __init__(
        self,
        module: nn.Module,
        sharding: Sharding,
        precision: PrecisionSpec,
        policy: PrecisionPolicy | None,
        live: LiveStorages,
        *,
        on_gloo: bool,
        accumulates: bool,
    ) -> None:
        self._ranks, self._live, self._on_gloo = sharding.ranks, live, on_gloo
        keeps_whole = accumulates and sharding.sync == "window"
        self._micro_batches = (False, True) if keeps_whole else (True,)  # those to run, and whether each reduces
        #: Whether earlier micro-batches have left gradients on the shards.
        self.accumulates = accumulates and not keeps_whole
        self._reduces = True
        self._precision = precision
        self._units = list(_units_of(module, sharding.units, precision, policy))
        self._root = self._units[-1]
        self._forward_buffer: Tensor | None = None  # of the last unit, until the next one has gathered
        self._reduce_input: Tensor | None = None  # of the last unit, until the next one is reduced
        self._order: list[_Unit] = []
        self.shards: dict[int, nn.Parameter] = {}
        for unit in self._units:
            for parameter in unit.parameters:
                self.shards[id(parameter)] = self._shard_of(parameter, is_cast=unit.is_cast)
            if keeps_whole:
                learning = [parameter for parameter in unit.parameters if parameter.requires_grad]
                unit.summed = {p: self._made("gradients", p.numel(), _REDUCED_DTYPE) for p in learning}
            if unit is not self._root:
                self._hook(unit)

    # -- what the optimizer holds --------------------------------------------------------------------------------------

    def _shard_of(self, parameter: nn.Parameter, *, is_cast: bool) -> nn.Parameter:
        dtype = torch.float32 if is_cast else parameter.dtype
        is_master = is_cast and parameter.requires_grad and self._precision.master_bytes > 0
        if is_master and self._precision.master_bytes < torch.float32.itemsize:
            dtype = self._precision.compute_dtype  # the optimizer's stand-in adds the rest
        shape = (ceil(parameter.shape[0] / self._ranks), *parameter.shape[1:]) if parameter.ndim else (1,)
        shard = nn.Parameter(torch.empty(shape, dtype=dtype, device="cpu"), requires_grad=parameter.requires_grad)
        self._live.add("masters" if is_master and dtype == torch.float32 else "weights", [shard])
        return shard

    def use_shards(self, optimizer: Optimizer) -> None:
        """Gives an optimizer of the model's parameters their shards; states that it has made are those of shards."""
        for group in optimizer.param_groups:
            for index, parameter in enumerate(group["params"]):
                shard = self.shards.get(id(parameter), parameter)
                group["params"][index] = shard
                state = optimizer.state.pop(parameter, None)
                if state is not None:
                    optimizer.state[shard] = {
                        name: value.new_empty(shard.shape)
                        if isinstance(value, Tensor) and value.shape == parameter.shape
                        else value
                        for name, value in state.items()
                    }

    @staticmethod
    def _give_gradient(shard: nn.Parameter, gradient: Tensor) -> None:
        shard.grad_dtype = gradient.dtype
        shard.grad = gradient

    def _reduced_dtype(self, parameter: nn.Parameter) -> torch.dtype:
        """Of a shard's gradient: that of the parameter itself."""
        has_own = not (self._precision.autocast or self._precision.master_bytes)
        return parameter.dtype if has_own else torch.float32

    # -- forward -------------------------------------------------------------------------------------------------------

    def _hook(self, unit: _Unit) -> None:
        def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
            if not unit.to_run:
                unit.to_run.extend(unit.modules)
            return self._before_forward(unit, args, kwargs)

        def after(module: nn.Module, args: Any, output: Any) -> None:
            if module in unit.to_run:
                unit.to_run.remove(module)
                if not unit.to_run:
                    self._after_forward(unit, output)

        for module in unit.modules:
            module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
            module.register_forward_hook(after)

    def run(self, step: Callable[[nn.Module, Any], Any], module: nn.Module, inputs: Any) -> Any:
        """A step inside of which what is in no other unit is gathered."""
        self._before_forward(self._root, (), {})
        output = step(module, inputs)
        for unit in reversed(self._units):
            if unit.to_run:  # one of its modules was not called
                unit.to_run.clear()
                self._after_forward(unit, output)
        self._after_forward(self._root, output)
        self._forward_buffer = None
        return output

    def _before_forward(self, unit: _Unit, args: Any, kwargs: Any) -> Any:
        if unit.state == "before backward":  # a checkpoint runs it again
            self._gather(unit)
            self._copy_out(unit)
            return args, kwargs
        enters, unit.state = unit.state != "forward", "forward"
        self._gather(unit)
        self._copy_out(unit)
        inputs = [tensor for tensor in tensors_in((args, kwargs)) if tensor.requires_grad]
        if not (enters and inputs and torch.is_grad_enabled()):
            return args, kwargs
        after: Callable[..., tuple[Tensor, ...]] = _AfterBackward.apply
        marked = iter(after(lambda: self._after_backward(unit), *inputs))
        return apply_to_collection((args, kwargs), Tensor, lambda x: next(marked) if x.requires_grad else x)

    def _after_forward(self, unit: _Unit, output: Any) -> None:
        if unit.state == "before backward":
            return
        if self._live.phase == "forward":
            if unit is not self._root:
                self._free(unit)
            if unit.parameters:
                unit.places.append(len(self._order))
                self._order.append(unit)
        unit.state = "idle"
        if torch.is_grad_enabled():
            for tensor in tensors_in(output):
                if tensor.requires_grad:
                    tensor.register_hook(lambda gradient: self._before_backward(unit))

    # -- backward ------------------------------------------------------------------------------------------------------

    def _before_backward(self, unit: _Unit) -> None:
        if unit.state == "before backward":
            return
        unit.state = "before backward"
        self._gather(unit)
        self._copy_out(unit)
        if unit.places and (place := unit.places.pop()) > 0:
            self._gather(self._order[place - 1])  # the next one, while this one runs

    def _after_backward(self, unit: _Unit) -> None:
        unit.state = "after backward"
        for parameter in unit.summed:  # which the gradient is added to
            parameter.grad = None
        gradients = [p for p in unit.parameters if p.grad is not None or p in unit.summed]
        self._free(unit)
        if not self._reduces:
            return
        self._reduce_input = None
        if gradients:
            self._reduce(unit, gradients)

    def _reduce(self, unit: _Unit, parameters: Sequence[nn.Parameter]) -> None:
        numel = sum(self.shards[id(p)].numel() for p in parameters)
        self._reduce_input = self._made("communication buffers", self._ranks * numel, _REDUCED_DTYPE)
        for parameter in parameters:
            parameter.grad = None
        unit.summed.clear()
        reduced = self._made("communication buffers", numel, _REDUCED_DTYPE)
        self._communicate(self._reduce_input.nbytes)
        dtype = self._reduced_dtype(parameters[0])
        if dtype != _REDUCED_DTYPE:
            reduced = self._made("communication buffers", numel, dtype)
        start = 0
        for parameter in parameters:
            shard = self.shards[id(parameter)]
            if shard.grad is None:
                self._give_gradient(shard, reduced[start : start + shard.numel()].view(shard.shape))
                self._live.add(None if self.accumulates else "gradients", [reduced])
            start += shard.numel()
        self._live.sample()

    def micro_batches(self) -> Iterator[AbstractContextManager[None]]:
        """What to enter around each forward and backward."""
        return map(self._reducing, self._micro_batches)

    @contextmanager
    def _reducing(self, reduces: bool) -> Iterator[None]:
        """Around forward and backward of a micro-batch; at its end units are reduced whose inputs need no gradient."""
        self._reduces = reduces
        yield
        for unit in (self._root, *self._units[:-1]):
            if unit.state != "after backward":
                self._after_backward(unit)
            unit.state, unit.buffer = "idle", None
            unit.places.clear()
        self._order.clear()
        self._reduce_input = None
        self._live.sample()

    # -- collective operations -----------------------------------------------------------------------------------------

    def _gather(self, unit: _Unit) -> None:
        """Begins to gather a unit."""
        if unit.is_gathered or unit.buffer is not None or not unit.parameters:
            return
        part = sum(self.shards[id(p)].numel() * p.itemsize for p in unit.parameters) if self._ranks > 1 else 0
        low = self._made("communication buffers", part if unit.is_cast else 0)
        unit.buffer = self._made("communication buffers", self._ranks * part)
        self._communicate(unit.buffer.nbytes)
        del low

    def _copy_out(self, unit: _Unit) -> None:
        """Waits until a unit is gathered."""
        if unit.buffer is None:
            return
        if unit.state == "forward":
            self._forward_buffer = None
        whole = self._ranks * sum(self.shards[id(p)].numel() * p.itemsize for p in unit.parameters)
        self._live.add("gathered weights", unit.parameters)
        unit.padding = self._made("gathered weights", whole - sum(p.nbytes for p in unit.parameters))
        if unit.state == "forward":
            self._forward_buffer = unit.buffer
        unit.buffer, unit.is_gathered = None, True

    def _free(self, unit: _Unit) -> None:
        self._live.add(None, unit.parameters)
        unit.padding, unit.is_gathered = None, False

    def _communicate(self, size_bytes: int) -> None:
        """gloo works on a copy."""
        if self._on_gloo and self._ranks > 1:
            self._made("communication buffers", size_bytes)

    def _made(self, part: Part, numel: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        tensor = torch.empty(numel, dtype=dtype, device="cpu")
        self._live.add(part, [tensor])
        self._live.sample()
        return tensor


class _AfterBackward(torch.autograd.Function):
    """Calls a function when the gradients of its inputs are there."""

    @staticmethod
    @override
    def forward(ctx: Any, call: Callable[[], None], *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        return inputs

    @staticmethod
    @override
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        ctx.call()
        return None, *gradients


def gathered_dtype_of(
    module: nn.Module, units: Shard, precision: PrecisionSpec, policy: PrecisionPolicy | None
) -> Callable[[Tensor], torch.dtype | None]:
    """The dtype in which FSDP2 gathers a tensor of the module; None for its own."""
    low = {
        id(parameter)
        for unit in _units_of(module, units, precision, policy)
        if unit.is_cast
        for parameter in unit.parameters
    }
    return lambda tensor: precision.compute_dtype if id(tensor) in low else None


def _units_of(
    module: nn.Module, units: Shard, precision: PrecisionSpec, policy: PrecisionPolicy | None
) -> Iterator[_Unit]:
    """The units of a model; the last one has what is in no other."""
    modules: Mapping[str, nn.Module] = dict(named_modules(module))
    computes_low = precision.autocast or precision.master_bytes > 0
    found = units_in_dtypes(
        module,
        [*unit_names(module, read_shard(units)), ""],
        policy,
        precision.compute_dtype if computes_low else None,
        has_masters=precision.master_bytes > 0,
    )
    taken: set[int] = set()
    for unit in found:
        parts = [modules[name] for name in unit.modules]
        own = list(dict.fromkeys(p for part in parts for p in part.parameters() if id(p) not in taken))
        taken.update(map(id, own))
        yield _Unit(parts, own, is_cast=unit.mixed_precision.param_dtype is not None)
