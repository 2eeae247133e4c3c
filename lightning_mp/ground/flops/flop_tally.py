"""Operations of a training step of any module, counted as it runs: forward, backward, and what is run again.

torch's own formulas (``torch.utils.flop_counter``) count matrix products, convolutions and attention, two operations
per multiply-add. Norms, activations, softmax and the optimizer are not counted. These things differ from
``FlopCounterMode``:

* attention on the CPU, grouped products (mixture of experts), matrix-vector products and cuDNN's recurrent layers are
  counted; it misses them;
* a product with a sparse matrix is not counted as one with a dense matrix; it is named as unknown;
* what an activation checkpoint runs again is kept apart, and counted as far as it runs: a non-reentrant checkpoint
  stops as soon as backward has what it needs, so the last product of a block is usually not repeated;
* a fused attention kernel multiplies queries and keys a second time in its backward. That is counted as run again, so
  the model's own operations do not depend on the attention kernel;
* DTensor operations count as this rank's share of them;
* a complex product counts as four real ones.

Attention counts what a kernel computes, with one convention: a causal mask is not subtracted, the full square counts
(PaLM's convention; "megatron" of :mod:`~lightning_mp.ground.flops.conventions` halves it). Of packed sequences each
counts its own square (``torch.nn.attention.varlen``), of a sliding window as many keys as it is wide. A mask given as a
tensor hides numbers from the result, not from the kernel, so it counts in full.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_mp.ground.core import private_dispatch_api
from lightning_mp.ground.core.nested_tensors import tensors_in
from lightning_mp.ground.core.number_formats import dtype_label
from lightning_mp.ground.flops.operation_flops import multiplies, operation_flops, score_flops

_OWN_NAMESPACES = frozenset(
    [
        "aten",
        "prim",
        "prims",
        "profiler",
        "inductor",
        "fsdp",
        "symm_mem",
        "_dtensor",
        "c10d",
        "c10d_functional",
        "_c10d_functional",
    ]
)


@dataclass(frozen=True, slots=True)
class FlopCount:
    """Operations of one forward and backward."""

    forward: int  # of the forward
    backward: int  # of the backward, without what was run again
    recompute: int  # what was run again in backward: activation checkpoints, and the score matrix of fused attention
    # forward and backward by the format of the products' inputs, such as `{"bf16": ..., "fp32": ...}`; TF32 counts as
    # fp32
    by_format: Mapping[str, int]
    # names of operations that no formula is known for: those from outside of torch, and those of torch that multiply
    # (FFTs, solvers, products of sparse matrices, ``nn.Bilinear``). They count as 0. Give a formula by
    # `torch.utils.flop_counter.register_flop_formula`
    unknown: tuple[str, ...] = ()

    @property
    def model(self) -> int:
        """What the mathematics needs: the numerator of MFU."""
        return self.forward + self.backward

    @property
    def hardware(self) -> int:
        """What is run: the numerator of HFU."""
        return self.model + self.recompute

    @property
    def main_format(self) -> str | None:
        """The format that most operations ran in; None if there were none."""
        return max(self.by_format, key=lambda name: self.by_format[name], default=None)


class FlopTally:
    """Counts while it is entered; everything runs as it would without. Compiled code is not seen."""

    def __init__(self) -> None:
        self._mode: AbstractContextManager[Any] | None = None
        self._parts = Counter[str]()
        self._formats = Counter[str]()
        self._unknown: dict[str, None] = {}

    def __enter__(self) -> "FlopTally":
        self._mode = private_dispatch_api.observe_dispatch(self._after_operation)
        self._mode.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        mode, self._mode = self._mode, None
        if mode is not None:
            mode.__exit__(*error)

    @property
    def count(self) -> FlopCount:
        """What was counted so far."""
        parts = self._parts
        return FlopCount(
            parts["forward"], parts["backward"], parts["recompute"], dict(self._formats), tuple(self._unknown)
        )

    def _after_operation(self, operation: Any, args: Any, kwargs: Any, result: Any) -> None:
        packet = operation.overloadpacket
        cost = operation_flops(packet, args, kwargs, result)
        if cost is None:
            if operation.namespace not in _OWN_NAMESPACES or multiplies(packet, args):
                self._unknown[f"{operation.namespace}::{packet.__name__}"] = None
            return
        tensors = list(tensors_in((args, kwargs)))
        flops = _share_of_rank(cost, tensors)
        if any(tensor.is_complex() for tensor in tensors):
            flops *= 4  # a complex product is four real ones
        if private_dispatch_api.running_backward() is None:
            part, again = "forward", 0
        elif torch.is_grad_enabled():
            # Backward itself runs without gradients; what a checkpoint runs again needs them.
            part, again = "recompute", flops
        else:
            scores = score_flops(packet, args)
            part, again = "backward", _share_of_rank(scores, tensors) if scores else 0
        self._parts["recompute"] += again
        if part != "recompute":
            self._parts[part] += flops - again
            self._formats[_format_of(tensors)] += flops - again


# -- one operation -----------------------------------------------------------------------------------------------------


def _share_of_rank(flops: int, tensors: Sequence[Tensor]) -> int:
    """A DTensor has the shape of the whole; its ranks share the work."""
    mesh_size = next((tensor.device_mesh.size() for tensor in tensors if isinstance(tensor, DTensor)), 1)
    return flops // mesh_size


def _format_of(tensors: Sequence[Tensor]) -> str:
    """The narrowest format among the inputs: in an fp8 product the scales are fp32."""
    real = [tensor.dtype.to_real() for tensor in tensors if tensor.is_floating_point() or tensor.is_complex()]
    dtype = min(real, key=lambda dtype: dtype.itemsize)
    return "fp8" if dtype.itemsize == 1 else dtype_label(dtype)
