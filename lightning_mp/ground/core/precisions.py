"""Every precision by name: what it stores per parameter, and in which format a step computes.

The plugins themselves need a Trainer. Here is what they keep, as a few values; a test compares these with the plugins.
Every other place uses this table: the meaning of a name is defined only here.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal, Protocol

import torch

#: The names of :data:`PRECISIONS`.
PrecisionName = Literal[
    "32-true",
    "16-mixed",
    "bf16-mixed",
    "16-true",
    "bf16-true",
    "bf16-true+remainder",
    "bf16-true+24bit",
    "fp8-mixed",
    "lightning:16-true",
    "lightning:bf16-true",
]


class PrecisionPlugin(Protocol):
    """What identifies a precision plugin, without an import of Lightning."""

    @property
    def precision(self) -> str:
        """As in ``Trainer(precision=...)``."""


@dataclass(frozen=True, slots=True)
class PrecisionSpec:
    """Bytes per parameter between two steps, and the format of computing.

    >>> find_precision("bf16-true+remainder").bytes_per_parameter(optimizer_state_bytes=8)
    14
    """

    name: PrecisionName
    plugin: str  # how to select it in a Trainer
    weight_bytes: int  # of a parameter, and of its gradient
    master_bytes: int  # of what is kept beside a trainable 16-bit weight
    compute_dtype: torch.dtype  # of matrix products; of fp8 that of all else
    autocast: bool = False  # weights are cast at their use
    fp8: bool = False  # linear layers multiply in fp8
    cache_weights: bool = False  # a weight is cast once per forward, and the cast lives until it ends
    fp32_gradients: bool = False  # gradients of 16-bit weights are accumulated in fp32
    frees_gradients: bool = False  # the last step's are freed before the next forward, by the plugins of this package

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

PRECISIONS: Mapping[str, PrecisionSpec] = MappingProxyType(
    {
        row.name: row
        for row in (
            PrecisionSpec("32-true", "TF32Precision(), or the Trainer's default", 4, 0, _FP32),
            PrecisionSpec("16-mixed", "AutocastPrecision('16-mixed')", 4, 0, _FP16, autocast=True),
            PrecisionSpec("bf16-mixed", "AutocastPrecision('bf16-mixed')", 4, 0, _BF16, autocast=True),
            PrecisionSpec("16-true", "MasterWeightsPrecision('16-true')", 2, 4, _FP16),
            PrecisionSpec("bf16-true", "MasterWeightsPrecision('bf16-true')", 2, 4, _BF16),
            PrecisionSpec(
                "bf16-true+remainder", "MasterWeightsPrecision('bf16-true', storage='remainder')", 2, 2, _BF16
            ),
            PrecisionSpec("bf16-true+24bit", "MasterWeightsPrecision('bf16-true', storage='24bit')", 2, 1, _BF16),
            PrecisionSpec("fp8-mixed", "Float8Precision()", 4, 0, _BF16, autocast=True, fp8=True),
            PrecisionSpec("lightning:16-true", "Trainer(precision='16-true'), no masters", 2, 0, _FP16),
            PrecisionSpec("lightning:bf16-true", "Trainer(precision='bf16-true'), no masters", 2, 0, _BF16),
        )
    }
)
"""Every precision by its plugin's argument, and after a plus the storage of masters; ``lightning:`` is Lightning's."""

#: The 16-bit dtype of each precision of AutocastPrecision.
AUTOCAST_DTYPES: dict[str, torch.dtype] = {
    row.name: row.compute_dtype for row in PRECISIONS.values() if row.autocast and not row.fp8
}

_FORMATS = {"16": "fp16", "bf16": "bf16", "fp8": "fp8", "32": "fp32", "64": "fp64"}

#: The 16-bit dtype of each precision of MasterWeightsPrecision.
MASTER_DTYPES: dict[str, torch.dtype] = {
    row.name: row.compute_dtype for row in PRECISIONS.values() if row.master_bytes and "+" not in row.name
}


#: What functions about a precision take.
PrecisionLike = PrecisionName | PrecisionSpec | PrecisionPlugin


def find_precision(precision: object) -> PrecisionSpec:
    """A precision by its name, or of a precision plugin.

    >>> from lightning_mp import MasterWeightsPrecision
    >>> find_precision(MasterWeightsPrecision("16-true")).name
    '16-true'
    """
    if isinstance(precision, PrecisionSpec):
        return precision
    name = precision if isinstance(precision, str) else str(getattr(precision, "precision", precision))
    if not isinstance(precision, str) and not hasattr(precision, "storage") and name.endswith("16-true"):
        name = f"lightning:{name}"
    storage = getattr(precision, "storage", "fp32")
    name = name if storage == "fp32" else f"{name}+{storage}"
    if name not in PRECISIONS:
        from lightning_mp.ground.core.known_words import did_you_mean  # of use in errors only

        raise ValueError(
            f"`precision` {name!r} is not known.{did_you_mean(name, PRECISIONS)} Use one of {', '.join(PRECISIONS)}, or"
            " a precision plugin; 16-true and bf16-true are MasterWeightsPrecision, with its storage after the plus."
        )
    row = PRECISIONS[name]
    is_ours = row.autocast or row.master_bytes > 0 if isinstance(precision, str) else _is_ours(precision)
    cache_weights = getattr(precision, "cache_weights", False) is True
    fp32_gradients = getattr(precision, "fp32_gradients", False) is True
    return replace(row, cache_weights=cache_weights, frees_gradients=is_ours, fp32_gradients=fp32_gradients)


def _is_ours(plugin: object) -> bool:
    return getattr(plugin, "makes_true_gradients", False) is True


def format_of(precision: str) -> str | None:
    """The format that a precision's name begins with, Lightning's names included; None for other names.

    >>> [format_of(name) for name in ("16-mixed", "bf16-true", "fp8-mixed", "32-true", "transformer-engine")]
    ['fp16', 'bf16', 'fp8', 'fp32', None]
    """
    return _FORMATS.get(precision.partition("-")[0])


def low_dtype(precision: str) -> torch.dtype | None:
    """The 16-bit dtype that weights are cast to or kept in; None if there is none. What fp8 takes is cast from bf16.

    >>> low_dtype("16-true"), low_dtype("fp8-mixed"), low_dtype("32-true")
    (torch.float16, torch.bfloat16, None)
    """
    return {"fp16": _FP16, "bf16": _BF16, "fp8": _BF16}.get(format_of(precision) or "")
