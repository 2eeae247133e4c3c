"""Errors for parts of this package that a Trainer got in the wrong argument; they name the right one."""

import sys
from types import FrameType

import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException

# What a Trainer refuses is printed there.
_CONNECTORS = ("lightning.pytorch.trainer.connectors.accelerator_connector", "lightning.fabric.connector")
_PLACES: tuple[tuple[type, str], ...] = (
    (Callback, "a callback: use Trainer(callbacks=[...])"),
    (Precision, "a precision plugin: use Trainer(plugins=[...]) and leave precision= out"),
    (Strategy, "a strategy: use Trainer(strategy=...)"),
    (torch.amp.GradScaler, "a loss scale: use Trainer(plugins=[AutocastPrecision('16-mixed', scaler=...)])"),
)


def place_hint(part: object, place: str = "") -> str:
    """Where a part belongs, for the ``repr`` in an error of a Trainer; "" elsewhere."""
    place = place or _place_of(part)
    return f" ({place})" if place and asking_module() in _CONNECTORS else ""


def asking_module() -> str:
    """The module outside of this package that called ``repr``."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("lightning_mp."):
        frame = frame.f_back
    name: str = frame.f_globals.get("__name__", "")
    return name


def refuse_among_callbacks(part: object, asking: FrameType) -> None:
    """Refuses what is no callback, and one that is there twice where Lightning looks for that."""
    name = type(part).__name__
    if not isinstance(part, Callback):
        raise MisconfigurationException(f"{name} was given among the callbacks and is {_place_of(part)}.")
    callbacks = asking.f_locals.get("callbacks") if asking.f_code.co_name == "_validate_callbacks_list" else ()
    if sum(type(one) is type(part) for one in callbacks or ()) > 1:
        raise MisconfigurationException(
            f"Trainer(callbacks=[...]) has more than one {name}, and one is enough: they would do the same twice."
            " Remove the others; a list in a YAML file or from configure_callbacks() may bring one."
        )


def _place_of(part: object) -> str:
    return next((place for kind, place in _PLACES if isinstance(part, kind)), "")
