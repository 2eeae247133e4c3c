"""Prints messages during a run on separate lines, not at the end of a progress bar."""

import logging
import sys
import warnings
from contextlib import nullcontext
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import TQDMProgressBar

from lightning_mp.ground.core.messages import lightning_logger
from lightning_mp.ground.core.patches import Patches
from lightning_mp.ground.core.uncopied import Replacement


def keep_messages_off_the_bar(trainer: "pl.Trainer") -> None:
    """On a terminal, clears tqdm's bars for a message of Lightning's logger or a warning, and redraws them below."""
    bar = trainer.progress_bar_callback
    if isinstance(bar, TQDMProgressBar) and sys.stdout.isatty():
        logger = lightning_logger()
        handlers = [*logger.handlers, *(logger.parent.handlers if logger.parent is not None else ())]
        streams = [handler for handler in handlers if type(handler) is logging.StreamHandler]
        for owner, name in ((warnings, "showwarning"), *((handler, "emit") for handler in streams)):
            if not isinstance(vars(owner).get(name), Replacement):
                _clear_bars_around(trainer, bar, owner, name)


def _clear_bars_around(trainer: "pl.Trainer", bar: TQDMProgressBar, owner: object, name: str) -> None:
    def write(*args: Any, **kwargs: Any) -> None:
        try:
            cleared = type(bar.train_progress_bar).external_write_mode()
        except TypeError:  # Lightning's way to say that there is no bar yet
            cleared = nullcontext()
        with cleared:
            patch.original(*args, **kwargs)

    patch = Patches.of(trainer).replace(owner, name, write)
