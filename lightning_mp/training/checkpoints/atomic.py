"""Checkpoints that are written completely or not at all, whenever the process is killed.

A checkpoint is written under a hidden temporary name in the same folder, synced to disk (``fsync``) and then
renamed, which a POSIX file system does in one step. A directory checkpoint gets a marker with the sizes of its files
before it is renamed, so that a partially copied or deleted directory is not mistaken for a checkpoint.
"""

import json
import os
import shutil
import zipfile
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from typing_extensions import override

from lightning_mp.ground.core.namespace_hint import NamespaceHint

# How hidden names end: of what is being written, of what makes place for it, and of what is being deleted.
INCOMPLETE = ".incomplete"
PREVIOUS = ".previous"
REMOVED = ".removed"


def temporary_path(path: Path) -> Path:
    """Where a checkpoint is written until it is complete."""
    return path.with_name(f".{path.name}{INCOMPLETE}")


def previous_path(path: Path) -> Path:
    """Where a directory checkpoint waits for the moment in which another takes its name."""
    return path.with_name(f".{path.name}{PREVIOUS}")


def existing_checkpoint(path: Path) -> Path:
    """The checkpoint of that name, for reading; after a kill it may be a complete directory under a hidden name."""
    temporary, previous = temporary_path(path), previous_path(path)
    if temporary.is_dir() and is_complete(temporary):
        return temporary
    return previous if previous.exists() and not path.exists() else path


def recover_checkpoint(path: Path) -> None:
    """Gives a complete directory that was found under a hidden name the name it was to have."""
    for ending in (INCOMPLETE, PREVIOUS):
        if path.name.startswith(".") and path.name.endswith(ending):
            begin_checkpoint(path.with_name(path.name.removeprefix(".").removesuffix(ending)))


def marker_path(directory: Path) -> Path:
    """The file that is written last into a directory checkpoint: its file names with their sizes in bytes."""
    return directory / ".complete.json"


def is_local(path: str | os.PathLike[str]) -> bool:
    """Whether a path is on a mounted file system; object stores show an object only when it is complete."""
    return "://" not in os.fspath(path)


def is_complete(path: Path) -> bool:
    """Whether a checkpoint was written to its end: an archive with its directory, or a directory with its marker."""
    if not path.is_dir():
        return path.is_file() and zipfile.is_zipfile(path)
    try:
        sizes = json.loads(marker_path(path).read_text())["files"]
        return all((path / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError):
        return False


def refuse_shards(path: Path, reader: str) -> None:
    """Says what to do with a folder of shards where a single file is needed."""
    if path.is_dir():
        raise MisconfigurationException(
            f"{reader} cannot load {path}: it is a folder with shards. Make a single file of it:"
            f" lightning_mp.checkpoints.consolidate_checkpoint({str(path)!r}, 'whole.ckpt')"
        )


def begin_checkpoint(path: Path) -> Path:
    """Clears away what a killed run left under this name, and returns the temporary name to write to.

    If the process was killed before a complete directory got its name, or while one took the place of another, the
    newer complete one gets it now.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary, previous = temporary_path(path), previous_path(path)
    standing = existing_checkpoint(path)
    if standing == temporary:
        _rename(path)
    elif standing == previous:
        os.replace(previous, path)
    remove_checkpoint(temporary)
    remove_checkpoint(previous)
    for leftover in path.parent.glob(f".*{REMOVED}"):
        shutil.rmtree(leftover)
    return temporary


def commit_checkpoint(path: Path) -> None:
    """Gives a checkpoint that was written to ``temporary_path(path)`` its name, in one step."""
    temporary = temporary_path(path)
    if temporary.is_dir():
        _mark(temporary)
    else:
        _sync(temporary)
    _rename(path)
    remove_checkpoint(previous_path(path))


def _rename(path: Path) -> None:
    temporary = temporary_path(path)
    # A directory cannot take the name of another; the one in the way stays complete until the new one is in place.
    if path.is_dir() or (temporary.is_dir() and path.exists()):
        os.replace(path, previous_path(path))
    os.replace(temporary, path)
    _sync(path.parent)


def remove_checkpoint(path: Path) -> None:
    """Deletes a checkpoint, if it is there. A directory loses its name first, so that no half of it is seen."""
    if path.is_dir() and not path.is_symlink():
        removed = path.with_name(f"{path.name}{REMOVED}" if path.name.startswith(".") else f".{path.name}{REMOVED}")
        if removed.exists():
            shutil.rmtree(removed)
        os.replace(path, removed)
        shutil.rmtree(removed)
    else:
        path.unlink(missing_ok=True)


def _mark(directory: Path) -> None:
    # A strategy that marks its own has left one already, which is about to be another.
    entries = sorted(entry for entry in directory.rglob("*") if entry != marker_path(directory))
    for entry in entries:
        _sync(entry)
    sizes = {str(entry.relative_to(directory)): entry.stat().st_size for entry in entries if entry.is_file()}
    marker = marker_path(directory)
    marker.write_text(json.dumps({"files": sizes}))
    _sync(marker)
    _sync(directory)


def _sync(path: Path) -> None:
    if path.is_dir() and not hasattr(os, "O_DIRECTORY"):
        return  # Windows opens no directories
    descriptor = os.open(path, os.O_RDONLY if hasattr(os, "O_DIRECTORY") else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class AtomicCheckpointIO(NamespaceHint, TorchCheckpointIO):
    """Writes single-file checkpoints so that a kill at any moment leaves either the old or the new file intact.

    Lightning's own plugin writes to the system's temporary folder and moves the file from there. That is a copy if the
    folder is on another disk, and the file is not synced. This one writes beside the target, without a second copy in
    memory, syncs and renames. Paths with a protocol, such as ``s3://``, are left to Lightning: object stores show only
    complete objects.

    Directory checkpoints (``save_distributed_checkpoint=True``, ``state_dict_type="sharded"``) are written by the
    strategy, not by a plugin: use the callback :class:`~lightning_mp.AtomicCheckpoints`, which covers both kinds.

    Raises:
        TypeError: on saving, if ``storage_options`` are given, like Lightning's own plugin.

    Example:
        >>> import lightning.pytorch as pl
        >>> trainer = pl.Trainer(plugins=[AtomicCheckpointIO()], accelerator="cpu", logger=False)
        >>> type(trainer.strategy.checkpoint_io).__name__
        'AtomicCheckpointIO'
    """

    kind = "checkpoint plugin"

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        """Writes the checkpoint under a temporary name and renames it."""
        if storage_options is not None or not is_local(path):
            super().save_checkpoint(checkpoint, os.fspath(path), storage_options)
            return
        temporary = begin_checkpoint(Path(path))
        try:
            with temporary.open("wb") as file:
                torch.save(checkpoint, file)
            commit_checkpoint(Path(path))
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise

    @override
    def load_checkpoint(self, path: str | os.PathLike[str], *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Reads a single file; strategies that write directories read them themselves.

        Raises:
            MisconfigurationException: if the path is a directory.
        """
        if is_local(path):
            refuse_shards(Path(path), "This strategy")
        return super().load_checkpoint(os.fspath(path), *args, **kwargs)

    @override
    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Deletes a checkpoint so that no half of it looks like one."""
        if is_local(path):
            remove_checkpoint(Path(path))
        else:
            super().remove_checkpoint(os.fspath(path))
