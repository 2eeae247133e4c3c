"""The warning of a monitor about what it cannot watch, once for each reason."""

from lightning.fabric.utilities.rank_zero import rank_zero_warn

__all__ = ["LeftOut"]


class LeftOut:
    """Warns on rank 0 of what a monitor leaves out, for each reason once and with the first that it concerns.

    Args:
        owner: the monitor's class, for the message.

    Example:
        >>> import warnings
        >>> left_out = LeftOut("UnderflowMonitor")
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     for name in ("net.0", "net.1"):
        ...         left_out.tell(f"module {name!r}", "TorchScript modules take no hooks")
        >>> [str(one.message) for one in caught]
        ["UnderflowMonitor leaves out module 'net.0', and whatever else is like it: TorchScript modules take no hooks."]
    """

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._told: set[str] = set()

    def tell(self, what: str, reason: str) -> None:
        """Warns, unless this reason was given before.

        Args:
            what: what is left out, with its name.
            reason: why it cannot be watched.
        """
        if reason not in self._told:
            self._told.add(reason)
            rank_zero_warn(
                f"{self._owner} leaves out {what}, and whatever else is like it: {reason}.", category=UserWarning
            )
