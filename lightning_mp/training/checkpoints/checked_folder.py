"""Reads a folder of torch.distributed.checkpoint without running code that was put into it.

torch unpickles its file ``.metadata``, and every value that is no tensor, without restriction, also where
``weights_only=True`` was requested. Not to be imported before it is needed: it brings seventy modules of torch along.
"""

import io
import itertools
import os
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load
from typing_extensions import override

_METADATA = "torch.distributed.checkpoint.metadata"

#: All that torch 2.11 to 2.15 write into ``.metadata``, besides dtypes: classes that hold numbers and names.
_ALLOWED = {
    (_METADATA, "BytesStorageMetadata"),
    (_METADATA, "ChunkStorageMetadata"),
    (_METADATA, "Metadata"),
    (_METADATA, "MetadataIndex"),
    (_METADATA, "StorageMeta"),
    (_METADATA, "TensorProperties"),
    (_METADATA, "TensorStorageMetadata"),
    (_METADATA, "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
}
#: The folder's name when it was written, perhaps on another system; nothing is opened by it.
_PATHS = {"PosixPath": PurePosixPath, "WindowsPath": PureWindowsPath}


class CheckedReader(FileSystemReader):
    """torch's reader, with a ``.metadata`` that may hold what torch writes and nothing else."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        super().__init__(folder)
        self._folder = Path(folder)

    @override
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The folder's table of contents."""
        rank = kwargs.get("rank")
        file = self._folder / (".metadata" if rank is None else f"__{rank}.metadata")
        with file.open("rb") as opened:
            metadata = _MetadataUnpickler(opened, file).load()
        if not isinstance(metadata, Metadata):
            raise ValueError(
                f"{file} holds a {type(metadata).__name__}, not a table of contents as written by"
                " torch.distributed.checkpoint. Use another checkpoint."
            )
        if getattr(metadata, "storage_meta", None) is None:
            metadata.storage_meta = StorageMeta()
        assert metadata.storage_meta is not None
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _MetadataUnpickler(pickle.Unpickler):
    def __init__(self, opened: io.BufferedReader, file: Path) -> None:
        super().__init__(opened)
        self._file = file

    @override
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            return super().find_class(module, name)
        if module.partition(".")[0] == "pathlib" and name in _PATHS:
            return _PATHS[name]
        dtype = getattr(torch, name, None) if module == "torch" else None
        if isinstance(dtype, torch.dtype):
            return dtype
        if (module, name) == ("builtins", "getattr"):  # how some releases of Python 3.11 write members of an Enum
            return self._member
        raise ValueError(
            f"{self._file} refers to {module}.{name}, which torch.distributed.checkpoint does not write there: reading"
            " it could run code, so nothing was read. Do not use this checkpoint, unless a torch newer than 2.15 wrote"
            " it and you know what this name means."
        )

    def _member(self, owner: Any, name: str) -> Any:
        if owner is not super().find_class(_METADATA, "_MEM_FORMAT_ENCODING"):
            return self.find_class("builtins", f"getattr({owner!r}, {name!r})")
        return owner[name]


class _CheckedPlanner(DefaultLoadPlanner):
    """torch's plan of what to read, with values that are no tensors restricted as ``torch.load`` would."""

    def __init__(self, folder: Path, weights_only: bool | None) -> None:
        super().__init__()
        self._folder = folder
        self._weights_only = weights_only
        self.refusal: str | None = None

    @override
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        try:
            torch.load(value, weights_only=self._weights_only)
        except pickle.UnpicklingError as error:
            reason = str(error).partition("WeightsUnpickler error: ")[2].partition("\n")[0] or str(error)
            self.refusal = (
                f"The value {read_item.storage_index.fqn!r} in the folder {self._folder} is not read, because it could"
                f" run code: {reason}"
            )
            raise
        value.seek(0)
        super().load_bytes(read_item, value)


def load_shards(state: dict[str, Any], folder: Path, *, weights_only: bool | None, no_dist: bool = False) -> None:
    """``torch.distributed.checkpoint.load`` of a folder that is not trusted."""
    planner = DefaultLoadPlanner() if weights_only is False else _CheckedPlanner(folder, weights_only)
    read: Callable[..., None] = load
    try:
        read(state, storage_reader=CheckedReader(folder), planner=planner, no_dist=no_dist)
    except CheckpointException:
        refusal = getattr(planner, "refusal", None)
        if refusal is None:
            raise
        raise ValueError(refusal) from None


def read_values(
    folder: Path,
    metadata: Metadata,
    wanted: Callable[[Sequence[str | int]], bool],
    *,
    weights_only: bool | None,
    no_dist: bool = False,
) -> dict[str, Any]:
    """Reads values as they are, tensors whole and on the CPU, nested as they were when they were saved."""
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
