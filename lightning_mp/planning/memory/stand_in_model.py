"""A model as a precision plugin makes it, of tensors that have a shape, a format and no numbers."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_mp.modules.names import named_modules
from lightning_mp.modules.stand_ins import module_with
from lightning_mp.planning.memory.precision_storage import PrecisionStorage
from lightning_mp.policy.applied import AppliedPolicy
from lightning_mp.policy.operations import KNOWN_OPERATIONS, by_autocast, operations_named
from lightning_mp.policy.policy import PrecisionPolicy

__all__ = ["StandInModel", "stand_in_for"]

# Their weights stay fp32 in MasterWeightsPrecision: kernels want them in the format of the running statistics.
_WITH_STATISTICS = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)  # noqa: SLF001
_CASTS_FROZEN = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_FP8_MULTIPLE = 16
