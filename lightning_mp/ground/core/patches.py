"""What a run replaces on other objects: methods and hooks, put back in any order and whatever ends the run."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, ClassVar, Self
from weakref import WeakValueDictionary

import lightning.pytorch as pl

from lightning_mp.ground.core.uncopied import Replacement

_ABSENT = object()


class Patch:
    """An attribute replaced on one instance until :meth:`undo`; copies of the instance have the original.

    Patches of one attribute may be undone in any order: those above continue to work, and the last one leaves the
    attribute as it was, be that absent or None. What others have put on top is never removed, and reaches the original
    from then on.
    """

    # The uppermost patch of each attribute. A patch holds its owner, so an id here is that of a living object.
    _tops: ClassVar["WeakValueDictionary[tuple[int, str], Patch]"] = WeakValueDictionary()

    def __init__(self, owner: object, name: str, replacement: Callable[..., Any] | None) -> None:
        """``replacement`` None has Lightning pass over a hook."""
        self._owner, self._name = owner, name
        self._before: Any = vars(owner).get(name, _ABSENT)
        original = getattr(owner, name, None)
        #: What ``replacement`` replaces; it does nothing where there was no such method.
        self.original: Callable[..., Any] = _nothing if original is None else original
        top = self._tops.get((id(owner), name))
        self._below = top if top is not None and top._value is self._before else None
        self._above: Patch | None = None
        self._is_undone = False
        self._value: Replacement | None = None if replacement is None else Replacement(replacement, owner, name)
        setattr(owner, name, self._value)
        if self._below is not None:
            self._below._above = self
        self._tops[id(owner), name] = self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()

    def undo(self) -> None:
        """Puts back what was there; nothing if it is back already."""
        if self._is_undone:
            return
        self._is_undone = True
        above, below, key = self._above, self._below, (id(self._owner), self._name)
        if above is not None:
            above._before, above._below, above.original = self._before, below, self.original
        elif vars(self._owner).get(self._name, _ABSENT) is self._value:
            if self._before is _ABSENT:
                delattr(self._owner, self._name)
            else:
                setattr(self._owner, self._name, self._before)
        if below is not None:
            below._above = above
        if self._tops.get(key) is self:
            del self._tops[key]
            if below is not None:
                self._tops[key] = below
        if self._value is not None:
            self._value.call(self.original)


def _nothing(*_: Any, **__: Any) -> None:
    return None


class Patches:
    """All that one run of a Trainer has replaced; Lightning's last call of the run puts everything back.

    That call is the module's ``teardown`` at the end of a run, and the strategy's ``teardown`` after an exception, a
    keyboard interrupt or an error in set-up, also where either raises. Where Lightning reaches neither, because a
    callback's ``on_exception`` raised, the next run begins with it.
    """

    def __init__(self, trainer: "pl.Trainer") -> None:
        self._trainer = trainer
        self._ends: list[Callable[[], None]] = []

    @classmethod
    def of(cls, trainer: "pl.Trainer") -> "Patches":
        """Those of the Trainer's present run."""
        patches = vars(trainer).get(_KEY)
        if not isinstance(patches, cls):
            vars(trainer)[_KEY] = patches = cls(trainer)
            patches._watch()
        return patches

    def replace(self, owner: object, name: str, replacement: Callable[..., Any] | None) -> Patch:
        """Replaces an attribute until the run ends, or the patch is undone."""
        patch = Patch(owner, name, replacement)
        self._ends.append(patch.undo)
        return patch

    def around(
        self,
        owner: object,
        name: str,
        before: Callable[[], object] | None = None,
        after: Callable[[], object] | None = None,
    ) -> None:
        """Has functions called before a method, and after it where it raises nothing, until the run ends."""

        def call(*args: Any, **kwargs: Any) -> Any:
            if before is not None:
                before()
            result = patch.original(*args, **kwargs)
            if after is not None:
                after()
            return result

        patch = self.replace(owner, name, call)

    def at_end(self, function: Callable[[], None]) -> None:
        """Calls ``function`` when the run ends, whatever ends it; for hooks, the ``remove`` of their handles."""
        self._ends.append(function)

    def undo_all(self) -> None:
        """Puts everything back, the last first, whatever is raised meanwhile."""
        vars(self._trainer).pop(_KEY, None)
        with ExitStack() as stack:
            for end in self._ends:
                stack.callback(end)
            self._ends = []

    def _watch(self) -> None:
        def begin(*args: Any, **kwargs: Any) -> Any:
            self.undo_all()
            return setup_patch.original(*args, **kwargs)

        def end(*args: Any, **kwargs: Any) -> Any:
            try:
                return ending.original(*args, **kwargs)
            finally:
                self.undo_all()

        def end_if_interrupted(*args: Any, **kwargs: Any) -> Any:
            try:
                return interrupted.original(*args, **kwargs)
            finally:
                if self._trainer.interrupted:
                    self.undo_all()

        trainer = self._trainer
        setup_patch = self.replace(trainer.strategy, "setup_environment", begin)
        ending = self.replace(trainer.lightning_module, "teardown", end)
        interrupted = self.replace(trainer.strategy, "teardown", end_if_interrupted)


_KEY = "_lightning_mp_patches"
