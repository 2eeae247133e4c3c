"""Messages: names in them, the first few and how many more there are; and where Lightning's go."""

import logging
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_module, rank_zero_warn

#: Words in torch's errors about two dtypes, or about a dtype that an operation does not have.
ABOUT_DTYPES = ("dtype", "scalar type", "should be the same", "not implemented for")


def listed(names: Sequence[str], most: int = 5) -> str:
    """Names with commas between them, the first ``most`` of them and how many more there are.

    >>> listed(["a", "b", "c"], 2), listed(["a"], 2), listed([], 2)
    ('a, b and 1 more', 'a', '')
    """
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def place_of(error: BaseException) -> str:
    """Where an error began, outside of torch and of this package: ``model.py:12 in forward``, or "the step"."""
    return place_in(traceback.extract_tb(error.__traceback__))


def place_in(calls: Iterable[traceback.FrameSummary]) -> str:
    """The same of calls, the innermost last."""
    call = users_call(calls)
    return f"{Path(call.filename).name}:{call.lineno} in {call.name}" if call is not None else "the step"


def users_call(calls: Iterable[traceback.FrameSummary]) -> traceback.FrameSummary | None:
    """The last call outside of torch and of this package."""
    ours = str(Path(torch.__file__).resolve().parent), str(Path(__file__).resolve().parents[2])
    return next((call for call in reversed([*calls]) if not str(Path(call.filename).resolve()).startswith(ours)), None)


def lightning_logger() -> logging.Logger:
    """Where Lightning's messages go: to whichever of ``lightning`` and ``pytorch_lightning`` was imported last."""
    logger: logging.Logger = rank_zero_module.log
    return logger


class WarnOnce:
    """Warns on rank 0 of what a monitor leaves out, for each reason once and with the first that it concerns.

    >>> import warnings
    >>> warn_once = WarnOnce("UnderflowMonitor")
    >>> with warnings.catch_warnings(record=True) as caught:
    ...     warnings.simplefilter("always")
    ...     for name in ("net.0", "net.1"):
    ...         warn_once.warn(f"module {name!r}", "TorchScript modules take no hooks")
    >>> [str(one.message) for one in caught]
    ["UnderflowMonitor leaves out module 'net.0', and whatever else is like it: TorchScript modules take no hooks."]
    """

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._reported: set[str] = set()

    def warn(self, what: str, reason: str) -> None:
        """Warns, unless this reason was given before."""
        if reason not in self._reported:
            self._reported.add(reason)
            rank_zero_warn(
                f"{self._owner} leaves out {what}, and whatever else is like it: {reason}.", category=UserWarning
            )
