"""What ``lightning-mp plan`` prints: the run, its time and cost, layouts in memory and on the wire."""

import argparse
import textwrap
from dataclasses import asdict, dataclass
from typing import Any

from lightning_mp.ground.core.cli_text import print_facts, print_paragraph, print_table
from lightning_mp.ground.core.precisions import PrecisionName
from lightning_mp.ground.core.quantities import format_bytes, format_quantity
from lightning_mp.monitors.step_memory.live_storages import PARTS
from lightning_mp.planning.communication import ParallelLayout
from lightning_mp.planning.layouts import ChipChoice, LayoutChoice
from lightning_mp.planning.memory.decoder_config import DecoderConfig
from lightning_mp.planning.scaling_laws.optimum import ComputeOptimal, InferenceAware, PlannedRun
from lightning_mp.planning.training_run import RunTime, TrainingRun

_NAMES_WIDTH = 37
_COLUMNS = ("layout", "GPU needs", "verdict", "sequences", "step")
_CONVENTIONS = """\
AC: activation checkpointing of every block. Memory is calculated for one sequence; the range covers the allocator,
which was not measured. Sequences: the largest micro-batch of a data rank that fits. Step: """
_STEP = "{tokens} tokens at the peaks of the chip and its links, so no step is shorter."
_WIDE_CONVENTIONS = """\
Memory by part: live tensors of the fullest GPU at the peak of a step. Sent: by one GPU per step. Hidden: sending
takes no longer than computing and nothing waits for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The answers to one question; parts that were not requested are None."""

    size: ComputeOptimal | TrainingRun
    config: DecoderConfig | None
    assumed_shape: bool
    time: RunTime | None
    inference: InferenceAware | None
    precision: PrecisionName
    context_tokens: int
    gpus: int
    layouts: list[LayoutChoice] | None = None
    tokens_per_step: int | None = None
    memory_bytes: float | None = None
    enough: tuple[int, ParallelLayout] | None = None
    chips: list[ChipChoice] | None = None


def print_answer(answer: Answer, arguments: argparse.Namespace) -> None:
    """Every part that was asked about; with ``--wide`` all columns of the layouts."""
    size = answer.size
    if isinstance(size, ComputeOptimal):
        _print_plan(size, _of_all(answer.config))
    else:
        _print_run(size, _of_all(answer.config))
    if size.repetition_note is not None:
        print_paragraph(f"\nRepeated data (Muennighoff et al. 2023): {size.repetition_note}")
    if answer.time is not None:
        _print_time(answer.time)
    if answer.inference is not None:
        unique = size.unique_tokens
        _print_inference(answer.inference, repeats=unique is not None and answer.inference.tokens > unique)
    if answer.config is not None and answer.assumed_shape:
        _print_assumed(answer.config)
    if answer.layouts is not None:
        _print_layouts(answer, answer.layouts, wide=arguments.wide)
    if answer.chips is not None:
        _print_chips(answer, answer.chips)


def as_json(answer: Answer) -> dict[str, Any]:
    """The same as JSON values."""
    content = _as_json(answer.size)
    if isinstance(answer.size, ComputeOptimal):
        content["spread"] = [_as_json(row) for row in answer.size.spread]
    else:
        content["optimum"] = _as_json(answer.size.optimum)
    if answer.time is not None:
        content["time"] = asdict(answer.time)
    if answer.inference is not None:
        content["inference_aware"] = asdict(answer.inference) | {"saving": answer.inference.saving}
    if answer.config is not None:
        content |= {"precision": answer.precision, "context_tokens": answer.context_tokens}
        content["assumed_shape"] = asdict(answer.config) if answer.assumed_shape else None
    if answer.layouts is not None:
        content |= {"memory_bytes": answer.memory_bytes, "tokens_per_step": answer.tokens_per_step}
        content["layouts"] = [_layout_as_json(choice) for choice in answer.layouts]
    if answer.chips is not None:
        content["chips"] = [
            {"chips": row.chips, "memory_bytes": row.memory_bytes, "layout": row.best and _layout_as_json(row.best)}
            for row in answer.chips
        ]
    return content


def _layout_as_json(choice: LayoutChoice) -> dict[str, Any]:
    plan = choice.plan
    return {
        "name": choice.layout.name,
        "verdict": choice.verdict,
        "bytes_by_part": dict(choice.memory.bytes_by_part),
        "reserved_bytes": choice.memory.reserved_bytes,
        "largest_micro_batch": choice.largest_micro_batch,
        "inside_bytes": None if plan is None else plan.inside_bytes,
        "between_bytes": None if plan is None else plan.between_bytes,
        "seconds_at_least": None if plan is None else plan.seconds_at_least,
        "hides": choice.hides,
        "left_out": choice.left_out,
    }


def _of_all(config: DecoderConfig | None) -> str:
    """Of a mixture: N counts what a token is routed to."""
    if config is None or not config.experts:
        return ""
    return f" active of {format_quantity(config.parameters)}"


def _print_run(run: TrainingRun, of_all: str) -> None:
    best = run.optimum
    print_paragraph(f"A run under {run.law.name}: {run.law.source}\n")
    rows = [
        ("parameters N", f"{format_quantity(run.parameters)}{of_all}", format_quantity(best.parameters)),
        ("tokens D", format_quantity(run.tokens), format_quantity(best.tokens)),
        ("tokens per parameter", format_quantity(run.tokens_per_parameter), format_quantity(best.tokens_per_parameter)),
        ("FLOPs 6 N D", _flops(run.flops), _flops(best.flops)),
        ("predicted loss", _loss(run.loss), _loss(best.loss)),
    ]
    if run.unique_tokens is not None:
        rows.append(("epochs", f"{run.epochs:.3g}", "-"))
    print_table(("", "this run", "optimum for its compute"), rows)


def _print_time(time: RunTime) -> None:
    whose = "as given" if time.measured else "not measured: the range that well-tuned jobs report"
    peak = f"{time.peak_flops_per_second / 1e12:g} TFLOP/s dense {time.dtype} each"
    shares = tuple(f"{100 * share:.3g}%" for share in dict.fromkeys(time.mfu))
    print_paragraph(f"\n{time.gpus} x {time.chip}, {peak}, MFU {' to '.join(shares)} ({whose}):\n")
    rows = [("time", _duration(time.hours)), ("GPU hours", _pair(time.gpu_hours))]
    if time.cost is not None:
        rows.append(("cost", _pair(time.cost)))
    print_facts(rows)


def _duration(hours: tuple[float, float]) -> str:
    units = (("years", 24 * 365.25), ("days", 24), ("hours", 1))
    unit, size = next(((unit, size) for unit, size in units if hours[1] >= 2 * size), units[-1])
    return f"{_pair((hours[0] / size, hours[1] / size))} {unit}"


def _pair(values: tuple[float, float]) -> str:
    first, last = map(format_quantity, values)
    return first if first == last else f"{first} to {last}"


def _print_inference(best: InferenceAware, *, repeats: bool) -> None:
    print_paragraph(
        f"\nWith {format_quantity(best.inference_tokens)} tokens of inference, the same loss is cheapest with"
        f" {format_quantity(best.parameters)} parameters on {format_quantity(best.tokens)} tokens:"
        f" {best.saving:.0%} less compute over the lifetime of the model (Sardana et al. 2024)."
        + (" This counts repeated tokens as new ones." if repeats else "")
    )


def _print_layouts(answer: Answer, layouts: list[LayoutChoice], *, wide: bool) -> None:
    has = f"of {answer.memory_bytes / 1e9:g} GB" if answer.memory_bytes else "of unknown memory"
    if answer.memory_bytes:
        fitting = [choice for choice in layouts if choice.verdict == "fits"]
        first = layouts[0]
        print_paragraph(
            f"\nIt fits in {len(fitting)} of {len(layouts)} layouts; the first choice is {first.layout.name}."
            if fitting
            else f"\nIt {first.verdict} with this many GPUs; {first.layout.name} is the closest."
            + _alternatives(answer, first.verdict)
        )
    print_paragraph(
        f"\nLayouts in {answer.precision} with Adam and sequences of {answer.context_tokens:,} tokens, on GPUs {has};"
        " those that do not fit come last:\n"
    )
    rows = [_layout_row(choice) for choice in layouts]
    columns = [name for name in rows[0] if wide or name in _COLUMNS]
    if not wide:
        rows = [row | {"layout": row["layout"].replace(", checkpointed", " + AC")} for row in rows]
    print_table(columns, [[row[name] for name in columns] for row in rows])
    reasons: dict[str, list[str]] = {}
    for choice in layouts:
        if choice.left_out:
            reasons.setdefault(choice.left_out, []).append(choice.layout.name)
    for reason, names in reasons.items():
        said = reason.replace("`tokens_per_step`", "--tokens-per-step")
        print_paragraph(f"\nWithout a time: {'; '.join(names)}. {said[0].upper()}{said[1:].rstrip('.')}.")
    print_paragraph(f"\n{_conventions(answer, layouts)}" + ("" if wide else " --wide shows every column."))
    if wide:
        print_paragraph(f"\n{_WIDE_CONVENTIONS}")


def _conventions(answer: Answer, layouts: list[LayoutChoice]) -> str:
    step = "the links of this chip are not known."
    if any(choice.plan is not None or choice.left_out for choice in layouts) and answer.tokens_per_step is not None:
        step = _STEP.format(tokens=format_quantity(answer.tokens_per_step))
    both = any(choice.layout.tensor > 1 and choice.layout.stages > 1 for choice in layouts)
    return f"{_CONVENTIONS}{step}" + (" No strategy of this package runs TP with PP." if both else "")


def _print_assumed(config: DecoderConfig) -> None:
    print_paragraph(
        f"\nNo shape was given. Assumed, in the proportions of Llama 2: {config.layers} layers, width"
        f" {config.width}, {config.heads} heads, {config.ffn_width} in the MLP, a vocabulary of"
        f" {config.vocabulary}. Pass --config, or --layers, --width and --vocab, for yours."
    )


def _alternatives(answer: Answer, verdict: str | None, kind: str = "") -> str:
    decides = " That depends on the allocator." if verdict == "may fit" else ""
    if answer.enough is None:
        return f"{decides} Use larger GPUs, a shorter --context, or --precision bf16-true+remainder."
    gpus, layout = answer.enough
    return f"{decides} {gpus} GPUs{kind} suffice: {layout.name}."


def _print_chips(answer: Answer, chips: list[ChipChoice]) -> None:
    gpus = f"{answer.gpus} GPU{'s' if answer.gpus > 1 else ''}"
    fitting = [row for row in chips if row.best is not None]
    if not fitting:
        largest = chips[-1]
        print_paragraph(
            f"\nIt does not fit on {gpus} in {answer.precision}, not even of {largest.memory_bytes / 1e9:g} GB"
            f" ({', '.join(largest.chips)}): pass --gpus.{_alternatives(answer, None, ' of 80 GB')}"
        )
        return
    print_paragraph(
        f"\nChips, in {answer.precision} with Adam and sequences of {answer.context_tokens:,} tokens, of which {gpus}"
        f" {'suffices' if answer.gpus == 1 else 'suffice'}, with the layout that takes the most sequences at once (per"
        " data rank):\n"
    )
    rows = []
    for row in fitting:
        assert row.best is not None
        figures = f"{row.memory_bytes / 1e9:g} GB", row.best.layout.name, str(row.best.largest_micro_batch)
        names = ", ".join(chip.replace(" ", "\N{NO-BREAK SPACE}") for chip in row.chips)
        lines = [line.replace("\N{NO-BREAK SPACE}", " ") for line in textwrap.wrap(names, _NAMES_WIDTH)]
        rows += [(lines[0], *figures), *((line, "", "", "") for line in lines[1:])]
    print_table(("chip", "memory", "layout", "sequences"), rows)
    if len(fitting) < len(chips):
        most = chips[-len(fitting) - 1].memory_bytes
        print_paragraph(f"\nOn chips of {most / 1e9:g} GB or less it may not fit.")


def _layout_row(choice: LayoutChoice) -> dict[str, str]:
    parts, plan = choice.memory.bytes_by_part, choice.plan
    groups = (("weights",), ("gradients", "masters", "optimizer states"), ("activations",))
    shown = [sum(parts.get(part, 0) for part in PARTS if part in group) for group in groups]
    shown.append(choice.memory.total_bytes - sum(shown))
    low, high = (size / 1e9 for size in choice.memory.reserved_bytes)
    sizes = zip(("weights", "states", "activations", "other"), map(format_bytes, shown), strict=True)
    return {
        "layout": choice.layout.name,
        **dict(sizes),
        "GPU needs": f"{low:.0f} to {high:.0f} GB",
        "verdict": choice.verdict or "-",
        "sequences": "-" if choice.largest_micro_batch is None else str(choice.largest_micro_batch),
        "sent": "-" if plan is None else f"{(plan.inside_bytes + plan.between_bytes) / 1e9:.1f} GB",
        "step": "-" if plan is None else f"{plan.seconds_at_least:.2f} s",
        "hidden": "-" if choice.hides is None else "yes" if choice.hides else "no",
    }


def _flops(value: float) -> str:
    return f"{value:.3g}".replace("e+", "e")


def _loss(value: float | None) -> str:
    return "this law has none" if value is None else f"{value:.3f} nats per token"


def _as_json(size: PlannedRun) -> dict[str, Any]:
    content: dict[str, Any] = {
        "law": size.law.name,
        "source": size.law.source,
        "parameters": size.parameters,
        "parameters_counted": size.law.counts,
        "tokens": size.tokens,
        "tokens_per_parameter": size.tokens_per_parameter,
        "flops": size.flops,
        "loss_nats_per_token": size.loss,
        "times_outside_range": size.times_outside,
    }
    if size.unique_tokens is not None:
        content |= {"unique_tokens": size.unique_tokens, "epochs": size.epochs, "repetition": size.repetition_note}
    if isinstance(size, ComputeOptimal) and size.devices is not None:
        content |= asdict(size.devices)
    return content


def _print_plan(plan: ComputeOptimal, of_all: str) -> None:
    law, outside = plan.law, _times_outside(plan)
    print_paragraph(f"Compute-optimal under {law.name}: {law.source}\n")
    lines = [
        ("parameters N", f"{format_quantity(plan.parameters)}{of_all} ({law.counts})"),
        ("tokens D", format_quantity(plan.tokens)),
        ("tokens per parameter", format_quantity(plan.tokens_per_parameter)),
        ("FLOPs 6 N D", _flops(plan.flops)),
        ("predicted loss", _loss(plan.loss)),
        ("range of the law", f"{f'{outside} times outside' if outside else 'inside'} ({law.trained})"),
    ]
    if plan.devices is not None:
        devices = plan.devices
        peak = f"{devices.peak_flops_per_second / 1e12:g} TFLOP/s dense {devices.dtype}, MFU {100 * devices.mfu:.3g}%"
        lines.insert(0, ("machine", f"{devices.device_hours:,.10g} hours of {devices.device}, {peak}"))
    if plan.unique_tokens is not None:
        lines.insert(-3, ("epochs", f"{plan.epochs:.3g} over {format_quantity(plan.unique_tokens)} unique tokens"))
    print_facts(lines)
    print("\nThe answer of every published law; they do not agree:\n")
    print_table(
        ("law", "parameters", "tokens", "tokens/N", "FLOPs", "loss", "times outside"),
        [_row(row) for row in plan.spread],
    )


def _times_outside(plan: ComputeOptimal) -> str:
    return "" if plan.times_outside == 1 else format_quantity(float(f"{plan.times_outside:.2g}"))


def _row(plan: ComputeOptimal) -> tuple[str, ...]:
    return (
        plan.law.name,
        format_quantity(plan.parameters),
        format_quantity(plan.tokens),
        format_quantity(plan.tokens_per_parameter),
        _flops(plan.flops),
        "-" if plan.loss is None else f"{plan.loss:.3f}",
        _times_outside(plan) or "-",
    )
