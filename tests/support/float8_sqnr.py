"""How much fp8 costs in accuracy: signal to quantisation noise, layer by layer."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_mp.training.policy.float8_layers import Float8Layer


def sqnr_db(reference: Tensor, approximation: Tensor) -> float:
    """``10 log10(sum(reference^2) / sum((reference - approximation)^2))`` in decibels, computed in fp64.

    Infinite for equal tensors; NaN if the approximation has a NaN or both sums are 0. With m mantissa bits, evenly
    spread over [1, 2), rounding adds noise of ``4^-m / 28`` of the signal (a variance of ``step^2 / 12``, a mean square
    of 7/3): 32.5 dB for e4m3, 26.5 for e5m2, 56.6 for bf16. In a product the noises of both factors add.
    """
    signal = reference.double().square().sum().item()
    noise = (reference.double() - approximation.double()).square().sum().item()
    if noise == 0 and signal > 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal > 0 and noise > 0 and math.isfinite(noise) else math.nan


@dataclass(frozen=True)
class LayerSQNR:
    """Signal to quantisation noise of a linear layer's three matrix products, in dB."""

    name: str
    output_db: float  # of ``input @ weight^T``
    input_gradient_db: float  # of ``grad_output @ weight``
    weight_gradient_db: float  # of ``grad_output^T @ input``


def layer_sqnr(linear: nn.Linear, x: Tensor, grad_output: Tensor, name: str = "") -> LayerSQNR:
    """Compares a layer's forward and backward, under bf16 autocast, with the same products in fp64."""
    weight = linear.weight.detach().double()
    bias = None if linear.bias is None else linear.bias.detach().double()
    exact_x = x.detach().double()
    flat_x, flat_grad = exact_x.flatten(0, -2), grad_output.detach().double().flatten(0, -2)
    leaf = x.detach().clone().requires_grad_()
    with torch.autocast(x.device.type, dtype=torch.bfloat16), torch.enable_grad():
        output = linear(leaf)
    wanted = [leaf, linear.weight] if linear.weight.requires_grad else [leaf]
    gradients = torch.autograd.grad(output, wanted, grad_output.detach().to(output.dtype))
    return LayerSQNR(
        name,
        sqnr_db(F.linear(exact_x, weight, bias), output.detach()),
        sqnr_db((flat_grad @ weight).view_as(exact_x), gradients[0]),
        sqnr_db(flat_grad.T @ flat_x, gradients[1]) if linear.weight.requires_grad else math.nan,
    )


def model_sqnr(layers: Sequence[Float8Layer], loss: Callable[[], Tensor]) -> list[LayerSQNR]:
    """Of every fp8 layer, on the inputs and gradients of its last use in one step; no gradient is touched."""
    inputs: dict[str, Tensor] = {}
    outputs: dict[str, Tensor] = {}

    def watch(name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        def hook(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            inputs[name], outputs[name] = args[0].detach(), output

        return hook

    chosen = {layer.name: layer.module for layer in layers if layer.skipped_because is None}
    handles = [module.register_forward_hook(watch(name)) for name, module in chosen.items()]
    try:
        value = loss()
    finally:
        for handle in handles:
            handle.remove()
    used = [name for name in chosen if name in outputs and outputs[name].requires_grad]
    gradients = torch.autograd.grad(value, [outputs[name] for name in used])
    return [
        layer_sqnr(chosen[name], inputs[name], gradient, name) for name, gradient in zip(used, gradients, strict=True)
    ]
