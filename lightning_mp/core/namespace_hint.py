"""What appears in an error of ``pytorch_lightning`` that prints a part of ours: which import it needs."""

import inspect
from typing import ClassVar

from lightning_mp.core.settings_repr import SettingsRepr


class NamespaceHint(SettingsRepr):
    """Shows its settings, and the hint where ``pytorch_lightning`` asks: its errors print what they do not know.

    Example:
        >>> class Part(NamespaceHint):
        ...     kind = "strategy"
        >>> "import" in repr(Part())
        False
    """

    #: What it is, for the hint.
    kind: ClassVar[str]

    def __repr__(self) -> str:
        """Its class, and the hint."""
        if not is_called_from("pytorch_lightning"):
            return super().__repr__()
        return (
            f"{type(self).__name__}, a {self.kind} for lightning.pytorch: with it use"
            " `import lightning.pytorch as pl`, not `import pytorch_lightning as pl`"
        )


def is_called_from(package: str) -> bool:
    """Whether a function of this package is among those that wait for this one."""
    frame = inspect.currentframe()
    while frame is not None:
        if str(frame.f_globals.get("__name__")).split(".")[0] == package:
            return True
        frame = frame.f_back
    return False
