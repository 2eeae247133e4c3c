"""Names in a message: the first few, and how many more there are."""

from collections.abc import Sequence

__all__ = ["listed"]


def listed(names: Sequence[str], most: int) -> str:
    """Names with commas between them, at most ``most``.

    Example:
        >>> listed(["a", "b", "c"], 2), listed(["a"], 2), listed([], 2)
        ('a, b and 1 more', 'a', '')
    """
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")
