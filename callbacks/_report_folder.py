"""Where callbacks write files."""

from pathlib import Path

import lightning.pytorch as pl


def report_folder(trainer: "pl.Trainer") -> Path:
    """Where callbacks write files: next to the checkpoints, or in ``default_root_dir`` where none are written."""
    dirpath = getattr(trainer.checkpoint_callback, "dirpath", None)
    return Path(dirpath if dirpath is not None else trainer.default_root_dir)
