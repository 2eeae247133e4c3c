"""What goes over the wire: every collective operation of this process, and the bytes its sockets really sent."""

import os
import socket
import struct
from collections import Counter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_mp.training.tensor_parallel.vocab_parallel_ops import InParts

_NAMES = {
    "allreduce_": "all_reduce",
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "broadcast_": "broadcast",
    "broadcast": "broadcast",
    "gather_": "gather",
    "scatter_": "scatter",
    "send": "send",
    "recv_": "receive",
    "barrier": "barrier",
}
_NOTHING_SENT = {"wait_tensor", "_wrap_tensor_autograd", "monitored_barrier_"}


class Collective(NamedTuple):
    """One operation: its name, the ranks of its group, and the bytes of the whole tensor.

    Whole is what all ranks have after an all-gather, before a reduce-scatter, and always with the others.
    """

    name: str
    ranks: int
    payload_bytes: int


class CollectiveCounter(TorchDispatchMode):
    """Counts between ``with`` and its end; DTensor's own and DDP's are seen, too."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Collective] = []

    def count(self) -> Counter[Collective]:
        return Counter(self.seen)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor comes back with the operations on its parts
        namespace, _, name = func._schema.name.partition("::")
        if "c10d" in namespace and name not in _NOTHING_SENT:
            self._add(_NAMES[name], namespace, args)
        return func(*args, **(kwargs or {}))

    def _add(self, name: str, namespace: str, args: Any) -> None:
        if namespace == "c10d":
            ranks = next(dist.ProcessGroup.unbox(value) for value in args if _is_group(value)).size()
            # An all-gather and a reduce-scatter have their output first, the input after it.
            whole = args[1] if name == "reduce_scatter" else args[0]
            size = _bytes(whole)
        else:
            group = [value for value in args if isinstance(value, str)][-1]
            ranks = dist.distributed_c10d._resolve_process_group(group).size()
            size = _bytes(args[0]) * (ranks if name == "all_gather" else 1)
        self.seen.append(Collective(name, ranks, size))


class PartsCounter(CollectiveCounter):
    """Sees also what happens inside of operations on logits in parts."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, InParts) for kind in types):
            return NotImplemented
        return super().__torch_dispatch__(func, types, args, kwargs)

    def names(self) -> list[str]:
        return [collective.name for collective in self.seen]


class CountsTheStep(Callback):
    """Everything that goes over the wire in one training step."""

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        self.counter = PartsCounter()
        self.counter.__enter__()

    def on_before_optimizer_step(self, *_: Any) -> None:
        self.counter.__exit__(None, None, None)


def _bytes(tensors: Any) -> int:
    return sum(leaf.numel() * leaf.element_size() for leaf in tree_leaves(tensors) if isinstance(leaf, Tensor))


def _is_group(value: Any) -> bool:
    return isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type())


def socket_bytes_sent() -> int:
    """Bytes of TCP that this process has sent so far, without headers of the protocol and repeats (Linux)."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as copy:
                if copy.type == socket.SOCK_STREAM and copy.family in (socket.AF_INET, socket.AF_INET6):
                    info = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                    sent, repeated = struct.unpack_from("=QQ", info, 200)  # tcpi_bytes_sent, tcpi_bytes_retrans
                    total += sent - repeated
        except OSError:
            continue
    return total
