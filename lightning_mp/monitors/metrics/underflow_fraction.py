"""Share of values that a number format rounds to zero."""

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric
from typing_extensions import override

from lightning_mp.ground.core.bit_layouts import NumberFormat
from lightning_mp.ground.core.devices import accumulation_dtype, sent_to
from lightning_mp.ground.core.number_formats import number_format
from lightning_mp.training.gradients.gradient_ops import local_shard


def underflow_fraction(
    values: Tensor, target: str | torch.dtype | NumberFormat = "fp16", scale: float | Tensor = 1.0
) -> Tensor:
    """Share of the non-zero values whose product with ``scale`` becomes 0 in a format.

    It is :attr:`FractionLost.zero <lightning_mp.ground.core.number_formats.FractionLost>` without waiting for the
    device.

    Args:
        values: floating-point tensor of any shape; for a DTensor, the local shard.
        target: the format that scaled values are rounded to.
        scale: number or scalar tensor, as a loss scale.

    Returns:
        Scalar tensor, float32, on the device of the values; 0 if all are zero.

    Raises:
        ValueError: if the format is unknown, or the values are not floating point.

    Example:
        >>> import torch
        >>> gradients = torch.tensor([0.0, 1e-8, 1e-7, 1e-3, 1.0])
        >>> underflow_fraction(gradients, "fp16"), underflow_fraction(gradients, "fp16", scale=2.0**13)
        (tensor(0.2500), tensor(0.))
    """
    lost, nonzero = _count(values, number_format(target), scale)
    return lost / nonzero.clamp(min=1)


class UnderflowFraction(Metric):
    """Share of the non-zero values whose product with the loss scale becomes 0 in a format.

    Counts are int64 and stay on the device; nothing waits for it before ``compute``. Counts are added over ranks: give
    each rank its own shard or batch. For replicas (gradients under DDP) the ratio is unchanged.

    Args:
        target: the format, see :data:`lightning_mp.ground.core.number_formats.FORMATS`.
        kwargs: arguments of ``torchmetrics.Metric``.

    Raises:
        ValueError: if the format is unknown.

    Example:
        >>> import torch
        >>> metric = UnderflowFraction("fp16")
        >>> metric.update(torch.tensor([0.0, 1e-8]))
        >>> metric.update(torch.tensor([1e-8, 1.0, 2.0]), scale=2.0**13)
        >>> metric.compute()
        tensor(0.2500)
    """

    is_differentiable = False
    higher_is_better = False
    full_state_update = False
    plot_lower_bound = 0.0
    plot_upper_bound = 1.0
    lost_values: Tensor
    nonzero_values: Tensor

    def __init__(self, target: str | torch.dtype | NumberFormat = "fp16", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.format = number_format(target)
        self.add_state("lost_values", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")
        self.add_state("nonzero_values", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    @override
    def update(self, values: Tensor, scale: float | Tensor = 1.0) -> None:
        """Counts the values of a tensor; see :func:`underflow_fraction`."""
        lost, nonzero = _count(values, self.format, scale)
        self.lost_values += lost
        self.nonzero_values += nonzero

    @override
    def compute(self) -> Tensor:
        """The share so far; 0 if there were no non-zero values."""
        return self.lost_values / self.nonzero_values.clamp(min=1)


@torch.no_grad()
def _count(values: Tensor, row: NumberFormat, scale: float | Tensor) -> tuple[Tensor, Tensor]:
    if not values.is_floating_point():
        raise ValueError(f"`values` must be a floating-point tensor, got dtype {values.dtype}. Call `.float()` first.")
    values = local_shard(values.detach())
    wide = accumulation_dtype(values.device)
    if isinstance(scale, Tensor):
        scale = sent_to(scale.detach(), values.device, wide)
    nonzero = values != 0
    # In float64 neither the product nor the comparison rounds.
    lost = nonzero & (values.to(wide).abs() * scale <= row.largest_rounded_to_zero)
    return lost.sum(), nonzero.sum()
