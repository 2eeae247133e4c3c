"""The warning of a monitor about what it cannot watch, once for each reason."""

from lightning.fabric.utilities.rank_zero import rank_zero_warn


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
