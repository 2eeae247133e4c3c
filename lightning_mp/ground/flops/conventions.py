"""Floating-point operations per training token, under named conventions, and the MFU that follows.

Conventions differ by 10 to 30% on one model, so a figure without its convention means nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from types import MappingProxyType

from lightning_mp.ground.core.arguments import positive_quantity, quantity_from, whole_quantity
from lightning_mp.ground.flops.chinchilla import FLOPS_PER_PARAMETER_AND_TOKEN

_FLOPS_OF_WEIGHT_GRADIENT = 2


@dataclass(frozen=True, slots=True)
class FlopsConvention:
    """One way to count the operations of a training step, recomputation never included."""

    name: str  #: The name users pass.
    formula: str  #: The formula as one reads it, per token, forward and backward.
    parameters: str  #: Which parameters N counts.
    source: str  #: Where the convention is defined.
    #: Operations of the attention matmuls, in units of L H Q T. QK^T and AV take 2 each, and backward twice that: 12; 6
    #: where the half that a causal mask leaves is counted, 0 where attention is left out.
    attention: int


CONVENTIONS: Mapping[str, FlopsConvention] = MappingProxyType(
    {
        row.name: row
        for row in (
            FlopsConvention(
                name="6N",
                formula="6 N",
                parameters="all but embedding and position tables (Kaplan et al.); with a tied head the shared table "
                "is a matmul weight and counts once",
                source="Kaplan et al. 2020, arXiv:2001.08361, section 2.1",
                attention=0,
            ),
            FlopsConvention(
                name="palm",
                formula="6 N + 12 L H Q T",
                parameters="as the caller counts: all parameters in the PaLM paper, all but the position table in "
                "nanoGPT; exact with the parameters that take part in matmuls",
                source="Chowdhery et al. 2022, arXiv:2204.02311, appendix B; the same as "
                "72 B L s h^2 (1 + s/6h + v/12hL) of Korthikanti et al. 2022, arXiv:2205.05198, and as Narayanan et "
                "al. 2021, arXiv:2104.04473, without its recomputation",
                attention=12,
            ),
            FlopsConvention(
                name="megatron",
                formula="6 N + 6 L H Q T",
                parameters="all weights of matmuls, the output layer included and tables not; of a mixture of experts "
                "those that one token uses",
                source="num_floating_point_operations in Megatron-LM, which halves the attention of "
                "Korthikanti et al. 2022, arXiv:2205.05198, for the causal mask",
                attention=6,
            ),
        )
    }
)
"""Every convention by name."""


def flops_per_token(
    parameters: float | str,
    *,
    layers: int | None = None,
    width: int | None = None,
    context_tokens: float | str | None = None,
    convention: str = "palm",
    frozen_parameters: float | str = 0,
) -> int:
    """Operations of forward and backward per training token of a decoder.

    ::

        "6N"        6 N                   2 N forward, 4 N backward
        "palm"      6 N + 12 L H Q T      plus attention over the full square: causal masking is not subtracted
        "megatron"  6 N + 6 L H Q T       plus attention over the half that a causal mask leaves
        any of them - 2 N_frozen          frozen weights get no gradient, but pass one on

    With N the parameters that take part in matmuls, "palm" is exact for a dense decoder: it equals what
    :func:`~lightning_mp.ground.flops.flop_counter.count_flops` counts for any module. Grouped-query attention and gated
    MLPs change N only. Of a mixture of experts N counts what one token is routed to. Norms, activations, softmax and
    the optimizer are not counted.

    Args:
        parameters: N, also as "7B". Which parameters count depends on the convention: see
            :attr:`FlopsConvention.parameters`.
        layers: Number of blocks. Needed by "palm" and "megatron".
        width: Heads times head size. Needed by "palm" and "megatron".
        context_tokens: Sequence length. Needed by "palm" and "megatron".
        convention: A name from :data:`CONVENTIONS`.
        frozen_parameters: How many of N are frozen, as under adapters. Frozen layers below the first trained one
            cost even less.

    Raises:
        ValueError: The convention is unknown, or an argument it needs is missing or not positive.

    Example:
        GPT-2 small at 1,024 tokens: attention adds 15%.

        >>> flops_per_token(124_000_000, convention="6N")
        744000000
        >>> flops_per_token(124_000_000, layers=12, width=768, context_tokens=1024)
        857246208
        >>> flops_per_token(124_000_000, layers=12, width=768, context_tokens=1024, convention="megatron")
        800623104
    """
    if convention not in CONVENTIONS:
        raise ValueError(
            f"Unknown FLOPs convention {convention!r}. Use one of {', '.join(CONVENTIONS)};"
            " count_flops() counts a module exactly."
        )
    row = CONVENTIONS[convention]
    counted = _positive_integer("parameters", parameters, row)
    flops = FLOPS_PER_PARAMETER_AND_TOKEN * counted
    if frozen_parameters != 0:
        frozen = _positive_integer("frozen_parameters", frozen_parameters, row)
        if frozen > counted:
            raise ValueError(f"`frozen_parameters` ({frozen}) cannot be more than `parameters` ({counted}).")
        flops -= _FLOPS_OF_WEIGHT_GRADIENT * frozen
    if not row.attention:
        return flops
    given = {"layers": layers, "width": width, "context_tokens": context_tokens}
    return flops + row.attention * prod(_positive_integer(name, value, row) for name, value in given.items())


def model_flops_utilization(tokens_per_second: float, flops_per_token: float, peak_flops_per_second: float) -> float:
    """MFU: operations that the model needs per second, over the device's peak in the format of its matmuls.

    Chowdhery et al. 2022 (arXiv:2204.02311), appendix B. Its convention is that of ``flops_per_token``. Recomputed
    operations are not in it, so it cannot exceed 1 with correct inputs.

    Args:
        tokens_per_second: Training throughput of one device.
        flops_per_token: Forward and backward operations per token.
        peak_flops_per_second: Dense peak of one device, see :func:`lightning_mp.ground.flops.hardware.peak_flops`.

    Raises:
        ValueError: An argument is negative or not finite, or the peak is zero.

    Example:
        >>> round(model_flops_utilization(150_000, 857_246_208, 312e12), 3)  # an A100 in bf16
        0.412
    """
    speed = quantity_from(0, tokens_per_second, "tokens_per_second")
    each = quantity_from(0, flops_per_token, "flops_per_token")
    return speed * each / positive_quantity(peak_flops_per_second, "peak_flops_per_second")


def _positive_integer(name: str, value: float | str | None, convention: FlopsConvention) -> int:
    if value is None:
        raise ValueError(
            f"The {convention.name!r} convention ({convention.formula}) needs `{name}`. Pass `{name}=...`."
        )
    return whole_quantity(value, name)
