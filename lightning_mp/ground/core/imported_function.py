"""A function of the user's project, named on the command line."""

import importlib
import inspect
import sys
from collections.abc import Callable
from typing import Any


def import_function(path: str, option: str) -> Callable[[], Any]:
    """The function behind ``package.module:function``; the current folder is searched as well.

    >>> import_function("tempfile:gettempprefix", "--module")()
    'tmp'
    """
    name, colon, function = path.partition(":")
    if not colon or not function.isidentifier() or not all(name.split(".")):
        raise ValueError(f"{option} must be written PACKAGE:FUNCTION, such as my_project.model:example, got {path!r}")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if not f"{name}.".startswith(f"{error.name}."):  # the module is there, and imports one that is not
            raise
        raise ValueError(f"{option} {path} cannot be imported ({error})") from None
    if not hasattr(module, function):
        raise ValueError(f"{option} {path} cannot be imported (module {name!r} has no function {function!r})")
    found: Callable[..., Any] = getattr(module, function)
    if not callable(found):
        raise ValueError(f"{option} {path} must be a function, got {found!r} of type {type(found).__name__}")
    try:
        inspect.signature(found).bind()
    except TypeError as error:
        raise ValueError(f"{option} {path} must be a function without arguments ({error})") from None
    return found
