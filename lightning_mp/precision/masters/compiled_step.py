"""One step of AdamW, SGD or Lion in one compiled loop per parameter.

Unscale and clip, update, master and weight are one function under ``torch.compile``. It reads and writes each tensor
once: with AdamW 28 bytes per parameter where masters are fp32, and 26 where they are remainders. Sizes, rates and
factors are no constants of the compiled code, so one compilation serves all parameters and steps.

Numbers are those of the optimizers to the bit on CPUs with AVX2 or AVX-512, where torch's own kernels multiply and add
without rounding in between, as the compiled code does. One operation differs: the square root in AdamW's denominator is
rounded correctly here, and is off by one unit in the last place now and then in torch's kernel, which calls MKL. Other
CPUs and GPUs were not compared.
"""

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.optim import SGD, AdamW, Optimizer

from lightning_mp.core.precisions import HALF_DTYPES
from lightning_mp.gradients.gradient_ops import local_shard
from lightning_mp.precision.masters.bf16_remainder import join, split
from lightning_mp.precision.masters.store import HALF_MAX, MasterStore, distribute_like

# A new master and new states of a master, its gradient, its states, and numbers that change from step to step, in the
# order of operations of the optimizers themselves.
Update = Callable[[Tensor, Tensor, Sequence[Tensor], Sequence[Tensor]], tuple[Tensor, list[Tensor]]]


def _fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """``a * b + c`` with one rounding; :class:`CompiledStep` registers the operation."""
    result: Tensor = torch.ops.prims.fma(a, b, c)
    return result


def _lerp(start: Tensor, end: Tensor, weight: Tensor) -> Tensor:
    """As ``torch.lerp``, which begins at the nearer end."""
    is_small = weight < 0.5
    return _fma(torch.where(is_small, weight, weight - 1), end - start, torch.where(is_small, start, end))


def _adamw(master: Tensor, gradient: Tensor, states: Sequence[Tensor], numbers: Sequence[Tensor]) -> Any:
    first, second = states
    decay, new_share, kept_share, new_square, root, epsilon, rate = numbers
    first = _lerp(first, gradient, new_share)
    second = _fma(new_square * gradient, gradient, second * kept_share)
    return master * decay - rate * first / (second.sqrt() / root + epsilon), [first, second]


def _adamw_numbers(group: Mapping[str, Any], state: dict[str, Any]) -> list[float]:
    state.setdefault("step", torch.zeros((), dtype=torch.float32)).add_(1)
    steps, rate, (beta1, beta2) = float(state["step"]), float(group["lr"]), group["betas"]
    root = math.sqrt(1 - beta2**steps)
    decay = 1 - rate * group["weight_decay"]
    return [decay, 1 - beta1, beta2, 1 - beta2, root, group["eps"], rate / (1 - beta1**steps)]


def _sgd(master: Tensor, gradient: Tensor, states: Sequence[Tensor], numbers: Sequence[Tensor]) -> Any:
    decay, momentum, new_share, looked_ahead, rate = numbers
    gradient = _fma(decay, master, gradient)
    if not states:
        return _fma(-rate, gradient, master), []
    buffer = _fma(new_share, gradient, momentum * states[0])
    # Nesterov's looks ahead from the gradient, plain momentum is the buffer.
    ahead = torch.where(looked_ahead > 0, _fma(looked_ahead, buffer, gradient), buffer)
    return _fma(-rate, ahead, master), [buffer]


def _sgd_numbers(group: Mapping[str, Any], state: dict[str, Any]) -> list[float]:
    is_first = state.get("momentum_buffer") is None
    new_share = 1.0 if is_first else 1 - group["dampening"]
    looked_ahead = group["momentum"] if group["nesterov"] else 0.0
    return [group["weight_decay"], group["momentum"], new_share, looked_ahead, float(group["lr"])]


def _lion(master: Tensor, gradient: Tensor, states: Sequence[Tensor], numbers: Sequence[Tensor]) -> Any:
    (average,) = states
    decay, beta1, new_share1, beta2, new_share2, rate = numbers
    update = _fma(new_share1, gradient, average * beta1).sign()
    return master * decay - rate * update, [_fma(new_share2, gradient, average * beta2)]


def _lion_numbers(group: Mapping[str, Any], state: dict[str, Any]) -> list[float]:
    rate, (beta1, beta2) = float(group["lr"]), group["betas"]
    return [1 - rate * group["weight_decay"], beta1, 1 - beta1, beta2, 1 - beta2, rate]


_Rule = tuple[Update, Callable[[Mapping[str, Any], dict[str, Any]], list[float]], Callable[[Any], tuple[str, ...]]]
# With the names of the states.
_TORCH_RULES: dict[type[Optimizer], _Rule] = {
    AdamW: (_adamw, _adamw_numbers, lambda group: ("exp_avg", "exp_avg_sq")),
    SGD: (_sgd, _sgd_numbers, lambda group: ("momentum_buffer",) if group["momentum"] else ()),
}
_LION: _Rule = (_lion, _lion_numbers, lambda group: ("exp_avg",))
#: Settings that the compiled function has no code for.
_UNSUPPORTED = ("amsgrad", "maximize", "foreach", "fused", "capturable", "differentiable")


def _rule_of(optimizer: Optimizer) -> _Rule | None:
    kind = type(optimizer)
    if f"{kind.__module__}.{kind.__name__}" == "lion_pytorch.lion_pytorch.Lion":
        return _LION
    return _TORCH_RULES.get(kind)


def check_compiled_step(optimizer: Optimizer, storage: str) -> None:
    """Refuses what cannot be compiled."""
    name = type(optimizer).__name__
    if storage == "24bit":
        raise MisconfigurationException(
            "MasterWeightsPrecision(compiled_step=True, storage='24bit') is not supported. Use storage='remainder' or"
            " 'fp32', or leave compiled_step out."
        )
    if _rule_of(optimizer) is None:
        raise MisconfigurationException(
            f"MasterWeightsPrecision(compiled_step=True) has no compiled step for {name}: torch.optim.AdamW,"
            " torch.optim.SGD and lion_pytorch.Lion have one. Use one of these, or leave compiled_step out."
        )
    given = [key for key in _UNSUPPORTED if any(group.get(key) for group in optimizer.param_groups)]
    given += [key for key in ("decoupled_wd",) if getattr(optimizer, key, False)]
    if "triton" in getattr(getattr(optimizer, "update_fn", None), "__module__", ""):
        given.append("use_triton")
    if given:
        raise MisconfigurationException(
            f"MasterWeightsPrecision(compiled_step=True) makes the step of {name} itself and does not support"
            f" {', '.join(f'{key}=True' for key in given)}. Leave that out, or compiled_step."
        )


def _step(
    update: Update,
    has_remainder: bool,
    weight: Tensor,
    kept: Tensor,
    gradient: Tensor,
    factor: Tensor,
    states: Sequence[Tensor],
    numbers: Sequence[Tensor],
) -> None:
    master = join(weight, kept) if has_remainder else kept
    # torch's own kernels take their numbers in the precision of the tensors.
    master, new_states = update(master, gradient.float() * factor, states, [n.float() for n in numbers])
    for state, new in zip(states, new_states, strict=True):
        state.copy_(new)
    if has_remainder:
        new_weight, remainder = split(master)
        kept.copy_(remainder)
        weight.copy_(new_weight)
        return
    if weight.dtype == torch.float16:
        master = master.clamp(-HALF_MAX, HALF_MAX)
    kept.copy_(master)
    weight.copy_(master)


def _flat(tensor: Tensor) -> Tensor:
    """One axis over dense memory, so that parameters of any shape share the compiled code."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    # Not as a view: code is compiled for the shape of a view's base, too.
    return tensor.as_strided((tensor.numel(),), (1,)).data if last + 1 == tensor.numel() else tensor


class CompiledStep:
    """Steps the parameters of an optimizer that have masters."""

    def __init__(self, optimizer: Optimizer, store: MasterStore) -> None:
        rule = _rule_of(optimizer)
        assert rule is not None
        self._optimizer = optimizer
        self._store = store
        self._update, self._numbers, self._state_names = rule
        importlib.import_module("torch._inductor.inductor_prims")  # registers torch.ops.prims.fma
        self._run = torch.compile(_step, dynamic=True, fullgraph=True)
        self._try_out()

    @torch.no_grad()
    def _try_out(self) -> None:
        """Compiles for one parameter of each device, so that a compiler that is missing shows before the first step."""
        groups = self._optimizer.param_groups
        places = {p.device: (group, p) for group in groups for p in group["params"] if p in self._store}
        for group, like in places.values():
            weight = torch.zeros(8, dtype=like.dtype, device=like.device)
            kept = torch.zeros_like(weight, dtype=self._store.in_place([like])[0].dtype)
            gradient = torch.zeros_like(weight)
            states = {name: torch.zeros_like(weight, dtype=torch.float32) for name in self._state_names(group)}
            try:
                if torch.compile(lambda x: x + torch.compiler.is_compiling(), backend="eager")(torch.zeros(1)) == 0:
                    raise RuntimeError("torch.compile is switched off")
                self._step_one(group, {}, weight, kept, gradient, torch.ones((), device=like.device), states)
            except Exception as error:
                raise MisconfigurationException(
                    f"MasterWeightsPrecision(compiled_step=True) could not compile a step for {like.device.type}, which"
                    " takes a C++ compiler on CPUs and Triton on GPUs. Install it, or leave compiled_step out."
                ) from error

    @torch.no_grad()
    def step(self, parameters: Mapping[Tensor, Mapping[str, Any]], factor: Tensor | None) -> None:
        """Steps parameters, each with its group, with their gradients; 16-bit ones times the factor."""
        kept = self._store.in_place(list(parameters))
        for (parameter, group), own in zip(parameters.items(), kept, strict=True):
            weight = local_shard(parameter.detach())
            assert parameter.grad is not None
            if parameter.grad.layout != torch.strided:
                raise RuntimeError("MasterWeightsPrecision(compiled_step=True) cannot step with sparse gradients.")
            gradient = local_shard(parameter.grad.detach())
            if gradient.stride() != weight.stride():
                gradient = torch.empty_like(weight, dtype=gradient.dtype).copy_(gradient)
            times = factor if factor is not None and gradient.dtype in HALF_DTYPES else None
            if times is None:
                times = torch.ones((), device=weight.device)
            state = self._optimizer.state[parameter]
            names = self._state_names(group)
            held = {name: local_shard(state[name]) for name in names if state.get(name) is not None}
            states = {
                name: held[name] if name in held else torch.zeros_like(weight, dtype=torch.float32) for name in names
            }
            for name, value in held.items():
                if value.stride() != weight.stride():
                    states[name] = torch.empty_like(weight, dtype=torch.float32).copy_(value)
            if weight.numel():
                self._step_one(group, state, weight, own, gradient, times, states)
            for name, value in states.items():
                if value is not held.get(name):
                    state[name] = distribute_like(value, parameter)
        self._store.written(list(parameters))

    def _step_one(
        self,
        group: Mapping[str, Any],
        state: dict[str, Any],
        weight: Tensor,
        kept: Tensor,
        gradient: Tensor,
        factor: Tensor,
        states: Mapping[str, Tensor],
    ) -> None:
        numbers = [torch.tensor(number, dtype=torch.float64) for number in self._numbers(group, state)]
        self._run(
            self._update,
            kept.dtype == torch.int16,
            _flat(weight),
            _flat(kept),
            _flat(gradient),
            factor.float(),
            [_flat(state) for state in states.values()],
            numbers,
        )
        torch.autograd.graph.increment_version((weight, kept, *states.values()))
