"""Whether an operation ran under autocast, told from where it is seen: below autocast, where it always reads as off.

What was on when the operation's module was called is known. Inside of the module autocast may have been switched off,
and what an operation computed in tells: under autocast a product of fp32 numbers does not happen, and neither does a
loss in 16 bit.
"""

from collections.abc import Sequence

import torch

from lightning_mp.diagnostics.audit.operations import candidates
from lightning_mp.diagnostics.audit.records import OperationRecord, dtype_label
from lightning_mp.policy.operations import by_autocast

__all__ = ["autocast_label", "infer_autocast", "join_autocast"]

_LOW = ("bf16", "fp16")


def autocast_label(device_type: str) -> str:
    """The autocast that is on, as "cpu bf16", or "off".

    Example:
        >>> with torch.autocast("cpu", torch.bfloat16):
        ...     autocast_label("cpu")
        'cpu bf16'
        >>> autocast_label("cpu")
        'off'
    """
    if not torch.amp.is_autocast_available(device_type) or not torch.is_autocast_enabled(device_type):
        return "off"
    return f"{device_type} {dtype_label(torch.get_autocast_dtype(device_type))}"


def infer_autocast(record: OperationRecord, around: str) -> str:
    """What an operation of a forward ran under: "cpu bf16", "off", or "?" if it cannot be told.

    Args:
        record: the operation.
        around: :func:`autocast_label` where its module was entered; "?" if that is not known.
    """
    if around in ("off", "?"):
        return around
    if record.kind == "matmul":
        # fp8 products cast by themselves, whatever autocast says.
        return "off" if record.compute == "fp32" else around
    treated = {by_autocast(name, record.device_type) for name in candidates(record.operation)}
    return "off" if treated == {"fp32"} and record.compute in _LOW else around


def join_autocast(own: Sequence[OperationRecord], entered: Sequence[str]) -> str:
    """What a module ran under: as its own operations show, else what was on when it was called."""
    told = list(dict.fromkeys(record.autocast for record in own if record.autocast != "?"))
    return ", ".join(told or entered) or "?"
