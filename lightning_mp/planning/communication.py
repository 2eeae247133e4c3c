"""How GPUs share a decoder, and what they send in a training step: the collective operations of each layout.

With N weights, L layers, width w, vocabulary v, t tokens in a micro-batch of one data rank, M micro-batches per
optimizer step. Counted are operations per rank and optimizer step::

    DDP         1 all-reduce of all gradients (in buckets)                      Li et al. 2020, arXiv:2006.15704
    FSDP        2 M all-gathers of each block's weights (M if they are kept),   Zhao et al. 2023, arXiv:2304.11277;
                M of the rest; 1 reduce-scatter of gradients, or M
    HSDP        the same among shards, and an all-reduce of the shards' gradients among copies
    TP          M (2 L + 1) all-reduces of t w in forward, and in backward,     Shoeybi et al. 2019, arXiv:1909.08053
                M 2 small ones for the loss
    PP          M sends forward and M backward per boundary of stages           Narayanan et al. 2021, arXiv:2104.04473

Weights are gathered as :class:`~lightning_mp.strategies.FSDP2Strategy` does: in "mixed" precisions those of products in
16 bit, the others in fp32; with masters ("bf16-true", "16-true") all but norms in 16 bit. Gradients are reduced in
fp32; of masters under DDP in the format of the weights that are computed with. Lightning's ``FSDPStrategy`` gathers all
of them in 16 bit, as is counted here for "lightning:bf16-true". Tensor parallelism is that of the plan "auto": outputs
of matrix products are reduced in 16 bit, gradients of what norms and the token table give in fp32
(``tensor_reduce_dtype="fp32"``). Megatron-LM keeps the residual stream in 16 bit and reduces both in it (``"16bit"``),
two thirds of the bytes. Not counted are a few bytes per step: the precision plugin's all-reduce of the norm, what the
window of accumulation agrees on, and under FSDP the comparison of the units that ranks have run.

Convention of every figure: bytes that one GPU sends (it receives as many), by the algorithms that send least. With S
the bytes of the whole tensor and n ranks::

    all-gather, reduce-scatter    (n - 1) / n S
    all-reduce                  2 (n - 1) / n S      a reduce-scatter and an all-gather
    send                                      S

A ring sends exactly this (Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of
workstations"; the "bus bandwidth" of nccl-tests is defined by the same factors). Where a group spans m nodes with k of
its ranks in each, it is done in two levels, inside the nodes and between equal places of the nodes::

    inside a node    c (k - 1) / k S          c = 2 for an all-reduce, else 1
    between nodes    c (m - 1) / (k m) S

Together this is the ring's number, with the least that can cross between nodes. A single ring laid node by node crosses
with c (n - 1) / n S on one of the k ranks; a switch that adds numbers up itself (SHARP) sends less.
"""

from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, get_args

from lightning_mp.ground.core.arguments import true_or_false, whole_number
from lightning_mp.ground.core.precisions import PrecisionLike, PrecisionSpec, find_precision
from lightning_mp.planning.memory.decoder_config import DecoderSize

Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "send"]


@dataclass(frozen=True, slots=True)
class ParallelLayout:
    """How GPUs share a model. The product of the sizes is the number of GPUs; ranks that share a layer are neighbours.

    From near to far: tensor parallel, shards, copies, stages. :class:`~lightning_mp.strategies.FSDP2Strategy` lays
    ranks out in this order; for stages it is Megatron-LM's.

    Raises:
        ValueError: a size is not a positive integer, or stages are sharded.

    Example:
        >>> ParallelLayout(shards=8, copies=4).gpus, ParallelLayout(tensor=8, shards=16).name
        (32, 'FSDP 16 x TP 8')
    """

    #: of the model, or of its shards: ranks that hold the same weights and see other data. DDP; the outer part of
    #: hybrid sharding.
    copies: int = 1
    shards: int = 1  #: over how many ranks weights, gradients and optimizer states are sharded (FSDP).
    tensor: int = 1  #: over how many ranks each layer is split (TP).
    stages: int = 1  #: of a pipeline (PP).
    checkpointed: bool = False  #: every block keeps only its input and runs again in backward.

    def __post_init__(self) -> None:
        for name in ("copies", "shards", "tensor", "stages"):
            whole_number(getattr(self, name), name, "ParallelLayout")
        true_or_false(self.checkpointed, "checkpointed", "ParallelLayout")
        if self.stages > 1 and self.shards > 1:
            raise ValueError(
                f"ParallelLayout(stages={self.stages}, shards={self.shards}): stages of a pipeline hold whole weights"
                " here, because FSDP would gather them again for every micro-batch. Use copies in place of shards."
            )

    @property
    def gpus(self) -> int:
        """All of them."""
        return self.data_ranks * self.tensor * self.stages

    @property
    def data_ranks(self) -> int:
        """Number of ranks that see different data."""
        return self.copies * self.shards

    @property
    def name(self) -> str:
        """A short name: "DDP 8", "HSDP 4 x 8", "FSDP 4 x TP 8", "DDP 2 x PP 4, checkpointed"."""
        if self.shards == 1:
            data = f"DDP {self.copies}" if self.copies > 1 else ""
        else:
            data = f"HSDP {self.copies} x {self.shards}" if self.copies > 1 else f"FSDP {self.shards}"
        tensor = f"TP {self.tensor}" if self.tensor > 1 else ""
        stages = f"PP {self.stages}" if self.stages > 1 else ""
        ranks = " x ".join(part for part in (data, tensor, stages) if part) or "one GPU"
        return f"{ranks}, checkpointed" if self.checkpointed else ranks


@dataclass(frozen=True, slots=True)
class Transfer:
    """Operations of one kind in one optimizer step."""

    what: str  # what is sent, for people
    collective: Collective  # the operation
    #: S of one operation: the tensor that all ranks have after an all-gather, before a reduce-scatter, and otherwise
    #: always.
    payload_bytes: int
    ranks: int  # n: how many take part; 2 for a send
    count: int = 1  # how many such operations one rank takes part in per optimizer step
    stride: int = 1  # how far apart the ranks are: 1 for neighbours
    #: Whether what is computed next needs it, as activations do; gradients and weights can go beside the computing.
    awaited: bool = False

    @property
    def bytes_sent(self) -> float:
        """By one rank, in all operations of a step."""
        return float(self._factor(self.ranks) * self.payload_bytes * self.count)

    def bytes_by_link(self, gpus_per_node: int) -> tuple[float, float]:
        """The same inside a node and between nodes, for ranks numbered node by node."""
        if self.collective == "send":
            inside = self.bytes_sent if self.stride < gpus_per_node else 0.0
            return inside, self.bytes_sent - inside
        near, nodes = self._places(gpus_per_node)
        whole = self.payload_bytes * self.count
        return float(self._factor(near) * whole), float(self._factor(nodes) * whole / near)

    def _factor(self, ranks: int) -> Fraction:
        if self.collective == "send":
            return Fraction(1)
        return Fraction((2 if self.collective == "all_reduce" else 1) * (ranks - 1), ranks)

    def _places(self, gpus_per_node: int) -> tuple[int, int]:
        """Ranks of the group in one node, and nodes."""
        near = max(1, min(self.ranks, gpus_per_node // self.stride))
        apart = self.stride % gpus_per_node if near == 1 and self.ranks > 1 else gpus_per_node % self.stride
        if self.ranks % near or (apart and self.ranks * self.stride > gpus_per_node):
            raise ValueError(
                f"{self.what}: {self.ranks} ranks that are {self.stride} apart do not fill nodes of {gpus_per_node}"
                " GPUs evenly. Use sizes that divide each other."
            )
        return near, self.ranks // near


TensorReduceDtype = Literal["fp32", "16bit"]
_BYTES_OF_LOSS = (4, 8)  # per token: the largest logit, then the sum of exponentials and the logit of the target


def communication_per_step(
    size: DecoderSize,
    layout: ParallelLayout,
    *,
    tokens_per_micro_batch: int,
    micro_batches: int = 1,
    precision: PrecisionLike = "bf16-mixed",
    gradient_sync: Literal["window", "micro_batch"] = "window",
    reshard_after_forward: bool = True,
    reduced_gradients: bool = False,
    sequence_parallel: bool = False,
    tensor_reduce_dtype: TensorReduceDtype = "fp32",
) -> list[Transfer]:
    """Lists everything that the busiest rank sends in one optimizer step.

    Args:
        size: the model.
        layout: how GPUs share it. A checkpointed block runs again up to the input of its last product, and repeats the
            reductions up to there.
        tokens_per_micro_batch: t, for one data rank.
        micro_batches: M, for one data rank per optimizer step; in a pipeline those of one call of the schedule.
        precision: a name of :data:`~lightning_mp.ground.core.precisions.PRECISIONS`; masters stay where they are, and
            fp8 gathers in bf16.
        gradient_sync: under FSDP, reduce once per window or at every micro-batch, as
            set by ``AccumulationScheduler(sync=...)``. Without the scheduler, FSDP does the latter.
        reshard_after_forward: under FSDP, free weights between forward and backward and gather them again.
        reduced_gradients: under DDP, gradients of fp32 are reduced in 16 bit, as by ``reduced_precision_hook``.
        sequence_parallel: norms on parts of the sequence, as by ``tensor_parallel_plan="auto_sequence"``: an all-gather
            and a reduce-scatter where there was an all-reduce, the same bytes together (Korthikanti et al. 2022,
            arXiv:2205.05198, section 4.2.2) up to the formats.
        tensor_reduce_dtype: under tensor parallelism in ``"*-mixed"``, in which format gradients of the residual stream
            are reduced: "fp32" as this package does, or "16bit" as Megatron-LM does.

    Raises:
        ValueError: an argument is unknown or not a positive integer, or sizes do not divide each other.

    Example:
        A gigabyte of 16-bit weights over 8 ranks, gathered twice:

        >>> size = DecoderSize(1, 4096, 32000, 500_000_000, 0, 0)
        >>> for part in communication_per_step(size, ParallelLayout(shards=8), tokens_per_micro_batch=4096):
        ...     print(f"{part.what}, {part.count} {part.collective} of {part.payload_bytes / 1e9} GB")
        weights: matrix products of blocks, 2 all_gather of 1.0 GB
        gradients: matrix products of blocks, 1 reduce_scatter of 2.0 GB
    """
    _check(size, layout, gradient_sync, tensor_reduce_dtype, tokens_per_micro_batch, micro_batches)
    row = find_precision(precision)
    low, wide = row.activation_bytes, row.weight_bytes
    found: list[Transfer] = []
    syncs = 1 if gradient_sync == "window" else micro_batches
    if layout.shards > 1:
        gathers = micro_batches * (2 if reshard_after_forward else 1)
        units = _units(size, layout.tensor, row)
        found += _sharded(layout, units, gathers=gathers, micro_batches=micro_batches, syncs=syncs)
    elif layout.copies > 1:
        gradient_bytes = 2 if reduced_gradients else wide
        found += _among_copies(size, layout, gradient_bytes, has_masters=row.master_bytes > 0)
    if layout.tensor > 1:
        stream = low if tensor_reduce_dtype == "16bit" else wide
        tokens = tokens_per_micro_batch
        found += _activations(size, layout, low, stream, tokens, micro_batches, sequence_parallel)
        if sequence_parallel:
            payload, count = size.block_norm_weights // 2 * wide, syncs * 2 * size.layers // layout.stages
            found.append(Transfer("gradients of norms", "all_reduce", payload, layout.tensor, count))
    if layout.stages > 1:
        found.append(_between_stages(layout, tokens_per_micro_batch * size.width * wide, micro_batches))
    return [transfer for transfer in found if transfer.payload_bytes and transfer.count]


_Unit = tuple[str, int, int, int, bool]


def _units(size: DecoderSize, split: int, row: PrecisionSpec) -> list[_Unit]:
    """What is gathered at once: its name, weights, bytes of each, number of such units, and whether they are nested."""
    low, wide = row.activation_bytes, row.weight_bytes
    block, head = size.block_matmul_weights // split, size.head_weights // split
    outside = size.table_weights // split + size.other_weights
    if row.master_bytes:
        last = _last_norm_weights(size)
        return [
            ("matrix products of blocks", block, low, size.layers, True),
            ("norms of blocks", size.block_norm_weights, 4, size.layers, True),
            ("the last norm", last, 4, 1, True),
            ("outside of blocks", outside - last + head, low, 1, False),
        ]
    if low == wide:
        block, outside = block + size.block_norm_weights, outside + head
        return [("blocks", block, low, size.layers, True), ("outside of blocks", outside, wide, 1, False)]
    return [
        ("matrix products of blocks", block, low, size.layers, True),
        ("norms of blocks", size.block_norm_weights, wide, size.layers, True),
        ("the head", head, low, 1, True),
        ("outside of blocks", outside, wide, 1, False),
    ]


def _last_norm_weights(size: DecoderSize) -> int:
    """A block has two norms like the last one."""
    return min(size.other_weights, size.block_norm_weights // 2)


def _sharded(
    layout: ParallelLayout, units: list[_Unit], *, gathers: int, micro_batches: int, syncs: int
) -> list[Transfer]:
    split, shards, copies = layout.tensor, layout.shards, layout.copies
    found = []
    for name, n, itemsize, k, inner in units:
        times = k * (gathers if inner else micro_batches)
        found.append(Transfer(f"weights: {name}", "all_gather", n * itemsize, shards, times, split))
        found.append(Transfer(f"gradients: {name}", "reduce_scatter", 4 * n, shards, k * syncs, split))
        shard, far = 4 * n // shards, split * shards
        found.append(Transfer(f"gradients: {name}, among copies", "all_reduce", shard, copies, k * syncs, far))
    return sorted((t for t in found if t.ranks > 1), key=lambda t: ("weights" not in t.what, "copies" in t.what))


def _among_copies(
    size: DecoderSize, layout: ParallelLayout, gradient_bytes: int, *, has_masters: bool
) -> list[Transfer]:
    norms = size.layers // layout.stages * size.block_norm_weights
    blocks = size.layers // layout.stages * (size.block_matmul_weights // layout.tensor) + norms
    # Of a pipeline the first stage, which has the table; a tied head is a copy of it on the last one.
    first = size.table_weights // layout.tensor + size.other_weights
    outside = first + (size.head_weights // layout.tensor if layout.stages == 1 else 0)
    in_float32 = norms + (_last_norm_weights(size) if layout.stages == 1 else 0) if has_masters else 0
    return [
        Transfer(name, "all_reduce", payload, layout.copies, stride=layout.tensor)
        for name, payload in (
            ("gradients", gradient_bytes * (blocks + outside - in_float32)),
            ("gradients of norms in fp32", 4 * in_float32),
        )
    ]


def _activations(
    size: DecoderSize,
    layout: ParallelLayout,
    low: int,
    wide: int,
    tokens: int,
    times: int,
    sequence: bool,
) -> list[Transfer]:
    width = tokens * size.width
    blocks = 2 * size.layers // layout.stages * times
    # The second run ends before the MLP's last product, so of its two reductions only attention's is made again.
    again = blocks // 2 if layout.checkpointed else 0
    # Of a pipeline the last stage, which has the head; the embeddings are on the first.
    embeddings = times if layout.stages == 1 else 0
    whole = (
        ("outputs of attention and MLP", "all_reduce", width * low, blocks + again),
        ("gradients of their inputs", "all_reduce", width * wide, blocks),
    )
    in_parts = (
        ("inputs of attention and MLP", "all_gather", width * wide, blocks + 2 * again),
        ("outputs of attention and MLP", "reduce_scatter", width * low, blocks + again),
        ("gradients of their outputs", "all_gather", width * low, blocks),
        ("gradients of their inputs", "reduce_scatter", width * wide, blocks),
        ("into and out of the blocks", "all_gather", width * wide, times + embeddings),
    )
    outside = (
        ("embeddings", "all_reduce", width * wide, embeddings),
        ("gradient of the head's input", "all_reduce", width * wide, times),
        *(("loss", "all_reduce", tokens * itemsize, times) for itemsize in _BYTES_OF_LOSS),
    )
    return [
        Transfer(name, collective, payload, layout.tensor, count, awaited=True)
        for name, collective, payload, count in (*(in_parts if sequence else whole), *outside)
    ]


def _between_stages(layout: ParallelLayout, payload_bytes: int, micro_batches: int) -> Transfer:
    """The two directions of a boundary; a stage in the middle sends along one of each."""
    per_rank = 2 * micro_batches if layout.stages > 2 else micro_batches
    far = layout.tensor * layout.data_ranks
    return Transfer("activations between stages", "send", payload_bytes, 2, per_rank, far, awaited=True)


def _check(size: DecoderSize, layout: ParallelLayout, sync: str, reduce: str, tokens: int, micro_batches: int) -> None:
    for name, value, allowed in (
        ("gradient_sync", sync, ("window", "micro_batch")),
        ("tensor_reduce_dtype", reduce, get_args(TensorReduceDtype)),
    ):
        if value not in allowed:
            raise ValueError(f"Unknown `{name}` {value!r}. Use one of {', '.join(allowed)}.")
    for name, number in (("tokens_per_micro_batch", tokens), ("micro_batches", micro_batches)):
        whole_number(number, name)
    for name, whole, parts, unit in (
        ("layers", size.layers, layout.stages, "stages"),
        ("width", size.width, layout.tensor, "tensor-parallel ranks"),
    ):
        if whole % parts:
            raise ValueError(f"`{name}` ({whole}) cannot be divided evenly over {parts} {unit}.")
