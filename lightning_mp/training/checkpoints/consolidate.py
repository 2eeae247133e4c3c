"""Converts a folder of shards to a single file that any strategy reads."""

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from lightning_mp.training.checkpoints.atomic import AtomicCheckpointIO, is_complete, marker_path
from lightning_mp.training.checkpoints.sharded import REST, is_sharded_checkpoint

# Keys of the weights: Lightning's FSDPStrategy, and all others.
_FSDP1_WEIGHTS, _WEIGHTS = "model", "state_dict"


def consolidate_checkpoint(folder: str | os.PathLike[str], file: str | os.PathLike[str]) -> Path:
    """Converts a sharded checkpoint to a single file, for a run on one device, under DDP or under any other strategy.

    It runs in one process, without a Trainer, and holds the whole checkpoint in host memory once: weights,
    optimizer states and everything else that a run needs to resume. ``FSDP2Strategy``, ``ModelParallelStrategy`` and
    ``FSDPStrategy`` write such folders; Lightning's own ``consolidate_checkpoint`` reads only those of the last one.
    It unpickles everything except tensors and metadata, so use it only on folders that you trust.

    Args:
        folder: the checkpoint, with ``meta.pt`` and shards in it.
        file: the new file; it must not exist yet.

    Returns:
        The file.

    Raises:
        ValueError: if ``folder`` is not such a folder or is incomplete, its ``.metadata`` refers to anything that torch
            does not write there, or ``file`` exists.

    Example:
        >>> consolidate_checkpoint("step=10.ckpt", "whole.ckpt")
        Traceback (most recent call last):
        ...
        ValueError: consolidate_checkpoint('step=10.ckpt', ...): no folder with a meta.pt and shards is there.
    """
    source, target = Path(folder), Path(file)
    if not is_sharded_checkpoint(source):
        what = "it is a single file already" if source.is_file() else f"no folder with a {REST} and shards is there"
        raise ValueError(f"consolidate_checkpoint({str(source)!r}, ...): {what}.")
    if marker_path(source).exists() and not is_complete(source):
        raise ValueError(
            f"consolidate_checkpoint({str(source)!r}, ...): files are missing or shorter than"
            f" {marker_path(source).name} says of them. Use another checkpoint; latest_checkpoint finds the last"
            " complete one."
        )
    if target.exists():
        raise ValueError(
            f"consolidate_checkpoint(..., {str(target)!r}): this exists already. Give another name, or delete it."
        )
    AtomicCheckpointIO().save_checkpoint(read_folder(source, weights_only=False), target)
    return target


def read_folder(folder: Path, *, weights_only: bool) -> dict[str, Any]:
    """The whole checkpoint of a folder with shards, as a single file would hold it."""
    shards = _read(folder, weights_only)
    checkpoint: dict[str, Any] = torch.load(folder / REST, map_location="cpu", weights_only=weights_only)
    checkpoint["state_dict"] = shards.pop(_FSDP1_WEIGHTS if _WEIGHTS not in shards else _WEIGHTS)
    states = [by_number(shards[key]) for key in sorted(shards, key=lambda key: int(key.removeprefix("optimizer_")))]
    if states:
        checkpoint["optimizer_states"] = states
    return checkpoint


def by_number(state: Mapping[str, Any]) -> dict[str, Any]:
    """An optimizer's state by names of parameters, as its ``state_dict()`` on one device has it: by their places.

    Example:
        >>> by_number({"state": {"b": {"step": 3}}, "param_groups": [{"params": ["a"]}, {"params": ["b"]}]})
        {'state': {1: {'step': 3}}, 'param_groups': [{'params': [0]}, {'params': [1]}]}
    """
    names = [name for group in state["param_groups"] for name in group["params"]]
    places = {name: place for place, name in enumerate(names)}
    groups = [{**group, "params": [places[name] for name in group["params"]]} for group in state["param_groups"]]
    values = {places[name]: values for name, values in state.get("state", {}).items()}
    return {"state": dict(sorted(values.items())), "param_groups": groups}


def _read(folder: Path, weights_only: bool) -> dict[str, Any]:
    """All that the shards hold, as it was nested when it was saved."""
    # Brings seventy modules of torch along, so not at the top.
    from lightning_mp.training.checkpoints.checked_folder import CheckedReader, read_values

    metadata = CheckedReader(folder).read_metadata()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        return read_values(folder, metadata, lambda _: True, weights_only=weights_only, no_dist=True)
