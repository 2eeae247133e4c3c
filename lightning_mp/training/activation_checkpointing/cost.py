"""What activation checkpoints save and cost in one training step, counted: bytes of saved tensors, and FLOPs.

Bytes are those of the storages that tensors saved for backward keep alive, each storage once; weights and
the batch, which live on anyway, are left out. They are seen by saved-tensor hooks when they are saved, so allocators,
caching and speed do not matter.
"""

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.parameter import is_lazy
from typing_extensions import override

from lightning_mp.ground.core import private_dispatch_api
from lightning_mp.ground.core.messages import WarnOnce
from lightning_mp.ground.core.nested_tensors import tensors_in, why_unreadable
from lightning_mp.ground.core.quantities import format_bytes
from lightning_mp.ground.core.saved_tensors import unchanged
from lightning_mp.ground.flops.operation_flops import operation_flops
from lightning_mp.training.gradients.gradient_ops import local_shard


@dataclass(frozen=True)
class RecomputeReport:
    """What checkpoints saved and cost in one micro-batch on one rank."""

    saved_bytes: int  #: saved for backward at the end of the forward, with the checkpoints.
    saved_bytes_without: int  #: the same without checkpoints.
    #: saved while the largest checkpointed call runs again; the peak of a backward is at most this and ``saved_bytes``
    #: together.
    largest_recompute_bytes: int
    calls: int  #: checkpointed calls.
    step_flops: int  #: FLOPs of forward and backward, second runs included.
    #: FLOPs of the second runs alone. These stop at the last tensor that backward needs, so a matrix product at the end
    #: of a block is not run again.
    recompute_flops: int

    @override
    def __str__(self) -> str:
        less = 1 - self.saved_bytes / self.saved_bytes_without if self.saved_bytes_without else 0.0
        plain_flops = self.step_flops - self.recompute_flops
        more = self.recompute_flops / plain_flops if plain_flops else 0.0
        saved, without, again = map(
            format_bytes, (self.saved_bytes, self.saved_bytes_without, self.largest_recompute_bytes)
        )
        return (
            f"{self.calls} calls keep their inputs only. Saved for backward: {saved} instead of {without}"
            f" ({-less:+.0%}); up to {again} more while one of them runs again."
            f" That adds {self.recompute_flops:.3g} FLOPs to {plain_flops:.3g} ({more:+.0%})."
            + (
                " These modules save no memory: checkpoint larger ones."
                if 0 < self.saved_bytes_without <= self.saved_bytes
                else ""
            )
        )


class StorageBytes:
    """Bytes of the storages of tensors, each storage once.

    A storage is known by a weak reference: the next tensor at the same address is another one.
    """

    def __init__(self, warn_once: WarnOnce | None = None) -> None:
        self._warn_once = warn_once or WarnOnce(type(self).__name__)
        self._bytes: dict[StorageWeakRef, int] = {}

    def add(self, tensor: Tensor) -> None:
        """Counts the storage of a tensor; of a DTensor that of its local shard."""
        if is_lazy(tensor):
            return  # it has no memory yet
        if reason := why_unreadable(tensor):
            self._warn_once.warn(f"the memory of a tensor of shape {tuple(tensor.shape)}", reason)
            return
        storage = local_shard(tensor.detach()).untyped_storage()
        self._bytes.setdefault(StorageWeakRef(storage), storage.nbytes())

    @property
    def total_bytes(self) -> int:
        """Their sum."""
        return sum(self._bytes.values())

    def __or__(self, other: "StorageBytes") -> "StorageBytes":
        both = StorageBytes()
        both._bytes = self._bytes | other._bytes
        return both

    def __sub__(self, other: "StorageBytes") -> "StorageBytes":
        rest = StorageBytes()
        rest._bytes = {key: size for key, size in self._bytes.items() if key not in other._bytes}
        return rest


class StepCost:
    """Counts one micro-batch: :meth:`begin`, forward, :meth:`end_forward`, backward, :meth:`end`.

    Values do not change by it. FLOPs are those of :mod:`lightning_mp.ground.flops.operation_flops`: matrix products,
    convolutions and attention, two per multiply-add. What runs compiled is not seen.
    """

    def __init__(self, model: nn.Module, batch: Any) -> None:
        self._in_forward, self._in_micro_batch = ExitStack(), ExitStack()
        self._warn_once = WarnOnce("ActivationCheckpointing")
        self._known = StorageBytes(self._warn_once)
        for tensor in (*model.parameters(), *model.buffers(), *tensors_in(batch)):
            self._known.add(tensor)
        self._outside, self._inputs = StorageBytes(self._warn_once), StorageBytes(self._warn_once)
        self._inside: list[StorageBytes] = []
        self._saving_inputs = False
        self._flops = 0
        self._flops_before = 0
        self._recompute_flops = 0

    # -- a micro-batch -------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Starts counting, before the forward."""
        # Sharded weights are gathered for the time of a module's forward; its own hooks come later than this one.
        self._in_forward.callback(register_module_forward_hook(self._after_forward).remove)
        self._in_forward.enter_context(saved_tensors_hooks(self._saved_outside, unchanged))
        self._in_micro_batch.enter_context(private_dispatch_api.observe_dispatch(self._after_operation))

    def end_forward(self) -> None:
        """Counts no more saved tensors."""
        self._in_forward.close()

    def end(self) -> None:
        """Stops counting."""
        self._in_forward.close()
        self._in_micro_batch.close()

    def report(self) -> RecomputeReport:
        """What was counted."""
        inside = StorageBytes()
        for call in self._inside:
            inside |= call
        largest = max(((call - self._known - self._inputs).total_bytes for call in self._inside), default=0)
        return RecomputeReport(
            saved_bytes=((self._outside | self._inputs) - self._known).total_bytes,
            saved_bytes_without=((self._outside | inside) - self._known).total_bytes,
            largest_recompute_bytes=largest,
            calls=len(self._inside),
            step_flops=self._flops,
            recompute_flops=self._recompute_flops,
        )

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        for parameter in module.parameters(recurse=False):
            self._known.add(parameter)

    def _after_operation(self, operation: Any, args: Any, kwargs: Any, result: Any) -> None:
        self._flops += operation_flops(operation.overloadpacket, args, kwargs, result) or 0

    def _saved_outside(self, tensor: Tensor) -> Tensor:
        (self._inputs if self._saving_inputs else self._outside).add(tensor)
        return tensor.detach()

    # -- a checkpointed call -------------------------------------------------------------------------------------------

    def begin_call(self, keywords: dict[str, Any]) -> None:
        """A checkpoint begins: what is saved until its forward runs is what it keeps."""
        self._saving_inputs = True
        for tensor in tensors_in(keywords):
            self._inputs.add(tensor)

    def first_run(self) -> "_CountedSaves":
        """Around the first run of a call."""
        return _CountedSaves(self)

    def enter_first_run(self) -> StorageBytes:
        """The inputs are kept; returns where to count what the call saves."""
        self._saving_inputs = False
        self._inside.append(StorageBytes(self._warn_once))
        return self._inside[-1]

    def begin_second_run(self) -> None:
        """A call runs again."""
        self._flops_before = self._flops

    def end_second_run(self) -> None:
        """The call has run again, as far as needed."""
        self._recompute_flops += self._flops - self._flops_before


class _Saved(torch.autograd.Function):
    """A node that saves one tensor, by the hooks that are there when it is made."""

    @staticmethod
    @override
    def forward(ctx: Any, anchor: Tensor, tensor: Tensor) -> Tensor:
        ctx.save_for_backward(tensor)
        return anchor.new_empty(0)


class _CountedSaves(saved_tensors_hooks):
    """Counts what a checkpointed call saves, and leaves the saving to the checkpoint's own hooks.

    Only the innermost hooks are asked. So they step aside for a moment and save through their own node.
    """

    def __init__(self, cost: StepCost) -> None:
        super().__init__(self._pack, self._unpack)
        self._cost = cost
        self._anchor = torch.empty(0, requires_grad=True)
        self._storages = StorageBytes()

    @override
    def __enter__(self) -> None:
        self._storages = self._cost.enter_first_run()
        super().__enter__()

    @override
    def __exit__(self, *args: object) -> None:
        super().__exit__(*args)

    def _pack(self, tensor: Tensor) -> Any:
        self._storages.add(tensor)
        super().__exit__()
        try:
            with torch.enable_grad():
                save: Any = _Saved.apply
                # The output, not its node: until torch 2.13 what a node has saved is freed with its output.
                return save(self._anchor, tensor.detach())
        finally:
            super().__enter__()

    def _unpack(self, saved: Any) -> Tensor:
        tensor: Tensor = saved.grad_fn.saved_tensors[0]
        return tensor
