"""A model as a precision plugin makes it, of tensors that have a shape, a dtype and no data."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_mp.core.precisions import PrecisionSpec
from lightning_mp.modules.names import named_modules
from lightning_mp.modules.norms import NORMS_WITH_STATISTICS
from lightning_mp.modules.stand_ins import module_with
from lightning_mp.policy.applied import AppliedPolicy
from lightning_mp.policy.float8_layers import choose_float8_layers
from lightning_mp.policy.operations import KNOWN_OPERATIONS, by_autocast, operations_named
from lightning_mp.policy.policy import PrecisionPolicy

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_FP8_MAX = torch.finfo(torch.float8_e4m3fn).max


def stand_in_for(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """An empty tensor of the same shape; inside of a fake tensor mode it has no memory."""
    if tensor.layout != torch.strided:
        raise ValueError(f"estimate_memory() was given a {tensor.layout} tensor. Pass dense tensors.")
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype or tensor.dtype, device="cpu")


class StandInModel:
    """A copy of a module with stand-ins for its tensors, cast and wrapped as the plugin of a precision would.

    Make it inside of a fake tensor mode.
    """

    def __init__(
        self,
        module: nn.Module,
        precision: PrecisionSpec,
        *,
        policy: PrecisionPolicy | None,
        device_type: str,
    ) -> None:
        self._precision = precision
        kept = _kept_in_float32(module, precision, policy)
        self.module = module_with(module, lambda tensor: stand_in_for(tensor, kept(tensor)))
        chosen = choose_float8_layers(self.module) if precision.fp8 else []
        fp8 = [layer.module for layer in chosen if layer.skipped_because is None]
        for layer in fp8:
            layer.forward = partial(_fp8_linear, layer)  # type: ignore[method-assign]
        self._policy: AppliedPolicy | None = None
        rules = _rules(policy, device_type) if precision.autocast else policy
        if rules is not None:
            self._policy = AppliedPolicy(rules, self.module, "cpu", fp8)

    @contextmanager
    def forward_context(self) -> Iterator[None]:
        """What a plugin puts around a forward."""
        dtype = self._precision.compute_dtype
        casts = self._precision.autocast or self._policy is not None
        with ExitStack() as stack:
            if casts:
                stack.enter_context(torch.autocast("cpu", dtype, cache_enabled=self._precision.cache_weights))
            elif self._precision.weight_dtype != torch.float32:
                stack.callback(torch.set_default_dtype, torch.get_default_dtype())
                torch.set_default_dtype(dtype)
            if self._policy is not None:
                stack.enter_context(self._policy.in_force(dtype))
            yield

    @contextmanager
    def backward_context(self) -> Iterator[None]:
        """What a plugin puts around a backward: rules hold for what a checkpoint runs again."""
        with ExitStack() as stack:
            if self._policy is not None:
                stack.enter_context(self._policy.in_force(self._precision.compute_dtype))
            yield

    def cast_input(self, tensor: Tensor) -> Tensor:
        """A stand-in for a tensor of the batch, in the format of 16-bit weights."""
        narrow = self._precision.weight_dtype != torch.float32 and self._policy is None
        return stand_in_for(tensor, self._precision.weight_dtype if narrow and tensor.is_floating_point() else None)


def _kept_in_float32(
    module: nn.Module, precision: PrecisionSpec, policy: PrecisionPolicy | None
) -> Callable[[Tensor], torch.dtype | None]:
    """The format in which a tensor of the module is held; None for its own."""
    if precision.weight_dtype == torch.float32:
        return lambda tensor: None
    has_masters = precision.master_bytes > 0
    ruled = policy.resolve(module).modules_not_used_in(precision.compute_dtype) if policy is not None else ()
    kept = {
        id(parameter)
        for name, part in named_modules(module)
        if isinstance(part, NORMS_WITH_STATISTICS) or name in ruled
        for parameter in part.parameters(recurse=False)
    }
    buffers = {id(buffer) for buffer in module.buffers()}

    def dtype_of(tensor: Tensor) -> torch.dtype | None:
        if tensor.dtype not in _FLOATS:
            return None
        stays = has_masters and id(tensor) in kept | buffers
        return None if stays else precision.weight_dtype

    return dtype_of


def _rules(policy: PrecisionPolicy | None, device_type: str) -> PrecisionPolicy | None:
    """The rules of the policy, and what autocast of the device type does beyond that of the CPU, where this runs."""
    rules: list[Any] = list(policy.rules) if policy is not None else []
    ruled = {name for rule in rules if rule.kind == "op" for name in operations_named(str(rule.pattern))}
    rules += [
        (f"op:{name}", "fp32")
        for name in sorted(KNOWN_OPERATIONS - ruled)
        if by_autocast(name, device_type) == "fp32" and by_autocast(name, "cpu") != "fp32"
    ]
    return PrecisionPolicy(rules) if rules else None


# -- fp8 ---------------------------------------------------------------------------------------------------------------


def _fp8_linear(layer: nn.Linear, x: Tensor) -> Tensor:
    product: Callable[..., Tensor] = _Fp8Product.apply
    low = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype
    output = product(x.to(low), layer.weight.t())
    return output if layer.bias is None else output + layer.bias.to(output.dtype)


class _Fp8Product(torch.autograd.Function):
    """Saves and makes what torchao's fp8 product does: the inputs in their own format, rounded copies on the way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _product(_rounded(x), _rounded(weight), x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        of_input = _product(_rounded(gradient), _rounded(weight.t()), x.dtype)
        flat = gradient.reshape(-1, gradient.shape[-1])
        of_weight = _product(_rounded(flat.t()), _rounded(x.reshape(-1, x.shape[-1])), x.dtype)
        return of_input, of_weight.t()


def _rounded(tensor: Tensor) -> Tensor:
    scaled = tensor.to(torch.float32) * tensor.abs().amax(-1, keepdim=True).float()
    return scaled.clamp(-_FP8_MAX, _FP8_MAX).to(torch.float8_e4m3fn)


def _product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty(*left.shape[:-1], right.shape[-1], dtype=dtype, device=left.device)
