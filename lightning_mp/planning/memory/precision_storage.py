"""What each precision stores per parameter, and in which format a step computes.

The plugins themselves need a Trainer. Here is what they keep, as a few values; a test compares these with the plugins.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch

__all__ = ["PRECISIONS", "PrecisionStorage", "find_precision"]


@dataclass(frozen=True, slots=True)
class PrecisionStorage:
    """Bytes per parameter between two steps, and the format of computing.

    Attributes:
        name: as in :data:`PRECISIONS`.
        plugin: how to ask a Trainer for it.
        weight_bytes: of a parameter, and of its gradient.
        master_bytes: of what is kept beside a trainable 16-bit weight.
        compute_dtype: of matrix products; of fp8 that of all else.
        autocast: weights are cast at their use.
        fp8: linear layers multiply in fp8.
        cache_weights: a weight is cast once per forward, and the cast lives until it ends.

    Example:
        >>> find_precision("bf16-remainder").bytes_per_parameter(optimizer_state_bytes=8)
        14
    """

    name: str
    plugin: str
    weight_bytes: int
    master_bytes: int
    compute_dtype: torch.dtype
    autocast: bool = False
    fp8: bool = False
    cache_weights: bool = False

    @property
    def weight_dtype(self) -> torch.dtype:
        """Of parameters."""
        return torch.float32 if self.weight_bytes == 4 else self.compute_dtype

    @property
    def activation_bytes(self) -> int:
        """Of one element of what matrix products take and give."""
        return self.compute_dtype.itemsize

    def bytes_per_parameter(self, optimizer_state_bytes: int) -> int:
        """Weight, gradient, master and optimizer state of one trainable parameter."""
        return 2 * self.weight_bytes + self.master_bytes + optimizer_state_bytes

    def optimizer_state_itemsize(self) -> int:
        """Bytes of one element of an optimizer state: those of the weights that the optimizer works on."""
        return 4 if self.master_bytes else self.weight_bytes


_FP32, _FP16, _BF16 = torch.float32, torch.float16, torch.bfloat16

PRECISIONS: Mapping[str, PrecisionStorage] = MappingProxyType(
    {
        row.name: row
        for row in (
            PrecisionStorage("32-true", "TF32Precision(), or the Trainer's default", 4, 0, _FP32),
            PrecisionStorage("16-mixed", "AutocastPrecision('16-mixed')", 4, 0, _FP16, autocast=True),
            PrecisionStorage("bf16-mixed", "AutocastPrecision('bf16-mixed')", 4, 0, _BF16, autocast=True),
            PrecisionStorage("16-masters", "MasterWeightsPrecision('16-true')", 2, 4, _FP16),
            PrecisionStorage("bf16-masters", "MasterWeightsPrecision('bf16-true')", 2, 4, _BF16),
            PrecisionStorage("bf16-remainder", "MasterWeightsPrecision('bf16-true', storage='remainder')", 2, 2, _BF16),
            PrecisionStorage("fp8-mixed", "Float8Precision()", 4, 0, _BF16, autocast=True, fp8=True),
            PrecisionStorage("lightning:16-true", "Trainer(precision='16-true'), no masters", 2, 0, _FP16),
            PrecisionStorage("lightning:bf16-true", "Trainer(precision='bf16-true'), no masters", 2, 0, _BF16),
        )
    }
)
"""Every precision by name; ``lightning:`` is Lightning's own plugin."""

# What the names of MasterWeightsPrecision mean, also where there is no plugin to ask.
_BY_STORAGE: Mapping[tuple[str, str], str] = {
    ("16-true", "fp32"): "16-masters",
    ("bf16-true", "fp32"): "bf16-masters",
    ("bf16-true", "remainder"): "bf16-remainder",
}


def find_precision(precision: object) -> PrecisionStorage:
    """A precision by its name, or of a precision plugin.

    Args:
        precision: a name of :data:`PRECISIONS`, a row of it, or a plugin of this package or of Lightning. The names
            "16-true" and "bf16-true" are MasterWeightsPrecision's, with masters.

    Raises:
        ValueError: it is not known.

    Example:
        >>> from lightning_mp import MasterWeightsPrecision
        >>> find_precision(MasterWeightsPrecision("16-true")).name
        '16-masters'
    """
    if isinstance(precision, PrecisionStorage):
        return precision
    name = precision if isinstance(precision, str) else str(getattr(precision, "precision", precision))
    if not isinstance(precision, str) and not hasattr(precision, "storage") and name.endswith("16-true"):
        name = f"lightning:{name}"
    name = _BY_STORAGE.get((name, str(getattr(precision, "storage", "fp32"))), name)
    if name not in PRECISIONS:
        raise ValueError(
            f"`precision` {name!r} is not known. Use one of {', '.join(PRECISIONS)}, or a precision plugin; the ones"
            " that end in -masters and -remainder are MasterWeightsPrecision."
        )
    return replace(PRECISIONS[name], cache_weights=getattr(precision, "cache_weights", False) is True)
