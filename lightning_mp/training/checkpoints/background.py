"""Folders with shards that are written while training continues, and renamed when all ranks have written theirs.

Each rank copies its shards to host memory and hands them to a thread. The threads of all ranks plan and write together,
over a separate gloo group, so nothing here waits for the training's collectives, or holds them up.
"""

import copy
import io
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor

from lightning_mp.training.checkpoints.atomic import (
    begin_checkpoint,
    commit_checkpoint,
    remove_checkpoint,
    temporary_path,
)
from lightning_mp.training.checkpoints.sharded import REST


class BackgroundShards:
    """Writes folders with shards in a thread of each rank, one at a time, in the order in which they were saved.

    ``torch.distributed.checkpoint.async_save`` does less: its future ends before rank 0 has renamed the folder, and an
    error of that is known to rank 0 only.

    Args:
        group: a gloo group of all ranks that nothing else uses.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._write: tuple[Path, Future[None]] | None = None
        self._removals: list[tuple[Path, Future[None]]] = []
        self._has_waited = False

    @property
    def in_flight(self) -> bool:
        """Whether the outcome of a save is still to be reported by :meth:`finish_write`; the same on all ranks."""
        return self._write is not None

    @property
    def is_done(self) -> bool:
        """Whether that checkpoint has its name, or has failed; ranks see it a moment apart."""
        return self._write is None or self._write[1].done()

    def save(self, state: dict[str, Any], rest: dict[str, Any], path: Path) -> None:
        """Starts to write a checkpoint; what is changed afterwards does not change it. Call it on all ranks.

        Raises:
            RuntimeError: if the one before it could not be written.
        """
        if not self.is_done and not self._has_waited:
            assert self._write is not None
            self._has_waited = True
            rank_zero_info(
                f"Training waits until {self._write[0]} is written, because {path.name} is due and only one checkpoint"
                " is written at a time. If that takes long, save less often; ModelCheckpoint(save_last=True) saves"
                " twice each time, save_last='link' once. This is said once."
            )
        self.wait()
        serialized = io.BytesIO()
        if dist.get_rank() == 0:
            torch.save(rest, serialized)
        future = self._thread.submit(_write, copy_to_host(state), serialized.getvalue(), path, self._group)
        self._write = path, future

    def remove(self, path: Path) -> None:
        """Deletes a checkpoint once the one that is being written has its name; keeps it if that fails."""
        if self._write is None:
            remove_checkpoint(path)
        else:
            self._removals.append((path, self._thread.submit(_remove_after, self._write[1], path)))

    def finish_write(self) -> None:
        """Waits until the current checkpoint is complete and renamed. Call it on all ranks.

        Raises:
            RuntimeError: if it could not be written; it names the path.
        """
        write, self._write = self._write, None
        error = write[1].exception() if write is not None else None
        if write is not None and error is not None:
            path = write[0]
            raise RuntimeError(
                f"The checkpoint {path} could not be written in the background: {_reason(error)}. Those before it are"
                " complete and were not removed. Correct the cause and resume from the last one:"
                f" ckpt_path=latest_checkpoint({str(path.parent)!r})."
            ) from error

    def wait(self) -> None:
        """The same, and waits until older ones are removed.

        Raises:
            RuntimeError: if either failed; it names the path.
        """
        removals, self._removals = self._removals, []
        self.finish_write()
        for path, removal in removals:
            error = removal.exception()
            if error is not None:
                raise RuntimeError(
                    f"The checkpoint {path} could not be removed: {_reason(error)}. Those after it are complete."
                ) from error

    def close(self) -> None:
        """Waits at the end of a run that something else may have ended; a failed write is a warning."""
        try:
            self.wait()
        except RuntimeError as error:
            rank_zero_warn(str(error))
        finally:
            self._thread.shutdown()


def copy_to_host(state: Any) -> Any:
    """Dictionaries and lists with copies of their tensors in host memory, of DTensors the shards of this rank.

    Example:
        >>> weight = torch.zeros(1)
        >>> copied = copy_to_host({"weight": weight, "betas": [0.9, 0.95]})
        >>> weight += 1
        >>> copied
        {'weight': tensor([0.]), 'betas': [0.9, 0.95]}
    """
    if isinstance(state, Tensor):
        tensor: Any = state.detach()
        if not hasattr(tensor, "__tensor_flatten__"):
            return tensor.clone() if tensor.device.type == "cpu" else tensor.to("cpu")
        # DTensors and quantised states, part by part: torchao's cannot be cloned, and DTensor.from_local would move the
        # copy back to the device of its mesh.
        names, context = tensor.__tensor_flatten__()
        parts = {name: copy_to_host(getattr(tensor, name)) for name in names}
        return type(tensor).__tensor_unflatten__(parts, context, tensor.size(), tensor.stride())
    if isinstance(state, dict):
        return {key: copy_to_host(value) for key, value in state.items()}
    if type(state) in (list, tuple):
        return type(state)(map(copy_to_host, state))
    return copy.deepcopy(state)


def _write(state: dict[str, Any], rest: bytes, path: Path, group: dist.ProcessGroup) -> None:
    """Collectives of the writing threads. If one rank fails, they raise on all ranks."""
    from torch.distributed.checkpoint.state_dict_saver import save  # brings seventy modules of torch along

    temporary = temporary_path(path)

    def begin() -> None:
        begin_checkpoint(path).mkdir()

    def commit() -> None:
        (temporary / REST).write_bytes(rest)
        commit_checkpoint(path)

    _on_rank_zero(begin, group)  # no rank writes into a folder that rank 0 still clears
    save(state, checkpoint_id=temporary, process_group=group)  # ends when all ranks have written
    _on_rank_zero(commit, group)


def _on_rank_zero(function: Callable[[], None], group: dist.ProcessGroup) -> None:
    """Calls it on rank 0 and raises its error on all ranks."""
    failure: list[str | None] = [None]
    if dist.get_rank() == 0:
        try:
            function()
        except Exception as error:
            failure = [_reason(error)]
    dist.broadcast_object_list(failure, src=0, group=group)
    if failure[0] is not None:
        raise RuntimeError(failure[0])


def _remove_after(write: "Future[None]", path: Path) -> None:
    if write.exception() is None:  # it has ended: the thread does one after the other
        remove_checkpoint(path)


def _reason(error: BaseException) -> str:
    """The first error of a rank, where torch's own holds those of all."""
    failures = getattr(error, "failures", None)
    if failures:
        rank, (first, _) = next(iter(failures.items()))
        return f"rank {rank}: {type(first).__name__}: {first}"
    return str(error) if type(error) is RuntimeError else f"{type(error).__name__}: {error}"
