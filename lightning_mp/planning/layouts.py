"""Layouts of a decoder on many GPUs: which of them fit, bytes on each link, and a lower bound for the time of a step.

Conventions:

- memory: :func:`~lightning_mp.planning.memory.decoder_memory.decoder_memory`, with one sequence per data rank;
- bytes: sent by one GPU in one optimizer step, see :mod:`~lightning_mp.planning.communication`;
- compute: the model's FLOPs per token under the "palm" convention, at the dense peak of the chip;
- bubble: :func:`bubble_fraction`, of the step's time;
- seconds at least: the larger of the time of the last stage and of each link's bytes at its printed bandwidth. With s
  stages, m micro-batches, c the computing of one of them on a stage with the reductions of tensor parallelism that it
  waits for, and x one send::

      (m + s - 1) c + 2 (s - 1) x

  since the last stage starts after s - 1 forwards and sends, works m c, and s - 1 backwards and sends follow. GPipe
  whose sends run beside the computing takes exactly this; GPipe or 1F1B that waits for them takes longer. It is no
  bound for schedules that divide stages or backwards further (interleaved, zero bubble), nor where the reductions of
  tensor parallelism run beside other products.

``interconnects.csv`` has the links of machines as vendors print them: NVLink in GB/s of one GPU, both directions
together; network adapters in Gb/s of one direction, of those that are for the cluster. What is requested here is bytes
per second of one GPU in one direction: half the former, and an eighth of the latter shared out to the GPUs of the node.

Nothing is measured: no kernel reaches the peak, no network its printed rate, and latency is left out.
"""

import csv
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import resources

from lightning_mp.ground.core.arguments import positive_number, whole_number, whole_quantity
from lightning_mp.ground.core.number_formats import number_format
from lightning_mp.ground.core.precisions import PrecisionLike, find_precision
from lightning_mp.ground.flops.conventions import flops_per_token
from lightning_mp.ground.flops.hardware import known_chips, peak_flops, rate_column
from lightning_mp.ground.flops.throughput import bubble_fraction
from lightning_mp.planning.communication import ParallelLayout, TensorReduceDtype, Transfer, communication_per_step
from lightning_mp.planning.memory.decoder_config import DecoderConfig, DecoderSize
from lightning_mp.planning.memory.decoder_memory import (
    DecoderMemory,
    check_memory_bytes,
    decoder_memory,
    largest_micro_batch,
)

#: Where no machine is known; so have all machines of the table.
GPUS_PER_NODE = 8
_PIPELINE_STAGES = 8
_MOST_GPUS = 2**16


@dataclass(frozen=True, slots=True)
class Machine:
    """Nodes of one kind and the network between them.

    Raises:
        ValueError: a number is not positive.

    Example:
        A machine that is not in the table, with 4 GPUs and one adapter of 100 Gb/s:

        >>> mine = Machine("mine", "L40S", gpus_per_node=4, inside_bytes_per_second=32e9,
        ...                between_bytes_per_second=100e9 / 8 / 4)
        >>> mine.between_bytes_per_second / 1e9
        3.125
    """

    name: str  #: What people call it.
    chip: str  #: A short name of :func:`~lightning_mp.ground.flops.hardware.known_chips`.
    gpus_per_node: int  #: How many are behind the inner links.
    inside_bytes_per_second: float  #: Of one GPU to the others of its node, in one direction.
    between_bytes_per_second: float  #: Of one GPU's share of the node's adapters, in one direction.
    source: str = "given by the caller"  #: Where the figures are printed.
    checked: str = ""  #: Month, such as "2026-11", in which they were found in published text. Empty: not looked up.

    def __post_init__(self) -> None:
        for name in ("gpus_per_node", "inside_bytes_per_second", "between_bytes_per_second"):
            positive_number(getattr(self, name), name, "Machine")


@lru_cache(maxsize=1)
def known_machines() -> tuple[Machine, ...]:
    """Every machine of the data file, in its order."""
    text = resources.files("lightning_mp.planning").joinpath("interconnects.csv").read_text(encoding="utf-8")
    found = []
    for row in csv.DictReader(text.splitlines()):
        gpus = int(row["gpus_per_node"])
        between = int(row["adapters_per_node"]) * float(row["adapter_gigabits_per_second"]) * 1e9 / 8 / gpus
        inside = float(row["inside_gigabytes_per_second"]) * 1e9 / 2
        found.append(Machine(row["machine"], row["chip"], gpus, inside, between, row["source"], row["checked"]))
    return tuple(found)


def find_machine(name: str) -> Machine:
    """Finds a machine by name, ignoring case.

    Raises:
        ValueError: it is not in the table.

    Example:
        >>> machine = find_machine("dgx h100")
        >>> machine.inside_bytes_per_second / 1e9, machine.between_bytes_per_second / 1e9
        (450.0, 50.0)
    """
    for machine in known_machines() if isinstance(name, str) else ():
        if machine.name.lower() == name.strip().lower():
            return machine
    raise ValueError(
        f"`machine` {name!r} is not known. Known: {', '.join(machine.name for machine in known_machines())}. For"
        " another make a lightning_mp.planning.Machine."
    )


def machine_with(chip: str) -> Machine | None:
    """The first machine of the table that is built of a chip."""
    return next((machine for machine in known_machines() if machine.chip == chip), None)


@dataclass(frozen=True, slots=True)
class ParallelPlan:
    """One layout of one training step."""

    layout: ParallelLayout  #: How the GPUs are divided.
    micro_batches: int  #: Per data rank and optimizer step.
    transfers: tuple[Transfer, ...]  #: Everything that one rank sends.
    inside_bytes: float  #: Sent by one GPU to others of its node.
    between_bytes: float  #: Sent by one GPU to other nodes.
    inside_seconds: float  #: Of these bytes at the printed bandwidth.
    between_seconds: float  #: The same between nodes.
    #: Of both, for transfers within a stage that computing waits for: the reductions of tensor parallelism.
    awaited_seconds: float
    compute_seconds: float  #: At the chip's peak.
    bubble: float  #: Share of the step's time that a stage is idle.
    #: Of the sends that the first micro-batch needs to reach the last stage, and the last gradient to come back.
    fill_and_drain_seconds: float = 0.0

    @property
    def stage_seconds(self) -> float:
        """Of the last stage: computing, what it waits for, and the bubble with its sends."""
        return (self.compute_seconds + self.awaited_seconds) / (1 - self.bubble) + self.fill_and_drain_seconds

    @property
    def seconds_at_least(self) -> float:
        """A step of GPipe or 1F1B, or without stages, is not shorter than this; see the conventions of this module."""
        return max(self.stage_seconds, self.inside_seconds, self.between_seconds)

    @property
    def bound_by(self) -> str:
        """What takes longest: "compute", "waiting" (transfers and bubble), "inside" or "between"."""
        if self.seconds_at_least == self.stage_seconds:
            return "compute" if self.compute_seconds >= self.stage_seconds / 2 else "waiting"
        return "inside" if self.seconds_at_least == self.inside_seconds else "between"

    @property
    def wire_to_compute_ratio(self) -> float:
        """Seconds on the slower link over seconds of computing, both at their peaks. Above 1 it cannot be hidden."""
        return max(self.inside_seconds, self.between_seconds) / self.compute_seconds


def plan_parallelism(
    size: DecoderSize,
    layout: ParallelLayout,
    machine: Machine | str,
    *,
    tokens_per_step: int,
    context_tokens: int,
    precision: PrecisionLike = "bf16-mixed",
    tensor_reduce_dtype: TensorReduceDtype = "fp32",
    dtype: str | None = None,
) -> ParallelPlan:
    """Lower bounds for the traffic and time of one optimizer step of a decoder, under one layout.

    A micro-batch has one sequence for each GPU that a layer is split over, so all layouts have equal activations.

    Args:
        size: the model.
        layout: how the GPUs share it. With checkpointed blocks a step computes a third more.
        machine: a name of :func:`known_machines`, or a :class:`Machine`.
        tokens_per_step: the batch of the optimizer step, over all GPUs.
        context_tokens: length of a sequence.
        precision: a name of :data:`~lightning_mp.ground.core.precisions.PRECISIONS`.
        tensor_reduce_dtype: see :func:`~lightning_mp.planning.communication.communication_per_step`.
        dtype: format of matrix products, for the peak; None is that of ``precision``, fp32 without TF32 in "32-true".

    Raises:
        ValueError: sizes do not divide each other, or a name or a peak is unknown.

    Example:
        >>> size = DecoderSize.of(6_738_415_616, layers=32, width=4096, vocabulary=32000)
        >>> plan = plan_parallelism(size, ParallelLayout(shards=64), "DGX H100", tokens_per_step=2**22,
        ...                         context_tokens=4096)
        >>> plan.micro_batches, round(plan.inside_bytes / 1e9), round(plan.between_bytes / 1e9), plan.bound_by
        (16, 401, 50, 'compute')
    """
    machine = machine if isinstance(machine, Machine) else find_machine(machine)
    tokens_per_step = whole_quantity(tokens_per_step, "tokens_per_step")
    context_tokens = whole_quantity(context_tokens, "context_tokens")
    of_a_micro_batch = context_tokens * layout.tensor
    micro_batches = _micro_batches(tokens_per_step, of_a_micro_batch, layout)
    transfers = communication_per_step(
        size,
        layout,
        tokens_per_micro_batch=of_a_micro_batch,
        micro_batches=micro_batches,
        precision=precision,
        tensor_reduce_dtype=tensor_reduce_dtype,
    )
    flops = flops_per_token(
        size.matmul_weights, layers=size.layers, width=size.width, context_tokens=context_tokens, convention="palm"
    )
    row = find_precision(precision)
    peak = peak_flops(machine.chip, dtype if dtype is not None else "fp8" if row.fp8 else row.compute_dtype)
    inside, between = _bytes(transfers, machine)
    awaited = [part for part in transfers if part.awaited and part.collective != "send"]
    fill_and_drain = [replace(part, count=2 * (layout.stages - 1)) for part in transfers if part.collective == "send"]
    return ParallelPlan(
        layout=layout,
        micro_batches=micro_batches,
        transfers=tuple(transfers),
        inside_bytes=inside,
        between_bytes=between,
        inside_seconds=inside / machine.inside_bytes_per_second,
        between_seconds=between / machine.between_bytes_per_second,
        awaited_seconds=_seconds(awaited, machine),
        fill_and_drain_seconds=_seconds(fill_and_drain, machine),
        compute_seconds=flops * (4 / 3 if layout.checkpointed else 1) * tokens_per_step / (layout.gpus * peak),
        bubble=bubble_fraction(layout.stages, micro_batches),
    )


def _micro_batches(tokens_per_step: int, of_a_micro_batch: int, layout: ParallelLayout) -> int:
    micro_batches, rest = divmod(tokens_per_step, of_a_micro_batch * layout.data_ranks)
    if rest or not micro_batches:
        raise ValueError(
            f"`tokens_per_step` ({tokens_per_step:,}) is not a multiple of {of_a_micro_batch:,} tokens in a"
            f" micro-batch on {layout.data_ranks} data rank{'s' if layout.data_ranks > 1 else ''}. Use a multiple of"
            f" {of_a_micro_batch * layout.data_ranks:,}, shorter sequences, or fewer data ranks."
        )
    return micro_batches


def _bytes(transfers: Sequence[Transfer], machine: Machine) -> tuple[float, float]:
    pairs = [transfer.bytes_by_link(machine.gpus_per_node) for transfer in transfers]
    return sum(inside for inside, _ in pairs), sum(between for _, between in pairs)


def _seconds(transfers: Sequence[Transfer], machine: Machine) -> float:
    """One after another, on the link of each."""
    inside, between = _bytes(transfers, machine)
    return inside / machine.inside_bytes_per_second + between / machine.between_bytes_per_second


def usual_layouts(gpus: int, gpus_per_node: int, *, layers: int) -> list[ParallelLayout]:
    """Layouts worth considering on a number of GPUs, as far as the sizes divide.

    DDP, FSDP over all, FSDP inside the nodes with copies between them, tensor parallel inside the nodes with FSDP
    between them, and pipelines of 8 stages, alone and with tensor parallelism.

    Args:
        gpus: total number of GPUs.
        gpus_per_node: GPUs in each node.
        layers: number of layers of the model, a multiple of 8 for pipelines.

    Raises:
        ValueError: a number is not whole and positive.

    Example:
        >>> [layout.name for layout in usual_layouts(64, 8, layers=32)]
        ['DDP 64', 'FSDP 64', 'HSDP 8 x 8', 'FSDP 8 x TP 8', 'DDP 8 x PP 8', 'TP 8 x PP 8']
    """
    gpus = whole_quantity(gpus, "gpus")
    whole_number(gpus_per_node, "gpus_per_node")
    whole_number(layers, "layers")
    nodes, uneven = divmod(gpus, gpus_per_node)
    near, stages = gpus_per_node, _PIPELINE_STAGES
    found = [ParallelLayout(copies=gpus), ParallelLayout(shards=gpus)]
    if not uneven:
        found += [ParallelLayout(copies=nodes, shards=near), ParallelLayout(shards=nodes, tensor=near)]
        if layers % stages == gpus % stages == 0:
            found.append(ParallelLayout(copies=gpus // stages, stages=stages))
        if layers % stages == nodes % stages == 0:
            found.append(ParallelLayout(copies=nodes // stages, tensor=near, stages=stages))
    return list(dict.fromkeys(found))


_VERDICTS = ("fits", "may fit", "does not fit")


@dataclass(frozen=True, slots=True)
class LayoutChoice:
    """One layout with its memory and speed."""

    layout: ParallelLayout  #: how GPUs share the model.
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


def choose_layouts(
    config: DecoderConfig,
    gpus: int,
    *,
    machine: Machine | None = None,
    memory_bytes: float | None = None,
    context_tokens: int = 4096,
    tokens_per_step: int = 2**22,
    precision: PrecisionLike = "bf16-mixed",
    dtype: str | None = None,
    checkpointed: Sequence[bool] = (False, True),
) -> list[LayoutChoice]:
    """Common layouts: those that fit, fastest first, then the others, closest to fitting first.

    Where no machine is known, those that fit come in the order of
    :func:`usual_layouts`, recomputed blocks after those that are not,
    and tensor and pipeline parallelism, which need fast links or many micro-batches, last.

    Args:
        config: the model.
        gpus: number of GPUs.
        machine: for the communication of layouts; None omits it and assumes 8 GPUs per node.
        memory_bytes: memory of one GPU; None omits the verdicts.
        context_tokens: length of a sequence.
        tokens_per_step: tokens of one optimizer step, over all GPUs.
        precision: a name of :data:`~lightning_mp.ground.core.precisions.PRECISIONS`.
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
    context_tokens = whole_quantity(context_tokens, "context_tokens")
    tokens_per_step = whole_quantity(tokens_per_step, "tokens_per_step")
    if memory_bytes is not None:
        check_memory_bytes(memory_bytes)
    if machine is not None and not isinstance(machine, Machine):
        raise ValueError(f"`machine` must be a planning.Machine, from find_machine() or your own, got {machine!r}.")
    if dtype is not None:
        rate_column(dtype)
    near = machine.gpus_per_node if machine is not None else GPUS_PER_NODE
    choices = []
    for base in usual_layouts(gpus, near, layers=config.layers):
        for layout in (replace(base, checkpointed=again) for again in checkpointed):
            plan, left_out = None, None
            if machine is not None:
                try:
                    plan = plan_parallelism(
                        config.size,
                        layout,
                        machine,
                        tokens_per_step=tokens_per_step,
                        context_tokens=context_tokens,
                        precision=row,
                        dtype=dtype,
                    )
                except ValueError as error:
                    left_out = str(error)
            memory = decoder_memory(config, layout, context_tokens=context_tokens, precision=row)
            verdict = None if memory_bytes is None else memory.verdict(memory_bytes)
            most = None if memory_bytes is None else 0
            if memory_bytes is not None and verdict == "fits":
                most = largest_micro_batch(config, layout, memory_bytes, context_tokens=context_tokens, precision=row)
            choices.append(LayoutChoice(layout, memory, verdict, most, plan, left_out))
    return sorted(choices, key=_rank)


@dataclass(frozen=True, slots=True)
class ChipChoice:
    """Chips with one memory size, and the layout on them with the largest micro-batch; None if nothing fits."""

    chips: tuple[str, ...]
    memory_bytes: int
    best: LayoutChoice | None


def choose_chips(
    config: DecoderConfig, gpus: int = 1, *, context_tokens: int = 4096, precision: PrecisionLike = "bf16-mixed"
) -> list[ChipChoice]:
    """The chips with units for a precision on which a model can be trained, for a given number of them.

    Args:
        config: the model.
        gpus: number of GPUs.
        context_tokens: length of a sequence.
        precision: a name of :data:`~lightning_mp.ground.core.precisions.PRECISIONS`.

    Raises:
        ValueError: a precision is unknown, or a number is not positive.

    Example:
        Seven billion parameters, on one GPU: 16 bytes each do not fit into 80 GB.

        >>> config = DecoderConfig(layers=32, width=4096, heads=32, ffn_width=11008, vocabulary=32000)
        >>> [row.memory_bytes // 10**9 for row in choose_chips(config) if row.best is not None][:2]
        [256, 270]
    """
    row = find_precision(precision)
    wanted = "fp8" if row.fp8 else number_format(row.compute_dtype).name
    chips_by_memory: dict[int, list[str]] = {}
    for chip in sorted(known_chips(), key=lambda chip: chip.memory_bytes):
        if wanted in chip.peak_flops:
            chips_by_memory.setdefault(chip.memory_bytes, []).append(chip.name)
    found = []
    for memory, chips in chips_by_memory.items():
        layouts = choose_layouts(config, gpus, memory_bytes=memory, context_tokens=context_tokens, precision=precision)
        fitting = [choice for choice in layouts if choice.verdict == "fits"]
        best = max(fitting, key=lambda it: (it.largest_micro_batch or 0) * it.layout.data_ranks, default=None)
        found.append(ChipChoice(tuple(chips), memory, best))
    return found


def enough_gpus(
    config: DecoderConfig,
    gpus: int,
    *,
    memory_bytes: float,
    context_tokens: int,
    precision: PrecisionLike,
    split_layers: bool = True,
) -> tuple[int, ParallelLayout] | None:
    """GPUs, doubled until one sequence fits in a layout that this package runs, and the simplest one; None if never.

    Without ``split_layers`` only layouts of data parallelism count.

    >>> config = DecoderConfig(layers=126, width=16384, heads=128, kv_heads=8, ffn_width=53248, vocabulary=128256)
    >>> enough_gpus(config, 8, memory_bytes=80e9, context_tokens=4096, precision="bf16-mixed")[0]
    1024
    """
    while gpus <= _MOST_GPUS:
        layouts = choose_layouts(
            config, gpus, memory_bytes=memory_bytes, context_tokens=context_tokens, precision=precision
        )
        for choice in layouts:
            parallel = choice.layout.tensor > 1, choice.layout.stages > 1
            if choice.verdict == "fits" and not (all(parallel) if split_layers else any(parallel)):
                return gpus, choice.layout
        gpus *= 2
    return None


def _rank(choice: LayoutChoice) -> tuple[float, ...]:
    """What fits by its time; where that is not known, whole layers first, recomputed ones after; the rest by bytes."""
    verdict = _VERDICTS.index(choice.verdict) if choice.verdict is not None else 0
    if choice.verdict is None or verdict > 0:
        return verdict, choice.memory.total_bytes
    seconds = choice.plan.seconds_at_least if choice.plan is not None else float("inf")
    layout = choice.layout
    return verdict, seconds, layout.tensor * layout.stages > 1, layout.checkpointed
