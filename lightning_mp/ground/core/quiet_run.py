"""A Trainer inside a longer program: what Lightning says of every run is left out, and Ctrl-C stays what it was."""

import logging
import signal
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from lightning_mp.ground.core.messages import lightning_logger


@contextmanager
def quiet_lightning(level: int, *ignored_warnings: str) -> Iterator[None]:
    """Keeps off the terminal Lightning's messages below a level, its tips, and warnings about nothing in the run."""
    logger = lightning_logger()
    # Lightning prints the default of `weights_only` with every checkpoint.
    saving = logging.getLogger("lightning.pytorch.trainer.connectors.checkpoint_connector")
    levels = logger.level, saving.level
    with warnings.catch_warnings():
        # Lightning-AI/pytorch-lightning#21326, in 2.6 with torch 2.11 or newer
        for message in (r"`isinstance\(treespec, LeafSpec\)` is deprecated", *ignored_warnings):
            warnings.filterwarnings("ignore", message)
        logger.setLevel(max(level, logger.level))
        saving.setLevel(logging.WARNING)
        logger.addFilter(_is_no_tip)
        try:
            yield
        finally:
            logger.removeFilter(_is_no_tip)
            logger.setLevel(levels[0])
            saving.setLevel(levels[1])


def _is_no_tip(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith("\N{ELECTRIC LIGHT BULB} Tip:")


@contextmanager
def interrupts_kept() -> Iterator[None]:
    """Ctrl-C stays KeyboardInterrupt: Lightning ends the process instead, and ignores the signal afterwards."""
    previous = signal.getsignal(signal.SIGINT)
    try:
        yield
    except SystemExit:
        raise KeyboardInterrupt from None
    finally:
        if signal.getsignal(signal.SIGINT) is not previous:
            signal.signal(signal.SIGINT, previous)
