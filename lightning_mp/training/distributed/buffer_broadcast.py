"""Buffers that training changes, such as running statistics: all ranks have those of the first one, as under DDP."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from typing_extensions import override

from lightning_mp.ground.core.patches import Patches
from lightning_mp.ground.core.private_sharding_api import unsaved_buffers
from lightning_mp.ground.core.run_state import RunState


class _Place(NamedTuple):
    """Where a buffer is looked up, as modules may replace it."""

    owner: nn.Module
    name: str


class _Sent(NamedTuple):
    """What all ranks had after a broadcast: the bytes of each buffer."""

    places: list[_Place]
    parts: list[Tensor]


class BufferBroadcast(Callback):
    """Gives all ranks the buffers of the first one, as ``DistributedDataParallel(broadcast_buffers=True)`` does.

    The running statistics of a batch norm follow the samples that one rank sees. Left alone, each rank would evaluate
    another model, and a checkpoint written by several ranks would mix their statistics.

    .. code-block:: text

        when                                                     which buffers
        before the first batch and after it                      all that a state dict has
        after each batch from then on                            those of them that change
        before an epoch, an evaluation, prediction, a            all that a state dict has, to find those that have
        checkpoint, and at the end of a fit                      begun to change, or no longer do

    Each time is one broadcast, whatever the dtypes, for each dimension of the mesh; without a batch since the last one
    there is none. A model whose state dict has no buffers is left alone and costs nothing. Every rank finds the buffers
    that change by comparing what it received with what it had received, so ranks agree without asking each other.

    Buffers that a state dict leaves out (``persistent=False``: masks, rotary tables) stay what each rank has made them,
    and so do DTensors and other subclasses of Tensor.
    """

    def __init__(self, module: nn.Module, device: torch.device, groups: Sequence[ProcessGroup]) -> None:
        self._module = module
        self._device = device
        self._groups = groups
        self._is_first = all(dist.get_rank(group) == 0 for group in groups)
        self._sent: _Sent | None = None
        self._changing: list[_Place] | None = None
        # An earlier run may have ended between two broadcasts.
        self._may_differ = True

    @classmethod
    def attach(cls, trainer: "pl.Trainer", groups: Sequence[ProcessGroup]) -> None:
        """Adds one before the Trainer's callbacks for the duration of a run, if there are buffers to send."""
        module = trainer.lightning_module
        several = [group for group in groups if group.size() > 1]
        if several and next(_saved_buffers(module), None) is not None:
            new = cls(module, trainer.strategy.root_device, several)
            patches, run = Patches.of(trainer), RunState.of(trainer)
            # Callbacks are called for a checkpoint after the state dict is made.
            patches.around(trainer.strategy, "lightning_module_state_dict", new.flush_pending)
            patches.at_end(lambda: run.remove_callback(new))
            run.place_callback(new)

    def flush_pending(self, *_: Any, **__: Any) -> None:
        """Broadcasts all buffers if a batch may have changed them. Call it on all ranks."""
        if not self._may_differ:
            return
        places = list(_saved_buffers(self._module))
        sent = _Sent(places, self._send(places))
        if self._sent is not None:
            self._changing = _changed(self._sent, sent)
        self._sent = sent
        self._may_differ = False

    on_train_start = on_train_epoch_start = on_train_end = flush_pending
    on_validation_start = on_test_start = on_predict_start = flush_pending

    @override
    def on_train_batch_end(self, *_: Any) -> None:
        """After the backward, which may have run layers once more."""
        self._may_differ = True
        if self._changing is None:
            self.flush_pending()
        elif self._changing:
            self._send(self._changing)

    def _send(self, places: Sequence[_Place]) -> list[Tensor]:
        """Broadcasts these buffers as one tensor of bytes; returns those of each."""
        buffers = [getattr(place.owner, place.name) for place in places]
        # Lightning evaluates in inference mode, whose tensors could not be written to in training.
        with torch.inference_mode(False), torch.no_grad():
            bytes_of = [_bytes_of(buffer.to(self._device)) for buffer in buffers]
            flat = torch.cat(bytes_of)
            for group in self._groups:
                dist.broadcast(flat, group_src=0, group=group)
            parts = list(flat.split([part.numel() for part in bytes_of]))
            if not self._is_first:
                for place, buffer, part in zip(places, buffers, parts, strict=True):
                    # The clone is aligned, as a view in another dtype has to be.
                    value = part.clone().view(buffer.dtype).view(buffer.shape)
                    if buffer.is_inference() or _has_shared_elements(buffer):
                        setattr(place.owner, place.name, value.to(buffer.device))
                    else:
                        buffer.copy_(value)
        return parts


def _bytes_of(buffer: Tensor) -> Tensor:
    """Its numbers as contiguous bytes, also if it is a view."""
    return buffer.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def _has_shared_elements(buffer: Tensor) -> bool:
    """Whether it is expanded, so that torch refuses to write to it."""
    return any(size > 1 and stride == 0 for size, stride in zip(buffer.shape, buffer.stride(), strict=True))


def _saved_buffers(module: nn.Module) -> Iterator[_Place]:
    """Every plain buffer of the state dict once."""
    seen: set[int] = set()
    for owner in module.modules():
        unsaved = unsaved_buffers(owner)
        for name, buffer in owner.named_buffers(recurse=False):
            is_plain = type(buffer) is Tensor and buffer.layout == torch.strided and not buffer.is_meta
            if is_plain and name not in unsaved and id(buffer) not in seen:
                seen.add(id(buffer))
                yield _Place(owner, name)


def _changed(before: _Sent, now: _Sent) -> list[_Place]:
    sizes = [[part.numel() for part in sent.parts] for sent in (before, now)]
    if not now.places or before.places != now.places or sizes[0] != sizes[1]:
        return now.places
    differ = torch.stack([(old != new).any() for old, new in zip(before.parts, now.parts, strict=True)]).tolist()
    return [place for place, differs in zip(now.places, differ, strict=True) if differs]
