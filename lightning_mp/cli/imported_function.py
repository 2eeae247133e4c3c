"""A function of the user's project, named on the command line."""

import importlib
import sys
from collections.abc import Callable
from typing import Any

__all__ = ["import_function"]


def import_function(path: str, option: str) -> Callable[[], Any]:
    """The function behind ``package.module:function``; the current folder is searched as well.

    Args:
        path: as it was written.
        option: for the message.

    Raises:
        ValueError: it is written otherwise, or cannot be imported.

    Example:
        >>> import_function("math:sqrt", "--module")(9)
        3.0
    """
    name, colon, function = path.partition(":")
    if not colon or not function.isidentifier():
        raise ValueError(f"{option} must be written PACKAGE:FUNCTION, such as my_project.model:example, got {path!r}")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        found: Callable[..., Any] = getattr(importlib.import_module(name), function)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{option} {path} cannot be imported ({error})") from None
    return found
