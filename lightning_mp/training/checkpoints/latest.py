"""Finds the checkpoint from which to resume a killed run."""

import os
from pathlib import Path

from lightning.fabric.utilities.rank_zero import rank_zero_warn

from lightning_mp.training.checkpoints.atomic import INCOMPLETE, PREVIOUS, is_complete, is_local, marker_path

SUFFIX = ".ckpt"


def latest_checkpoint(dirpath: str | os.PathLike[str]) -> Path | None:
    """The latest complete checkpoint in a folder, or None, with which a run starts from scratch.

    Write ``trainer.fit(..., ckpt_path=latest_checkpoint(folder))``: the same line works for the first start and every
    restart. The folder is not changed. Files and directories named ``*.ckpt`` are considered. A file is complete if the
    end of its archive is intact, a directory if it has the marker written by :class:`~lightning_mp.AtomicCheckpoints`
    and each file has the recorded size; incomplete ones are skipped with a warning. A directory without the marker may
    mix two saves, so pass its path explicitly. Keep checkpoints with ``save_weights_only=True``, which cannot be
    resumed from, in another folder.

    Args:
        dirpath: folder of the checkpoints, as in ``ModelCheckpoint(dirpath=...)``, or of several runs, such as
            ``"lightning_logs"``; it need not exist yet.

    Raises:
        ValueError: if it is a URL or a file.

    Example:
        >>> latest_checkpoint("no/such/folder") is None
        True
    """
    if not is_local(dirpath):
        raise ValueError(
            f"latest_checkpoint({os.fspath(dirpath)!r}): only folders of a mounted file system can be read. Mount it,"
            " or give ckpt_path itself."
        )
    folder = Path(dirpath)
    if folder.is_file():
        raise ValueError(
            f"latest_checkpoint({str(folder)!r}) is a file; give its folder, or give the file itself as ckpt_path."
        )
    complete = []
    for path in folder.iterdir() if folder.is_dir() else ():
        # Of hidden names, a marked directory counts whose process was killed before it could rename it.
        hidden = path.name.startswith(".")
        looked_at = path.is_dir() and path.name.endswith((INCOMPLETE, PREVIOUS)) if hidden else path.suffix == SUFFIX
        if not looked_at or not path.exists():
            continue
        if is_complete(path):
            complete.append(path)
        elif not hidden:
            rank_zero_warn(
                f"latest_checkpoint skips {path}: "
                + (
                    f"it has no valid {marker_path(path).name}, so it may be half of a checkpoint. Use"
                    " AtomicCheckpoints in the run that writes it, or give this path as ckpt_path."
                    if path.is_dir()
                    else "the file ends too early. Its process was probably killed while it wrote; delete it."
                )
            )
    if complete:
        return max(complete, key=_order)
    runs = sorted((int(run.name[8:]), run) for run in folder.glob("version_*") if run.name[8:].isdecimal())
    for run in (folder / "checkpoints", *(run for _, run in reversed(runs))):
        found = latest_checkpoint(run) if run.is_dir() else None
        if found is not None:
            return found
    return None


def _order(path: Path) -> tuple[int, bool, str]:
    """By time; a file goes before a link to it."""
    written = marker_path(path) if path.is_dir() else path
    return written.stat().st_mtime_ns, not path.is_symlink(), path.name
