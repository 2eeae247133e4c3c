"""Values of a folder with shards, whole and nested as they were when they were saved."""

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata


def read_values(
    folder: Path,
    metadata: "Metadata",
    wanted: Callable[[Sequence[str | int]], bool],
    *,
    weights_only: bool | None,
    no_dist: bool = False,
) -> dict[str, Any]:
    """Reads values as they are, tensors whole and on the CPU."""
    # Bring seventy modules of torch along, so not at the top.
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    from lightning_mp.checkpoints.checked_folder import load_shards

    flat: dict[str, Any] = {}
    for name, entry in metadata.state_dict_metadata.items():
        if wanted(metadata.planner_data[name]):
            flat[name] = None
            if isinstance(entry, TensorStorageMetadata):
                flat[name] = torch.empty(entry.size, dtype=entry.properties.dtype)
    load_shards(flat, folder, weights_only=weights_only, no_dist=no_dist)
    nested: dict[str, Any] = {}
    for name, value in flat.items():
        _put(nested, metadata.planner_data[name], value)
    return nested


def _put(nested: Any, path: Sequence[str | int], value: Any) -> None:
    """Steps are keys of dictionaries, or places in lists."""
    for step, following in itertools.pairwise(path):
        nested = _at(nested, step, [] if isinstance(following, int) else {})
    last = path[-1]
    _at(nested, last, None)
    nested[last] = value


def _at(container: Any, step: str | int, missing: Any) -> Any:
    if isinstance(container, list):
        assert isinstance(step, int)
        container.extend(None for _ in range(step + 1 - len(container)))
        if container[step] is None:
            container[step] = missing
    else:
        container.setdefault(step, missing)
    return container[step]
