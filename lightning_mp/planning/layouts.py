"""A training step on many GPUs: bytes on each link, the bubble, and a lower bound for its time.

Conventions:

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

Nothing is measured: no kernel reaches the peak, no network its printed rate, latency is left out, and memory is not
looked at.
"""

import csv
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import resources

from lightning_mp.core.arguments import positive_number, whole_number, whole_quantity
from lightning_mp.core.precisions import find_precision
from lightning_mp.flops.conventions import flops_per_token
from lightning_mp.flops.hardware import peak_flops
from lightning_mp.flops.throughput import bubble_fraction
from lightning_mp.planning.communication import TensorReduceDtype, Transfer, communication_per_step
from lightning_mp.planning.decoder_size import DecoderSize
from lightning_mp.planning.parallel_layout import ParallelLayout


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
    chip: str  #: A short name of :func:`~lightning_mp.flops.hardware.known_chips`.
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
    data = resources.files("lightning_mp.planning").joinpath("interconnects.csv")
    text = data.read_text(encoding="utf-8")
    return tuple(_machine(row) for row in csv.DictReader(text.splitlines()))


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


def _machine(row: dict[str, str]) -> Machine:
    gpus = int(row["gpus_per_node"])
    between = int(row["adapters_per_node"]) * float(row["adapter_gigabits_per_second"]) * 1e9 / 8 / gpus
    inside = float(row["inside_gigabytes_per_second"]) * 1e9 / 2
    return Machine(row["machine"], row["chip"], gpus, inside, between, row["source"], row["checked"])


_PIPELINE_STAGES = 8


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
    def operations(self) -> int:
        """Collective operations and sends that one rank takes part in."""
        return sum(transfer.count for transfer in self.transfers)

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
    sequences_per_gpu: int = 1,
    precision: object = "bf16-mixed",
    tensor_reduce_dtype: TensorReduceDtype = "fp32",
    recomputed: bool = False,
    dtype: str | None = None,
) -> ParallelPlan:
    """Lower bounds for the traffic and time of one optimizer step of a decoder, under one layout.

    Args:
        size: the model.
        layout: how the GPUs are divided.
        machine: a name from :func:`~lightning_mp.planning.layouts.known_machines`, or a
            :class:`Machine`.
        tokens_per_step: the batch of the optimizer step, over all GPUs.
        context_tokens: length of a sequence.
        sequences_per_gpu: sequences in a micro-batch per GPU that a layer is split over, so that layouts are compared
            at equal activations.
        precision: a name of :data:`~lightning_mp.core.precisions.PRECISIONS`.
        tensor_reduce_dtype: see :func:`~lightning_mp.planning.communication.communication_per_step`.
        recomputed: every block runs again in backward, which takes a third more computation.
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
    whole_number(sequences_per_gpu, "sequences_per_gpu")
    of_a_micro_batch = context_tokens * sequences_per_gpu * layout.tensor
    micro_batches = _micro_batches(tokens_per_step, of_a_micro_batch, layout)
    transfers = communication_per_step(
        size,
        layout,
        tokens_per_micro_batch=of_a_micro_batch,
        micro_batches=micro_batches,
        precision=precision,
        tensor_reduce_dtype=tensor_reduce_dtype,
        recomputed=recomputed,
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
        compute_seconds=flops * (4 / 3 if recomputed else 1) * tokens_per_step / (layout.gpus * peak),
        bubble=bubble_fraction(layout.stages, micro_batches),
    )


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
    found = [ParallelLayout(copies=gpus), ParallelLayout(shards=gpus)]
    if not uneven:
        near, stages = gpus_per_node, _PIPELINE_STAGES
        found.append(ParallelLayout(copies=nodes, shards=near))
        found.append(ParallelLayout(shards=nodes, tensor=near))
        if layers % stages == 0:
            if gpus % stages == 0:
                found.append(ParallelLayout(copies=gpus // stages, stages=stages))
            if nodes % stages == 0:
                found.append(ParallelLayout(copies=nodes // stages, tensor=near, stages=stages))
    return list(dict.fromkeys(found))


def _micro_batches(tokens_per_step: int, of_a_micro_batch: int, layout: ParallelLayout) -> int:
    micro_batches, rest = divmod(tokens_per_step, of_a_micro_batch * layout.data_ranks)
    if rest or not micro_batches:
        raise ValueError(
            f"`tokens_per_step` ({tokens_per_step}) is not a multiple of {of_a_micro_batch} tokens in a micro-batch on"
            f" {layout.data_ranks} data ranks ({layout.name}). Use a multiple of {of_a_micro_batch * layout.data_ranks}"
            ", shorter micro-batches, or fewer data ranks."
        )
    return micro_batches


def _bytes(transfers: Sequence[Transfer], machine: Machine) -> tuple[float, float]:
    pairs = [transfer.bytes_by_link(machine.gpus_per_node) for transfer in transfers]
    return sum(inside for inside, _ in pairs), sum(between for _, between in pairs)


def _seconds(transfers: Sequence[Transfer], machine: Machine) -> float:
    """One after another, on the link of each."""
    inside, between = _bytes(transfers, machine)
    return inside / machine.inside_bytes_per_second + between / machine.between_bytes_per_second
