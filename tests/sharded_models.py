"""Strategies for tests of sharded models without a GPU."""

from typing import Any

import torch
from lightning.pytorch.strategies import FSDPStrategy
from torch.distributed.fsdp import FullyShardedDataParallel


class CpuFsdp(FSDPStrategy):
    """FSDP1 for tests without a GPU: torch takes the CPU if it is named."""

    def _setup_model(self, model: Any) -> Any:
        return FullyShardedDataParallel(
            module=model,
            mixed_precision=self.mixed_precision_config,
            device_id=torch.device("cpu"),
            use_orig_params=True,
        )
