"""Read by a Python that starts with this folder in its path: two packages look as if they were not installed.

torchmetrics, and with it Lightning, imports them where it finds them. That is a third of the time that a script needs
until it begins.
"""

import importlib.metadata
import sys

ABSENT = ("matplotlib", "transformers")

installed_version = importlib.metadata.version


def version(distribution_name: str) -> str:
    if distribution_name in ABSENT:
        raise importlib.metadata.PackageNotFoundError(distribution_name)
    return installed_version(distribution_name)


importlib.metadata.version = version
sys.modules |= dict.fromkeys(ABSENT)
