"""What the last stage alone has, told to all stages of its pipeline: the loss, other scalars, outputs."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_mp.pipelining.layout import Pipeline


class LastStageBroadcast:
    """Tells every stage; all of them have to ask."""

    def __init__(self, pipeline: Pipeline, owner: str) -> None:
        self._pipeline = pipeline
        self._owner = owner
        self._names: dict[bool, list[str]] = {}

    def scalars(self, values: dict[str, Tensor], *, training: bool) -> dict[str, Tensor]:
        """One small broadcast; the names are sent with the first batch."""
        pipeline = self._pipeline
        if pipeline.stages == 1:
            return values
        if training not in self._names:
            told = [list(values)]
            dist.broadcast_object_list(told, src=pipeline.last_rank, group=pipeline.group)
            self._names[training] = told[0]
        names = self._names[training]
        if pipeline.is_last and list(values) != names:
            raise MisconfigurationException(
                f"{self._owner}.pipeline_loss returned {list(values)}, and {names} the first time. All"
                " stages wait for the same values: return the same names for every batch of a loop."
            )
        vector = torch.zeros(len(names), dtype=torch.float32, device=pipeline.device)
        if pipeline.is_last:
            vector = torch.stack([values[name] for name in names])
        dist.broadcast(vector, src=pipeline.last_rank, group=pipeline.group)
        return dict(zip(names, vector.unbind(), strict=True))

    def outputs(self, parts: Sequence[Any]) -> Any:
        """Outputs of the runs of a batch, joined along the samples: a tensor, or a tuple of tensors."""
        pipeline = self._pipeline
        tuples = [part if isinstance(part, tuple) else (part,) for part in parts]
        joined = [torch.cat(part) for part in zip(*tuples, strict=True)] if pipeline.is_last else []
        if pipeline.stages > 1:
            told = [[(tensor.shape, tensor.dtype) for tensor in joined]]
            dist.broadcast_object_list(told, src=pipeline.last_rank, group=pipeline.group)
            if not pipeline.is_last:
                joined = [torch.empty(shape, dtype=dtype, device=pipeline.device) for shape, dtype in told[0]]
            for tensor in joined:
                dist.broadcast(tensor.contiguous(), src=pipeline.last_rank, group=pipeline.group)
        return joined[0] if len(joined) == 1 else tuple(joined)
