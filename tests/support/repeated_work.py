"""What upstream does again in every test and no test looks at; together it took longer than half of all tests.

`conftest.py` asks for it in the processes of the tests, `rank_server.py` in those of their ranks.
"""

import functools
import importlib.metadata
import logging
from typing import Any


def read_entry_points_once() -> None:
    """Every Trainer asks for the entry points of all installed packages, which is a third of a short fit.

    Lightning takes the function when it is imported, so this comes first.
    """
    read_all = functools.cache(importlib.metadata.entry_points)

    def entry_points(**parameters: Any) -> Any:
        return read_all().select(**parameters)

    importlib.metadata.entry_points = entry_points


def seed_the_cpu_alone() -> None:
    """For each device that is missing, `torch.manual_seed` keeps a stack trace, in case that it is initialised later.

    For where there is no such device.
    """
    import torch

    def no_device_to_seed(seed: int) -> None:
        pass

    for backend in (torch.cuda, torch.mtia, torch.xpu):
        backend.manual_seed_all = no_device_to_seed


def attach_log_handlers_once() -> None:
    """Pytest attaches its handlers to each logger that does not propagate, six times in a test; torch has fifty.

    What they log reaches the same handlers by way of the root logger.
    """
    for name, logger in logging.root.manager.loggerDict.items():
        if name.split(".")[0] == "torch" and isinstance(logger, logging.Logger):
            logger.propagate = True
