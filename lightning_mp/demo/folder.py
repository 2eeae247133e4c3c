"""Where a run keeps its files, and what a checkpoint of it holds."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lightning_mp.demo.history import HISTORY_KEY

__all__ = ["RunFolder", "load_checkpoint"]

_VERSION = re.compile(r"version_(\d+)")


@dataclass(frozen=True)
class RunFolder:
    """The folder of one run: ``OUT/version_N``, as Lightning's loggers name theirs.

    Attributes:
        path: The folder.
    """

    path: Path

    @classmethod
    def new(cls, out: Path) -> "RunFolder":
        """The next free folder under ``out``; nothing is made yet.

        Raises:
            ValueError: If ``out`` is a file.
        """
        if out.exists() and not out.is_dir():
            raise ValueError(f"--out {out} is a file: give a folder, which is made if it is missing.")
        return cls(out / f"version_{max(_versions(out), default=-1) + 1}")

    @classmethod
    def latest(cls, out: Path) -> "RunFolder":
        """The newest run under ``out`` that has a checkpoint, or ``out`` itself if it is a run's folder.

        Raises:
            ValueError: If there is none.
        """
        itself = cls(out)
        if itself.checkpoint.is_file():
            return itself
        for version in sorted(_versions(out), reverse=True):
            folder = cls(out / f"version_{version}")
            if folder.checkpoint.is_file():
                return folder
        raise ValueError(
            f"--resume finds no checkpoint under {out}: start a run without --resume, or name the folder of the run "
            "with --out."
        )

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.path / "checkpoints"

    @property
    def checkpoint(self) -> Path:
        """The last checkpoint."""
        return self.checkpoints / "last.ckpt"

    @property
    def history(self) -> Path:
        """What happened, as JSON."""
        return self.path / "history.json"

    @property
    def summary(self) -> Path:
        """The final table, as JSON."""
        return self.path / "summary.json"

    @property
    def report(self) -> Path:
        """The picture."""
        return self.path / "report.png"

    @property
    def sample(self) -> Path:
        """Text written by the trained model."""
        return self.path / "sample.txt"


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Reads a checkpoint of the demo; its tensors stay on disk until they are used.

    Raises:
        ValueError: If it cannot be read or was not written by the demo.
    """
    try:
        checkpoint = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # torch raises half a dozen kinds for a damaged file
        raise ValueError(
            f"the checkpoint {path} cannot be read ({type(error).__name__}): start a new run without --resume."
        ) from error
    if not isinstance(checkpoint, dict) or HISTORY_KEY not in checkpoint.get("callbacks", {}):
        raise ValueError(
            f"the checkpoint {path} was not written by this demo: name the folder of a demo run with --out, or start a "
            "new run without --resume."
        )
    return checkpoint


def _versions(out: Path) -> list[int]:
    if not out.is_dir():
        return []
    return [int(match[1]) for entry in out.iterdir() if (match := _VERSION.fullmatch(entry.name))]
