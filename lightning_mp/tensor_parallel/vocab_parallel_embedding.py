"""A table of embeddings of which each rank has the rows of some ids."""

from functools import partial

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.nn import functional as F

from lightning_mp.tensor_parallel.dtensor_edges import local_part


def why_not_in_parts(embedding: nn.Module) -> str | None:
    """What a table does that needs all of its rows on one rank; None if it does nothing of that kind.

    >>> why_not_in_parts(nn.Embedding(4, 2, max_norm=1.0))
    'max_norm=1.0'
    >>> why_not_in_parts(nn.Embedding(4, 2, padding_idx=0))
    """
    assert isinstance(embedding, nn.Embedding)
    if embedding.max_norm is not None:
        return f"max_norm={embedding.max_norm}"
    for name in ("scale_grad_by_freq", "sparse"):
        if getattr(embedding, name):
            return f"{name}=True"
    return None


def look_up_in_parts(embedding: nn.Module, mesh: DeviceMesh) -> None:
    """Lets a table whose weight is split by rows take ids of the whole vocabulary and give whole rows, on every rank.

    A rank looks up its own ids and has zeros for those of others; an all-reduce adds them up. torch's
    ``RowwiseParallel`` does the same with a mask inside of a placement, which torch.compile cannot trace.
    """
    assert isinstance(embedding, nn.Embedding)
    embedding.forward = partial(_rows, embedding, mesh)  # type: ignore[method-assign]


def _rows(embedding: nn.Embedding, mesh: DeviceMesh, ids: Tensor) -> Tensor:
    weight = embedding.weight
    assert isinstance(weight, DTensor)
    part = weight.to_local()
    own = ids - mesh.get_local_rank() * part.shape[0]
    others = (own < 0) | (own >= part.shape[0])
    rows = F.embedding(own.masked_fill(others, 0), part).masked_fill(others.unsqueeze(-1), 0)
    padding = embedding.padding_idx
    if padding is not None:  # the row of padding gets no gradient
        rows = rows.detach().where((ids == padding).unsqueeze(-1), rows)
    summed = DTensor.from_local(rows, mesh, [Partial()], run_check=False).redistribute(placements=[Replicate()])
    return local_part(summed)
