"""The usual layouts of a decoder on n GPUs, with memory and communication of each; those that fit come first."""

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_mp.core.arguments import whole_number
from lightning_mp.core.precisions import find_precision
from lightning_mp.flops.hardware import known_chips, rate_column
from lightning_mp.planning.layouts import (
    Machine,
    ParallelPlan,
    known_machines,
    plan_parallelism,
    usual_layouts,
)
from lightning_mp.planning.memory.decoder_config import DecoderConfig
from lightning_mp.planning.memory.decoder_memory import (
    DecoderMemory,
    MemoryLayout,
    check_memory_bytes,
    decoder_memory,
    largest_micro_batch,
)

_VERDICTS = ("fits", "may fit", "does not fit")
_GPUS_PER_NODE = 8
_MOST_GPUS = 2**16


@dataclass(frozen=True, slots=True)
class LayoutChoice:
    """One layout with its memory and speed."""

    layout: MemoryLayout  #: how GPUs share the model.
    memory: DecoderMemory  #: of the fullest GPU, with one sequence.
    #: "fits", "may fit" where the allocator decides, "does not fit"; None where no memory was given.
    verdict: str | None
    largest_micro_batch: int | None  #: sequences that fit with the allocator at its worst; None likewise.
    #: bytes on the wire and time of a step; None where no machine is known, or for what ``left_out`` says.
    plan: ParallelPlan | None
    left_out: str | None = None  #: why there is no plan.

    @property
    def hides(self) -> bool | None:
        """Whether computation can hide the communication, both at their peaks and without waits; None if unknown."""
        return None if self.plan is None else self.plan.wire_to_compute_ratio <= 1 and not self.plan.awaited_seconds


def machine_with(chip: str) -> Machine | None:
    """The first machine of the table that is built of a chip."""
    return next((machine for machine in known_machines() if machine.chip == chip), None)


def choose_layouts(
    config: DecoderConfig,
    gpus: int,
    *,
    machine: Machine | None = None,
    memory_bytes: float | None = None,
    context_tokens: int = 4096,
    tokens_per_step: int = 2**22,
    precision: object = "bf16-mixed",
    dtype: str | None = None,
    checkpointed: Sequence[bool] = (False, True),
) -> list[LayoutChoice]:
    """Common layouts: those that fit, fastest first, then the others, closest to fitting first.

    Where no machine is known, those that fit come in the order of
    :func:`~lightning_mp.planning.layouts.usual_layouts`, recomputed blocks after those that are not,
    and tensor and pipeline parallelism, which need fast links or many micro-batches, last.

    Args:
        config: the model.
        gpus: number of GPUs.
        machine: for the communication of layouts; None omits it and assumes 8 GPUs per node.
        memory_bytes: memory of one GPU; None omits the verdicts.
        context_tokens: length of a sequence.
        tokens_per_step: tokens of one optimizer step, over all GPUs.
        precision: a name of :data:`~lightning_mp.core.precisions.PRECISIONS`.
        dtype: format of matrix products, for the peak that bounds a step; None is that of ``precision``, fp32 without
            TF32 in "32-true".
        checkpointed: whether blocks are recomputed; by default each layout is listed both ways.

    Raises:
        ValueError: a precision is unknown, or a number is not positive.

    Example:
        405 billion parameters do not fit on 8 GPUs of 80 GB, however they are split:

        >>> config = DecoderConfig(layers=126, width=16384, heads=128, kv_heads=8, ffn_width=53248, vocabulary=128256)
        >>> {choice.verdict for choice in choose_layouts(config, 8, memory_bytes=80e9)}
        {'does not fit'}
    """
    row = find_precision(precision)
    _check(gpus, machine, memory_bytes, context_tokens, tokens_per_step, dtype)
    near = machine.gpus_per_node if machine is not None else _GPUS_PER_NODE
    choices = []
    for base in usual_layouts(gpus, near, layers=config.layers):
        for again in checkpointed:
            layout = MemoryLayout(base, again)
            plan, left_out = None, None
            if machine is not None:
                try:
                    plan = plan_parallelism(
                        config.size,
                        base,
                        machine,
                        tokens_per_step=tokens_per_step,
                        context_tokens=context_tokens,
                        precision=row,
                        recomputed=again,
                        dtype=dtype,
                    )
                except ValueError as error:
                    left_out = str(error)
            memory = decoder_memory(config, layout, context_tokens=context_tokens, precision=row)
            verdict = None if memory_bytes is None else memory.verdict(memory_bytes)
            most = None
            if memory_bytes is not None:
                most = largest_micro_batch(config, layout, memory_bytes, context_tokens=context_tokens, precision=row)
            choices.append(LayoutChoice(layout, memory, verdict, most, plan, left_out))
    return sorted(choices, key=_rank)


def _check(
    gpus: int,
    machine: Machine | None,
    memory_bytes: float | None,
    context_tokens: int,
    tokens_per_step: int,
    dtype: str | None,
) -> None:
    """Here, since an error of a single layout leaves out that layout."""
    for name, count in (("gpus", gpus), ("context_tokens", context_tokens), ("tokens_per_step", tokens_per_step)):
        whole_number(count, name)
    if memory_bytes is not None:
        check_memory_bytes(memory_bytes)
    if machine is not None and not isinstance(machine, Machine):
        raise ValueError(f"`machine` must be a planning.Machine, from find_machine() or your own, got {machine!r}.")
    if dtype is not None:
        rate_column(dtype)


@dataclass(frozen=True, slots=True)
class ChipChoice:
    """Chips with one memory size, and the layout on them with the largest micro-batch; None if nothing fits."""

    chips: tuple[str, ...]
    memory_bytes: int
    best: LayoutChoice | None


def choose_chips(
    config: DecoderConfig, gpus: int = 1, *, context_tokens: int = 4096, precision: object = "bf16-mixed"
) -> list[ChipChoice]:
    """The chips on which a model can be trained, for a given number of them.

    Args:
        config: the model.
        gpus: number of GPUs.
        context_tokens: length of a sequence.
        precision: a name of :data:`~lightning_mp.core.precisions.PRECISIONS`.

    Raises:
        ValueError: a precision is unknown, or a number is not positive.

    Example:
        Seven billion parameters, on one GPU: 16 bytes each do not fit into 80 GB.

        >>> config = DecoderConfig(layers=32, width=4096, heads=32, ffn_width=11008, vocabulary=32000)
        >>> [row.memory_bytes // 10**9 for row in choose_chips(config) if row.best is not None][:2]
        [256, 270]
    """
    chips_by_memory: dict[int, list[str]] = {}
    for chip in sorted(known_chips(), key=lambda chip: chip.memory_bytes):
        chips_by_memory.setdefault(chip.memory_bytes, []).append(chip.name)
    found = []
    for memory, chips in chips_by_memory.items():
        layouts = choose_layouts(config, gpus, memory_bytes=memory, context_tokens=context_tokens, precision=precision)
        fitting = [choice for choice in layouts if choice.verdict == "fits"]
        best = max(fitting, key=lambda it: (it.largest_micro_batch or 0) * it.layout.layout.data_ranks, default=None)
        found.append(ChipChoice(tuple(chips), memory, best))
    return found


def enough_gpus(
    config: DecoderConfig, gpus: int, *, memory_bytes: float, context_tokens: int, precision: object
) -> tuple[int, MemoryLayout] | None:
    """GPUs, doubled until one sequence fits in a layout that this package runs, and the simplest one; None if never.

    >>> config = DecoderConfig(layers=126, width=16384, heads=128, kv_heads=8, ffn_width=53248, vocabulary=128256)
    >>> enough_gpus(config, 8, memory_bytes=80e9, context_tokens=4096, precision="bf16-mixed")[0]
    1024
    """
    while gpus <= _MOST_GPUS:
        layouts = choose_layouts(
            config, gpus, memory_bytes=memory_bytes, context_tokens=context_tokens, precision=precision
        )
        for choice in layouts:
            ranks = choice.layout.layout
            if choice.verdict == "fits" and (ranks.tensor == 1 or ranks.stages == 1):
                return gpus, choice.layout
        gpus *= 2
    return None


def _rank(choice: LayoutChoice) -> tuple[float, ...]:
    """What fits by its time; where that is not known, whole layers first, recomputed ones after; the rest by bytes."""
    verdict = _VERDICTS.index(choice.verdict) if choice.verdict is not None else 0
    if choice.verdict is None or verdict > 0:
        return verdict, choice.memory.total_bytes
    seconds = choice.plan.seconds_at_least if choice.plan is not None else float("inf")
    ranks = choice.layout.layout
    return verdict, seconds, ranks.tensor * ranks.stages > 1, choice.layout.checkpointed
