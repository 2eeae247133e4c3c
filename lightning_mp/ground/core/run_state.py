"""The state that this package keeps for a Trainer: the parts of its run, its patches and its callbacks."""

from collections.abc import Callable
from typing import Any, Literal, TypeVar

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback, Checkpoint

from lightning_mp.ground.core.patches import Patches
from lightning_mp.ground.core.private_trainer_api import callbacks_of, set_callbacks

_KEY = "_lightning_mp_run"
_Part = TypeVar("_Part")
_Called = TypeVar("_Called", bound=Callback)


class RunState:
    """One per Trainer. Its parts, at most one of each class, are removed when the run ends, also by an exception."""

    def __init__(self, trainer: "pl.Trainer") -> None:
        self._trainer = trainer
        self._parts: dict[type, tuple[Any, Callable[[], None] | None]] = {}
        self.skipped_steps = 0
        #: An attempt at the current batch has failed: what has run since it began is not one forward and backward.
        self.is_repeating = False

    @classmethod
    def of(cls, trainer: "pl.Trainer") -> "RunState":
        """The state of a Trainer; created at the first call."""
        state = vars(trainer).get(_KEY)
        if not isinstance(state, cls):
            vars(trainer)[_KEY] = state = cls(trainer)
        return state

    # -- parts of a run ------------------------------------------------------------------------------------------------

    def keep(self, part: object, flush: Callable[[], None] | None = None) -> None:
        """Registers a part until :meth:`drop` or the end of the run; ``flush`` is called by :meth:`flush`."""
        self._parts[type(part)] = part, flush
        Patches.of(self._trainer).at_end(lambda: self.drop(part))

    def drop(self, part: object) -> None:
        """Removes a part."""
        if self._parts.get(type(part), (None,))[0] is part:
            self._parts.pop(type(part), None)

    def find(self, kind: type[_Part]) -> _Part | None:
        """The part of a class, or of one derived from it, if there is one."""
        return next((part for part, _ in self._parts.values() if isinstance(part, kind)), None)

    def flush(self) -> None:
        """Reads pending values from the device: the outcome of the last step."""
        for _, flush in list(self._parts.values()):
            if flush is not None:
                flush()

    @property
    def parts(self) -> list[object]:
        """The registered parts; none between two runs."""
        return [part for part, _ in self._parts.values()]

    # -- callbacks -----------------------------------------------------------------------------------------------------

    def callback(self, kind: type[_Called]) -> _Called | None:
        """The first of the Trainer's callbacks of a class, if there is one."""
        return next((callback for callback in callbacks_of(self._trainer) if isinstance(callback, kind)), None)

    def place_callback(
        self, callback: Callback, place: Literal["first", "before checkpoints", "last"] = "first"
    ) -> None:
        """Adds a callback to those of the Trainer, or moves it."""
        others = [other for other in callbacks_of(self._trainer) if other is not callback]
        saving = [index for index, other in enumerate(others) if isinstance(other, Checkpoint)]
        index = {"first": 0, "before checkpoints": min(saving, default=len(others)), "last": len(others)}[place]
        # A new list: Lightning is walking through the old one while callbacks are set up.
        set_callbacks(self._trainer, [*others[:index], callback, *others[index:]])

    def remove_callback(self, callback: Callback) -> None:
        """Removes a callback from those of the Trainer."""
        set_callbacks(self._trainer, [other for other in callbacks_of(self._trainer) if other is not callback])
