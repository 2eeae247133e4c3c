"""Memory per GPU of a decoder given by its shape, by part, for layouts of any number of GPUs.

These are formulas, for use before there is a module; with a module,
:func:`~lightning_mp.monitors.step_memory.estimate.estimate_memory` measures. Layouts are those of
:class:`~lightning_mp.planning.communication.ParallelLayout`.
"""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

from lightning_mp.ground.core.arguments import (
    positive_number,
    positive_quantity,
    quantity_from,
    whole_number,
    whole_quantity,
)
from lightning_mp.ground.core.precisions import PrecisionLike, PrecisionSpec, find_precision
from lightning_mp.monitors.step_memory.estimate import reserved_range
from lightning_mp.monitors.step_memory.live_storages import PARTS, Part
from lightning_mp.planning.communication import ParallelLayout
from lightning_mp.planning.memory.decoder_config import DecoderConfig
from lightning_mp.planning.memory.families import family_of

_ADAM_STATES = 2
# In fp32: log-probabilities, which are saved, their gradient, and that of the logits (cross_entropy of torch 2.13).
_LOSS_BYTES = 12
_SQUARE_ROOT_BYTES = 4  # of a foreach Adam, which takes it of all moments at once
_REDUCED_BYTES = 4
_ENDS_ELEMENTS = 4  # per width, of what is saved outside of blocks: embeddings, the last norm, what the head takes
_PASSING_ELEMENTS, _PASSING_SCORES = 3, 5
_UNITS_AT_ONCE = 2
_MOST_SEQUENCES = 2**20


@dataclass(frozen=True, slots=True)
class DecoderMemory:
    """Bytes of the fullest GPU at the peak: between forward and backward or, with few tokens, in the step."""

    bytes_by_part: Mapping[Part, int]  #: as in :data:`~lightning_mp.monitors.step_memory.live_storages.PARTS`.

    @property
    def total_bytes(self) -> int:
        """Sum over all parts."""
        return sum(self.bytes_by_part.values())

    @property
    def reserved_bytes(self) -> tuple[int, int]:
        """Lower and upper bound of what a GPU needs, depending on the allocator."""
        return reserved_range(self.total_bytes)

    def verdict(self, memory_bytes: float) -> str:
        """One of "fits", "may fit" (it depends on the allocator) and "does not fit"."""
        low, high = self.reserved_bytes
        return "fits" if high <= memory_bytes else "may fit" if low <= memory_bytes else "does not fit"


def decoder_memory(
    config: DecoderConfig,
    layout: ParallelLayout | None = None,
    *,
    sequences: int = 1,
    context_tokens: int,
    precision: PrecisionLike = "bf16-mixed",
    optimizer_states: int = _ADAM_STATES,
    micro_batches: int | None = None,
    sequence_parallel: bool = False,
) -> DecoderMemory:
    """Memory of the fullest GPU at its peak, by part.

    That is where the loss is differentiated, with the gradients of earlier micro-batches, or the optimizer's step. What
    the code of a family of Hugging Face models saves beside its formula was measured; for a family that is not known
    it is that of Llama, or of GPT-NeoX where MLPs have no gates. The result is an upper bound: for the families that
    transformers 5 ships it is 0 to 25% above what :func:`~lightning_mp.estimate_memory` measures with accumulation.

    Args:
        config: the model.
        layout: how GPUs share it; one GPU when None.
        sequences: sequences in a micro-batch of one data rank.
        context_tokens: length of a sequence.
        precision: a name of :data:`~lightning_mp.ground.core.precisions.PRECISIONS`, or a plugin.
        optimizer_states: states per parameter: 2 for Adam, 1 for momentum or for Adam with bf16 moments.
        micro_batches: micro-batches of one data rank per step. A pipeline holds as many at once as it has stages
            (1F1B), or fewer if there are fewer.
        sequence_parallel: with tensor parallelism, split norms along the sequence.

    Raises:
        ValueError: a precision is unknown, layers cannot be divided among the stages, or a sequence is longer than the
            model's learned positions.

    Source:
        Rajbhandari et al. 2020, arXiv:1910.02054 (what is kept per parameter); Korthikanti et al. 2022,
        arXiv:2205.05198 (activations); Narayanan et al. 2021, arXiv:2104.04473 (micro-batches in a pipeline).

    Example:
        Figure 1 of ZeRO, its first and last bar: 7.5 billion parameters, 64 GPUs, 16-bit weights, fp32 masters, Adam.

        >>> config = DecoderConfig(layers=36, width=4096, vocabulary=51200, gated=False, tied_head=True)
        >>> for layout in (ParallelLayout(copies=64), ParallelLayout(shards=64)):
        ...     parts = decoder_memory(config, layout, context_tokens=1, precision="16-true").bytes_by_part
        ...     states = sum(parts[name] for name in ("weights", "gradients", "masters", "optimizer states"))
        ...     print(round(states / config.parameters, 2))
        16.0
        0.25
    """
    layout = layout or ParallelLayout()
    tokens = whole_quantity(sequences, "sequences") * whole_quantity(context_tokens, "context_tokens")
    if config.positions and whole_quantity(context_tokens, "context_tokens") > config.positions:
        raise ValueError(
            f"`context_tokens` ({context_tokens}) is more than the {config.positions:,} positions that this model has"
            f" learned. Use at most {config.positions:,}, or a configuration with more positions."
        )
    states = quantity_from(0, optimizer_states, "optimizer_states")
    if micro_batches is not None:
        whole_number(micro_batches, "micro_batches")
    row = find_precision(precision)
    if config.layers % layout.stages:
        raise ValueError(f"`layers` ({config.layers}) cannot be divided evenly over {layout.stages} stages.")
    weights = _weights_of_rank(config, layout)
    parts: dict[Part, float] = {
        "weights": row.weight_bytes * weights / layout.shards,
        "buffers": _mask_bytes(config) / layout.stages,
        "gradients": row.weight_bytes * weights / layout.shards,
        "masters": row.master_bytes * weights / layout.shards,
        "optimizer states": states * row.optimizer_state_itemsize() * weights / layout.shards,
        **_of_weights_in_use(config, layout, row, weights),
    }
    in_step = {**parts, "weight casts": 0.0, "gathered weights": 0.0}
    in_step["temporaries"] = _SQUARE_ROOT_BYTES * weights / layout.shards
    parts |= _of_activations(config, layout, row, (tokens, context_tokens), micro_batches, sequence_parallel)
    peak = max(parts, in_step, key=lambda moment: sum(moment.values()))
    return DecoderMemory({part: ceil(peak[part]) for part in PARTS if peak.get(part)})


def largest_micro_batch(
    config: DecoderConfig, layout: ParallelLayout, memory_bytes: float, *, context_tokens: int, precision: PrecisionLike
) -> int:
    """The largest micro-batch of one data rank that fits even with the worst-case allocator; 0 if none does.

    Args:
        config: the model.
        layout: how the model is divided over GPUs.
        memory_bytes: memory of one GPU.
        context_tokens: length of a sequence.
        precision: as in :func:`decoder_memory`.

    Raises:
        ValueError: a number is not positive, or the precision is unknown.

    Example:
        >>> config = DecoderConfig(layers=12, width=768, vocabulary=50257, gated=False, tied_head=True)
        >>> largest_micro_batch(config, ParallelLayout(), 80 * 2**30, context_tokens=1024, precision="bf16-mixed")
        52
    """
    available = positive_quantity(memory_bytes, "memory_bytes")

    def fits(sequences: int) -> bool:
        memory = decoder_memory(config, layout, sequences=sequences, context_tokens=context_tokens, precision=precision)
        return memory.verdict(available) == "fits"

    return bisect_left(range(1, _MOST_SEQUENCES), True, key=lambda sequences: not fits(sequences))


def check_memory_bytes(memory_bytes: float) -> None:
    """Refuses gigabytes that were given as bytes."""
    positive_number(memory_bytes, "memory_bytes", unit="bytes")
    if memory_bytes < 1e6:
        size = f"{memory_bytes:g}"
        raise ValueError(f"`memory_bytes` of {size} is less than a megabyte. Give {size}e9 for {size} GB.")


def _mask_bytes(config: DecoderConfig) -> float:
    traits = family_of(config.family).traits
    masks = config.layers * ("mask per block" in traits) + ("mask" in traits)
    return float(masks * config.positions**2)


def _weights_of_rank(config: DecoderConfig, layout: ParallelLayout) -> float:
    """Of the fullest stage, the first or the last, before sharding."""
    size = config.size
    blocks = config.layers / layout.stages * (size.block_matmul_weights / layout.tensor + size.block_norm_weights)
    ends = size.table_weights + size.head_weights if layout.stages == 1 else max(size.table_weights, size.head_weights)
    return blocks + ends / layout.tensor + size.other_weights


def _of_weights_in_use(
    config: DecoderConfig, layout: ParallelLayout, row: PrecisionSpec, weights: float
) -> dict[Part, float]:
    """Casts of whole weights; of sharded ones what is gathered; and what reductions take."""
    size = config.size
    if layout.shards == 1:
        in_products = weights - size.other_weights - config.layers / layout.stages * size.block_norm_weights
        in_products -= 0 if size.head_weights == 0 else size.table_weights / layout.tensor
        casts = row.activation_bytes * in_products if row.autocast and not row.fp8 else 0.0
        buckets = row.weight_bytes * weights if layout.copies > 1 else 0.0
        return {"weight casts": max(0.0, casts), "communication buffers": buckets}
    block = size.block_matmul_weights / layout.tensor
    head = row.activation_bytes * size.head_weights / layout.tensor
    outside = head + row.weight_bytes * (size.table_weights / layout.tensor + size.other_weights)
    return {
        "gathered weights": outside + _UNITS_AT_ONCE * row.activation_bytes * block,
        "communication buffers": (row.activation_bytes + _REDUCED_BYTES) * block,
    }


def _of_activations(
    config: DecoderConfig,
    layout: ParallelLayout,
    row: PrecisionSpec,
    tokens_and_context: tuple[int, float],
    micro_batches: int | None,
    sequence_parallel: bool,
) -> dict[Part, float]:
    tokens, context_tokens = tokens_and_context
    # Norms take and save fp32, under autocast and with masters.
    residual = 4 if row.autocast or row.master_bytes or row.weight_bytes == 4 else row.activation_bytes
    by_formula = config.saved_bytes_per_token(
        row.activation_bytes, residual, tensor=layout.tensor, sequence_parallel=sequence_parallel
    )
    family = family_of(config.family, gated=config.gated)
    saved = family.in_fp32 if row.activation_bytes == 4 else family.in_16_bit
    of_rest = saved.per_mlp_width * config.mlp_widths + saved.per_score * config.heads * context_tokens
    beside = saved.per_width * config.width / (layout.tensor if sequence_parallel else 1) + of_rest / layout.tensor
    block = tokens * (by_formula + beside)
    divisor = layout.tensor if sequence_parallel else 1
    kept = tokens * residual * config.width / divisor if layout.checkpointed else block
    at_once = min(layout.stages, micro_batches or layout.stages)
    again = block if layout.checkpointed else 0.0
    low = row.activation_bytes if row.activation_bytes < 4 else 0
    logits = tokens * config.vocabulary * (_LOSS_BYTES + low) / layout.tensor
    ends = tokens * config.width * _ENDS_ELEMENTS * residual
    # Gradients on their way through a block: of its MLP, or of the scores of attention that is not fused.
    passing = tokens * max(
        _PASSING_ELEMENTS * row.activation_bytes * config.mlp_widths,
        _PASSING_SCORES * 4 * config.heads * context_tokens
        if family.in_fp32.per_score or family.in_16_bit.per_score
        else 0,
    )
    # The new gradient of the experts of one block, which are one parameter, beside that of earlier micro-batches.
    passing += row.weight_bytes * 2 * config.experts * config.ffn_width * config.width / layout.shards
    return {
        "activations": config.layers / layout.stages * at_once * kept + ends,
        "batch": 2 * 8 * tokens,
        # The logits are gone before the first block runs again.
        "temporaries": max(again + passing / layout.tensor, logits if layout.stages == 1 else 0.0),
    }
