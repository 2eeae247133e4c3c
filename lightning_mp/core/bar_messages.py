"""Messages during a run that have lines of their own, and are not glued to a progress bar."""

import logging
import sys
import warnings
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import TQDMProgressBar

from lightning_mp.core.messages import lightning_logger
from lightning_mp.core.patches import Patches
from lightning_mp.core.uncopied import Replacement


def keep_messages_off_the_bar(trainer: "pl.Trainer") -> None:
    """On a terminal, clears tqdm's bars for a message of Lightning's logger or a warning, and draws them again below.

    A bar is a line without an end, on which a message of another stream continues. Rich's bar sees to it itself.
    """
    bar = trainer.progress_bar_callback
    if not isinstance(bar, TQDMProgressBar) or not sys.stdout.isatty():
        return
    for owner, name in ((warnings, "showwarning"), *((handler, "emit") for handler in _handlers())):
        if not isinstance(vars(owner).get(name), Replacement):
            _clear_bars_around(trainer, bar, owner, name)


def _clear_bars_around(trainer: "pl.Trainer", bar: TQDMProgressBar, owner: object, name: str) -> None:
    def write(*args: Any, **kwargs: Any) -> None:
        try:
            shown = type(bar.train_progress_bar)
        except TypeError:  # Lightning's way to say that there is no bar yet
            patch.original(*args, **kwargs)
            return
        with shown.external_write_mode():
            patch.original(*args, **kwargs)

    patch = Patches.of(trainer).replace(owner, name, write)


def _handlers() -> list[logging.Handler]:
    """What writes the messages of Lightning's logger to a stream."""
    found: list[logging.Handler] = []
    logger: logging.Logger | None = lightning_logger()
    while logger is not None:
        found += [handler for handler in logger.handlers if type(handler) is logging.StreamHandler]
        logger = logger.parent if logger.propagate else None
    return found
