"""Single layers, split over the ranks that compute one model together."""

import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.nn import functional as F

from lightning_mp.ground.core import private_tensor_api
from lightning_mp.ground.core.rank_rng import RankRNG
from lightning_mp.training.checkpoints.fused_qkv import hold_in_rank_order
from lightning_mp.training.tensor_parallel.dtensor_edges import local_part, unreduced
from lightning_mp.training.tensor_parallel.known_models import Style, class_path
from lightning_mp.training.tensor_parallel.vocab_parallel_logits import split_logits
from lightning_mp.training.tensor_parallel.vocab_parallel_ops import VocabParallelSplit

CONV1D = "transformers.pytorch_utils.Conv1D"
"""A linear layer whose weight is ``[inputs, outputs]``."""

_BY_OUTPUTS = ("column", "column_gather", "column_qkv", "vocab_parallel_head")
_LAST = Shard(-1)
#: Activations are ``[batch, tokens, ...]``.
_TOKENS = Shard(1)


class SharedInput:
    """The input of several layers, made whole once: queries, keys and values take the same.

    Its gradients then add up before they are reduced over the ranks, also once.
    """

    def __init__(self) -> None:
        self._of: weakref.ref[Tensor] | None = None
        self._state: tuple[int, bool] = (0, False)
        self._made: Tensor | None = None

    def __call__(self, value: Tensor, make: Callable[[], Tensor]) -> Tensor:
        """What ``make`` has made of the same tensor before, or makes now."""
        if torch.compiler.is_compiling():
            return make()
        state = private_tensor_api.version_of(value), torch.is_grad_enabled()
        if self._made is None or self._of is None or self._of() is not value or self._state != state:
            self._made, self._of, self._state = make(), weakref.ref(value), state
        return self._made

    def forget(self) -> None:
        """The layers that took it are done."""
        self._of = self._made = None


def split_dimension(layer: nn.Module, style: Style) -> int:
    """Along which dimension of its weight a layer is split."""
    by_outputs = style in (*_BY_OUTPUTS, "vocabulary")
    return int(by_outputs == (class_path(layer) == CONV1D))


def split_layer(
    layer: nn.Module,
    style: Style,
    mesh: DeviceMesh,
    *,
    shared: SharedInput,
    in_parts: Callable[[], bool] | None = None,
    rng: RankRNG | None = None,
) -> None:
    """Splits one layer over the ranks of a mesh, in place.

    ===================  ======================  ==================  ====================  =========================
    style                weight of a Linear is   takes               gives                 communication, forward
    ===================  ======================  ==================  ====================  =========================
    ``column``           split by outputs          whole input         this rank's outputs   none
    ``column_qkv``       split by heads            whole input         q, k, v of its heads  none
    ``row``              split by inputs           this rank's inputs  whole output          all-reduce
    ``column_gather``    split by outputs          whole input         whole output          all-gather
    ``row_split``        split by inputs           whole input         whole output          all-reduce
    ``vocabulary``       (Embedding) by rows     whole token ids     whole output          all-reduce
    ``vocab_parallel_head``  split by outputs          whole input         logits in parts       none; 12 bytes per
    token
                                                                                           for the loss
    ===================  ======================  ==================  ====================  =========================

    A ``column`` layer is followed by a ``row`` layer, with nothing between them but what works on parts of the last
    dimension, such as an activation or whole attention heads (Shoeybi et al. 2019, "Megatron-LM", section 3). Where the
    code between needs the whole, ``column_gather`` and ``row_split`` do the same products with more communication.

    ``column_qkv`` is for queries, keys and values in one matrix, ``[queries; keys; values]``, each of the same size.
    The code after it gets those of this rank's heads, concatenated, and must not assume the number of heads:
    ``view(batch, tokens, 3, -1, width_of_a_head)``.

    ``vocab_parallel_head`` gives logits of which ``F.cross_entropy`` and ``nn.CrossEntropyLoss`` are computed in parts;
    everything else gets the whole tensor
    (:class:`~lightning_mp.training.tensor_parallel.vocab_parallel_logits.VocabParallelLogits`).

    Inside of blocks that are split along the sequence
    (:mod:`~lightning_mp.training.tensor_parallel.sequence_parallel`), ``row`` and ``row_split`` give this rank's part
    of the tokens (reduce-scatter instead of all-reduce).
    """
    if style == "vocabulary":
        _split_parameters(layer, mesh, {"weight": Shard(0)})
        look_up_in_parts(layer, mesh)
        return
    dim = split_dimension(layer, style)
    if style == "column_qkv":
        hold_in_rank_order(layer, mesh.size(), dim_of_weight=dim)
    _split_parameters(layer, mesh, {"weight": Shard(dim), "bias": Shard(0) if style in _BY_OUTPUTS else Replicate()})

    def takes(_layer: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        value, *others = inputs
        if rng is not None and style == "row":
            rng.end()
        if style == "row":
            shared.forget()
            return (DTensor.from_local(value, mesh, [_LAST], run_check=False), *others)

        def whole() -> Tensor:
            if in_parts is not None and in_parts():
                return unreduced(value, mesh)
            return DTensor.from_local(value, mesh, [Replicate()], run_check=False)

        made = shared(value, whole)
        assert isinstance(made, DTensor)
        return (made.redistribute(placements=[_LAST]) if style == "row_split" else made, *others)

    def gives(_layer: nn.Module, _inputs: Any, output: DTensor) -> Tensor:
        along_sequence = in_parts is not None and in_parts()
        placement = _placement_given(style, along_sequence=along_sequence)
        # Layers that take this in a split sequence leave its gradient as a sum over ranks.
        in_terms = style == "column_gather" and along_sequence
        local = local_part(output.redistribute(placements=[placement]), gradient=Partial() if in_terms else None)
        if style in ("column_gather", "vocab_parallel_head"):
            shared.forget()
        if rng is not None and style != "row":
            rng.begin(local.device)
        in_parts_for_loss = style == "vocab_parallel_head" and placement.is_shard()
        return split_logits(local, VocabParallelSplit(mesh.get_group())) if in_parts_for_loss else local

    layer.register_forward_pre_hook(takes)
    layer.register_forward_hook(gives)


def _placement_given(style: Style, *, along_sequence: bool) -> Placement:
    """How the output of a layer is laid out for what comes after it."""
    # In compiled code logits are whole: the compiler does not know tensors that are whole for some and not others.
    if style in ("column", "column_qkv") or (style == "vocab_parallel_head" and not torch.compiler.is_compiling()):
        return _LAST
    return _TOKENS if style in ("row", "row_split") and along_sequence else Replicate()


def _split_parameters(layer: nn.Module, mesh: DeviceMesh, placements: Mapping[str, Placement]) -> None:
    for name, parameter in list(layer.named_parameters(recurse=False)):
        split = distribute_tensor(parameter.detach(), mesh, [placements[name]])
        layer.register_parameter(name, nn.Parameter(split, parameter.requires_grad))


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
