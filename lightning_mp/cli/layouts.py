"""``lightning-mp layouts``: what a training step sends and takes at least, on n GPUs, under usual layouts."""

import argparse
from typing import Any, get_args

from lightning_mp.cli.text import print_json, print_paragraph, print_table, run_with_one_line_errors
from lightning_mp.core.quantities import format_quantity, parse_quantity
from lightning_mp.planning.memory.chip_memory import chip_memory_bytes
from lightning_mp.planning.memory.decoder_config import DecoderConfig
from lightning_mp.planning.memory.decoder_memory import MemoryLayout, decoder_memory
from lightning_mp.planning.parallelism.communication import Precision, TensorReduceDtype
from lightning_mp.planning.parallelism.decoder_size import DecoderSize
from lightning_mp.planning.parallelism.interconnects import Machine, find_machine, known_machines
from lightning_mp.planning.parallelism.parallel_plan import ParallelPlan, plan_parallelism, usual_layouts

_Row = tuple[ParallelPlan, str | None]
_COLUMNS = ("layout", "GPUs", "fits", "sent", "step", "bound by")
_VERDICTS = ("fits", "recomputed", "may fit", "does not fit")

_DESCRIPTION = """\
Bytes on the wire, pipeline bubble and shortest possible time of one optimizer step of a decoder, for the usual ways to
divide it over GPUs, and whether it fits. A calculation from published peaks and formulas: nothing is measured. Numbers
may be written 1.3B, 1e21 or 300_000_000. For a run and its cost see lightning-mp plan."""

_EXAMPLES = """\
examples:
  lightning-mp layouts --params 8.03B --layers 32 --width 4096 --vocab 128256
  lightning-mp layouts --params 7B --layers 32 --width 4096 --vocab 32000 --wide
  lightning-mp layouts --params 124M --layers 12 --width 768 --vocab 50257 \\
    --tied-head --machine "DGX A100" --json"""

_CONVENTIONS = """\
Fits: on GPUs of {memory}, calculated for one micro-batch of a dense decoder with gates; "recomputed" fits when every
block is checkpointed, "may fit" depends on the allocator. What does not fit comes last. Sent: by one GPU per step.
Step: at the peaks of the chip and its links, so no step is shorter; "waiting" is for activations and in the pipeline's
bubble. No strategy of this package runs TP with PP."""
_WIDE_CONVENTIONS = """\
M: micro-batches per data rank and step. Operations: collectives and sends of one GPU per step. In node, between:
bytes sent inside of a node and to other nodes, by two-level rings: (n - 1) / n of the whole for an all-gather or
reduce-scatter, twice that for an all-reduce. Bubble: idle share of the step, (s - 1) / (M + s - 1) under GPipe and
1F1B. Compute: "palm" FLOPs at the chip's dense peak. Wire/compute: time on the slower link over time of computing;
above 1 it cannot be hidden. TP reduces gradients of the residual stream in {dtype}: {whose}."""

_WHOSE = {
    "fp32": "as this package does; Megatron-LM does it in 16 bit (--tensor-reduce 16bit)",
    "16bit": "as Megatron-LM does; this package does it in fp32 (--tensor-reduce fp32)",
}

_OPTIONS = {
    "parameters": "--params",
    "layers": "--layers",
    "width": "--width",
    "vocabulary": "--vocab",
    "gpus": "--gpus",
    "machine": "--machine",
    "tokens_per_step": "--tokens-per-step",
    "context_tokens": "--context",
    "sequences_per_gpu": "--sequences",
    "precision": "--precision",
    "tensor_reduce_dtype": "--tensor-reduce",
}


def add_layouts_command(commands: "argparse._SubParsersAction[Any]") -> None:
    """Adds ``layouts`` to the command line."""
    parser = commands.add_parser(
        "layouts",
        help="what parallel layouts send per step",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
    )
    model = parser.add_argument_group("model (a decoder)")
    model.add_argument("--params", required=True, metavar="N", dest="parameters", help="all parameters")
    model.add_argument("--layers", required=True, metavar="L", help="blocks")
    model.add_argument("--width", required=True, metavar="W", help="size of the residual stream")
    model.add_argument("--vocab", required=True, metavar="V", dest="vocabulary", help="token ids")
    model.add_argument("--tied-head", action="store_true", help="the output layer is the token table")
    step = parser.add_argument_group("step")
    step.add_argument("--tokens-per-step", default="4194304", metavar="T", help="over all GPUs (default 2^22)")
    step.add_argument("--context", default="4096", metavar="T", dest="context_tokens", help="default 4096")
    step.add_argument(
        "--sequences", default="1", metavar="S", dest="sequences_per_gpu", help="per GPU in a micro-batch (default 1)"
    )
    step.add_argument("--precision", choices=get_args(Precision), default="bf16-mixed", help="default bf16-mixed")
    step.add_argument(
        "--tensor-reduce",
        choices=get_args(TensorReduceDtype),
        default="fp32",
        dest="tensor_reduce_dtype",
        help="gradients of the residual stream under TP: fp32 as this package, 16bit as Megatron-LM (default fp32)",
    )
    machine = parser.add_argument_group("machine")
    names = ", ".join(machine.name for machine in known_machines())
    machine.add_argument("--gpus", default="8,64,256,1024", metavar="N,N", help="default 8,64,256,1024")
    machine.add_argument("--machine", default="DGX H100", metavar="NAME", help=f"{names}; default DGX H100")
    parser.add_argument("--wide", action="store_true", help="every column: micro-batches, operations, bubble")
    parser.add_argument("--json", action="store_true", help="for machines")
    parser.set_defaults(run=_run, parser=parser)


def _run(arguments: argparse.Namespace) -> int:
    def work() -> tuple[DecoderSize, Machine, list[_Row], list[str]]:
        numbers = {
            name: _count(getattr(arguments, name), name)
            for name in ("parameters", "layers", "width", "vocabulary", "tokens_per_step", "context_tokens")
        }
        step = {name: numbers.pop(name) for name in ("tokens_per_step", "context_tokens")}
        step["sequences_per_gpu"] = _count(arguments.sequences_per_gpu, "sequences_per_gpu")
        size = DecoderSize.of(numbers.pop("parameters"), **numbers, tied_head=arguments.tied_head)
        machine = find_machine(arguments.machine)
        plans, left_out = _plans(size, machine, arguments, step)
        if not plans:
            raise ValueError(f"No layout fits. {left_out[0] if left_out else ''}")
        rows = [(plan, _verdict(plan, size, machine, arguments, step)) for plan in plans]
        return size, machine, sorted(rows, key=_rank), left_out

    (size, machine, rows, left_out), _ = run_with_one_line_errors(arguments.parser, _OPTIONS, work)
    if arguments.json:
        print_json(
            {
                "machine": machine.name,
                "source": machine.source,
                "tensor_reduce_dtype": arguments.tensor_reduce_dtype,
                "memory_bytes": chip_memory_bytes(machine.chip),
                "layouts": [_as_json(plan) | {"verdict": verdict} for plan, verdict in rows],
            }
        )
        return 0
    print_paragraph(
        f"One optimizer step of {arguments.tokens_per_step} tokens, a decoder of {format_quantity(size.parameters)}"
        f" parameters in {arguments.precision}."
    )
    print_paragraph(
        f"{machine.name}: {machine.gpus_per_node} GPUs in a node; each sends"
        f" {machine.inside_bytes_per_second / 1e9:g} GB/s inside it and {machine.between_bytes_per_second / 1e9:g} GB/s"
        " to other nodes.\n"
    )
    _print_layouts(rows, wide=arguments.wide)
    for text in left_out:
        print_paragraph(f"\nleft out: {text}")
    dtype = arguments.tensor_reduce_dtype
    memory = chip_memory_bytes(machine.chip)
    size_of_memory = f"{memory / 1e9:g} GB" if memory is not None else "an unknown size"
    print_paragraph(f"\n{_CONVENTIONS.format(memory=size_of_memory)}" + ("" if arguments.wide else " More: --wide."))
    if arguments.wide:
        print_paragraph(f"\n{_WIDE_CONVENTIONS.format(dtype=dtype, whose=_WHOSE[dtype])}")
    return 0


def _plans(
    size: DecoderSize, machine: Machine, arguments: argparse.Namespace, step: dict[str, Any]
) -> tuple[list[ParallelPlan], list[str]]:
    """Of every usual layout, and why some are left out."""
    plans, left_out = [], []
    for gpus in (_count(text, "gpus") for text in arguments.gpus.split(",")):
        for layout in usual_layouts(gpus, machine.gpus_per_node, layers=size.layers):
            try:
                plan = plan_parallelism(
                    size,
                    layout,
                    machine,
                    precision=arguments.precision,
                    tensor_reduce_dtype=arguments.tensor_reduce_dtype,
                    **step,
                )
                plans.append(plan)
            except ValueError as error:
                left_out.append(f"{gpus} GPUs, {layout.name}: {error}")
    return plans, left_out


def _verdict(
    plan: ParallelPlan, size: DecoderSize, machine: Machine, arguments: argparse.Namespace, step: dict[str, int]
) -> str | None:
    """Whether one micro-batch fits; None where the chip's memory is not known, or no usual decoder has this shape."""
    memory_bytes = chip_memory_bytes(machine.chip)
    if memory_bytes is None:
        return None
    shape = {"layers": size.layers, "width": size.width, "vocabulary": size.vocabulary}
    try:
        config = DecoderConfig.of_parameters(size.parameters, **shape, tied_head=arguments.tied_head)
    except ValueError:
        return None
    found = [
        decoder_memory(
            config,
            MemoryLayout(plan.layout, checkpointed=again),
            sequences=step["sequences_per_gpu"] * plan.layout.tensor,
            context_tokens=step["context_tokens"],
            precision=arguments.precision,
            micro_batches=plan.micro_batches,
        ).verdict(memory_bytes)
        for again in (False, True)
    ]
    return found[0] if found[0] == "fits" else "recomputed" if found[1] == "fits" else found[1]


def _rank(row: _Row) -> tuple[int, int]:
    plan, verdict = row
    return plan.layout.gpus, 0 if verdict is None else _VERDICTS.index(verdict)


def _print_layouts(rows: list[_Row], *, wide: bool) -> None:
    cells = [_cells(*row) for row in rows]
    columns = [name for name in cells[0] if wide or name in _COLUMNS]
    print_table(
        columns,
        [[row[name] for name in columns] for row in cells],
    )


def _cells(plan: ParallelPlan, verdict: str | None) -> dict[str, str]:
    return {
        "layout": plan.layout.name,
        "GPUs": str(plan.layout.gpus),
        "fits": verdict or "not known",
        "M": str(plan.micro_batches),
        "operations": str(plan.operations),
        "sent": f"{(plan.inside_bytes + plan.between_bytes) / 1e9:.1f} GB",
        "in node": f"{plan.inside_bytes / 1e9:.1f} GB",
        "between": f"{plan.between_bytes / 1e9:.1f} GB",
        "bubble": f"{plan.bubble:.0%}" if plan.bubble else "-",
        "compute": f"{plan.compute_seconds:.2f} s",
        "wire/compute": f"{plan.wire_to_compute_ratio:.2f}",
        "step": f"{plan.seconds_at_least:.2f} s",
        "bound by": plan.bound_by,
    }


def _as_json(plan: ParallelPlan) -> dict[str, Any]:
    layout = {name: getattr(plan.layout, name) for name in ("copies", "shards", "tensor", "stages")}
    figures = (
        "micro_batches",
        "operations",
        "inside_bytes",
        "between_bytes",
        "inside_seconds",
        "between_seconds",
        "awaited_seconds",
        "fill_and_drain_seconds",
        "compute_seconds",
        "bubble",
        "wire_to_compute_ratio",
        "seconds_at_least",
        "bound_by",
    )
    return {"name": plan.layout.name, "gpus": plan.layout.gpus, **layout} | {k: getattr(plan, k) for k in figures}


def _count(text: str, name: str) -> int:
    value = parse_quantity(text, name)
    if value != int(value):
        raise ValueError(f"`{name}` must be a whole number, got {text!r}.")
    return int(value)
