"""For tests that start Python: what a new process need not import."""

import os
from pathlib import Path

#: Python reads a `sitecustomize.py` that is in its path.
PLAIN_INSTALL = Path(__file__).resolve().parent / "plain_install"


def plain_environment(**more: str) -> dict[str, str]:
    """The variables of this process, for one that lacks the optional packages that Lightning imports if they are there.

    For scripts that draw nothing and use no model of others: they begin in two thirds of the time.
    """
    path = os.pathsep.join(filter(None, [str(PLAIN_INSTALL), os.environ.get("PYTHONPATH")]))
    return os.environ | {"PYTHONPATH": path} | more
