"""A hint for parts that are given to ``pytorch_lightning``, whose errors print objects that they do not know."""

from typing import ClassVar

from typing_extensions import override

from lightning_mp.ground.core.misplaced_parts import asking_module, place_hint
from lightning_mp.ground.core.settings_repr import SettingsRepr


class NamespaceHint(SettingsRepr):
    """Shows the settings; where a Trainer refuses it, the import that it needs, or where it belongs.

    >>> class Part(NamespaceHint):
    ...     kind = "strategy"
    >>> "import" in repr(Part())
    False
    """

    #: What it is, for the hint.
    kind: ClassVar[str]

    @override
    def __repr__(self) -> str:
        """Its class, and the hint."""
        hint = namespace_hint(self.kind) or place_hint(self)
        return f"{type(self).__name__}{hint}" if hint else super().__repr__()


def namespace_hint(kind: str) -> str:
    """For a ``__repr__``: which import a part needs, if ``pytorch_lightning`` calls it; "" elsewhere."""
    if asking_module().partition(".")[0] != "pytorch_lightning":
        return ""
    use = "`import lightning.pytorch as pl`, not `import pytorch_lightning as pl`"
    return f" (a {kind} for lightning.pytorch: with it use {use})"
