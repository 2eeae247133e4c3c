"""Weights at the end of fp16's range: refused at set-up, clamped in training, and named.

A step that makes a weight too large for fp16 is made, and the weight stays at ±65,504. The step is not skipped: it is
known only after the optimizer has changed weights and moments, so that undoing it would need a second copy of all of
them; and no smaller loss scale would change the outcome of the next one.
"""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_mp.ground.core import private_tensor_api
from lightning_mp.ground.core.half_dtypes import HALF_MAX
from lightning_mp.ground.core.host_copy import HostCopy
from lightning_mp.ground.core.messages import listed
from lightning_mp.training.gradients.gradient_ops import local_shard

_REMEDIES = "Use 'bf16-true', AutocastPrecision('16-mixed') or a policy that keeps the module in fp32"


def _largest(weights: Sequence[Tensor]) -> Tensor:
    """The largest magnitude of each weight's local part, shape ``[num_weights]``."""
    norms = private_tensor_api.foreach_norm([local_shard(w.detach()) for w in weights], torch.inf)
    return torch.stack(tuple(norms))


def check_half_range(module: nn.Module, dtype: torch.dtype, in_float32: Iterable[nn.Module]) -> None:
    """Refuses finite weights that would be infinite in fp16."""
    if dtype != torch.float16:
        return
    kept = {p for part in in_float32 for p in part.parameters(recurse=False)}
    too_large = []
    for name, parameter in module.named_parameters():
        if (
            parameter in kept
            or is_lazy(parameter)
            or parameter.is_meta
            or parameter.dtype not in (torch.float32, torch.bfloat16)
        ):
            continue
        local = local_shard(parameter.detach())
        if local.numel() and float(local.abs().nan_to_num(posinf=0.0).max()) > HALF_MAX:
            too_large.append(name)
    if too_large:
        raise MisconfigurationException(
            f"MasterWeightsPrecision('16-true'): {listed(too_large)} has weights above 65,504, the largest fp16"
            f" number. {_REMEDIES}, or scale the weight down."
        )


class HalfRange:
    """Reports, a step late and without waiting for the device, which weights are clamped at the end of fp16's range."""

    def __init__(self, names: Callable[[], Mapping[Tensor, str]], *, copied: bool) -> None:
        self._names = names
        self._copied = copied
        self._pending: tuple[HostCopy, list[Tensor]] | None = None
        self._reported: set[Tensor] = set()

    def clamp_(self, weights: Sequence[Tensor]) -> None:
        """After a step, holds fp32 weights of which there are fp16 copies within its range; reports the step before."""
        self.warn()
        if not weights:  # the optimizer has only weights that are computed with in fp32
            return
        with torch.no_grad():
            private_tensor_api.foreach_clamp_([local_shard(w.detach()) for w in weights], HALF_MAX)
        present = [w for w in weights if local_shard(w.detach()).numel()]
        if present:
            self._pending = HostCopy(_largest(present)), present

    def warn(self) -> None:
        """Warns of each weight once."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        largest, weights = pending[0].read(), pending[1]
        clamped = {w for w, size in zip(weights, largest, strict=True) if size >= HALF_MAX} - self._reported
        self._reported |= clamped
        names = self._names()
        here = [names.get(w, "?") for w in weights if w in clamped]
        if here:
            (rank_zero_warn if self._copied else warnings.warn)(
                f"MasterWeightsPrecision('16-true'): elements of {listed(here)} have reached"
                " ±65,504, the end of fp16's range, and are clamped there. Is the learning"
                f" rate too high, or weight decay missing? {_REMEDIES}."
            )
