"""``lightning-mp plan``: what a training run takes, from whatever numbers are known of it."""

import argparse
from dataclasses import replace
from math import ceil
from typing import Any

from lightning_mp.cli.model_shape import (
    add_shape,
    config_of,
    context_of,
    count_of,
    memory_of,
    refuse_other_units,
)
from lightning_mp.cli.plan_text import Answer, as_json, print_answer
from lightning_mp.ground.core.cli_text import answer_command
from lightning_mp.ground.core.number_formats import number_format
from lightning_mp.ground.core.precisions import PRECISIONS, PrecisionName, find_precision
from lightning_mp.ground.core.quantities import parse_quantity
from lightning_mp.ground.flops.hardware import Chip, chip_of, dtype_on
from lightning_mp.planning.layouts import choose_chips, choose_layouts, enough_gpus, machine_with
from lightning_mp.planning.memory.decoder_config import DecoderConfig
from lightning_mp.planning.scaling_laws.optimum import (
    ComputeOptimal,
    InferenceAware,
    PlannedRun,
    compute_optimal,
    device_budget,
    inference_aware_optimum,
)
from lightning_mp.planning.scaling_laws.scaling_law import DEFAULT_LAW, LAWS, with_loss
from lightning_mp.planning.training_run import TrainingRun, run_time, training_run

_DESCRIPTION = """\
Plan a training run. Give one of --flops, --params, --tokens, --device-hours and --cost for the compute-optimal run, or
two of model, tokens and compute for a run of your own; the rest follows from C = 6 N D. --device adds time and cost,
and memory and communication per layout on --gpus; a model without --device lists the chips that suffice. Numbers may be
written 1.3B, 1e21, 40%, 1EFLOP, 5PF-days or 300_000_000."""

_EXAMPLES = """\
examples:
  lightning-mp plan --flops 1e21
  lightning-mp plan --params 7B --device h100 --gpus 64
  lightning-mp plan --params 7B --device h100 --gpus 64 --wide
  lightning-mp plan --params 8B --tokens 15T --device h100 --gpus 1024 --mfu 40%
  lightning-mp plan --cost 100_000 --price 2.5 --device h100 --mfu 40%
  lightning-mp plan --config config.json --tokens 1T --device h100 --gpus 64
  lightning-mp plan --flops 5e21 --unique-tokens 10B --inference-tokens 2T"""

_USUAL_BYTES = 80e9
_TOKENS_PER_STEP = 2**22
_TARGETS = ("flops", "parameters", "tokens", "device_hours")


def fill_plan(parser: argparse.ArgumentParser) -> None:
    """Gives the parser of ``plan`` its options."""
    parser.description, parser.epilog = _DESCRIPTION, _EXAMPLES
    target = parser.add_argument_group("run (one of these, or two of model, tokens and compute)")
    target.add_argument("--flops", metavar="C", help="training compute")
    target.add_argument("--params", metavar="N", dest="parameters", help="model size")
    target.add_argument("--tokens", metavar="D", help="training tokens")
    target.add_argument("--device-hours", metavar="H", help="hours times devices, with --device and --mfu")
    target.add_argument("--cost", metavar="P", help="budget for device hours, with --price, --device and --mfu")
    add_shape(parser.add_argument_group("shape of a decoder, for memory (instead of --params)"))
    machine = parser.add_argument_group("machine")
    machine.add_argument("--device", metavar="CHIP", help="h100, a100, 'RTX 4090', ...; adds time and GPU hours")
    machine.add_argument("--gpus", metavar="G", help="number of GPUs (default 1)")
    machine.add_argument("--mfu", metavar="F", help="measured model FLOPs utilisation: 0.4 or 40%%")
    machine.add_argument(
        "--dtype",
        metavar="T",
        help="matmul format: bf16 (default; fp16 on chips without bf16), fp16, fp8, tf32 or fp32",
    )
    machine.add_argument(
        "--memory-bytes", metavar="B", help="memory of one GPU, such as 40GB; default: its largest variant"
    )
    machine.add_argument("--price", metavar="P", help="price of one GPU hour; adds the cost")
    machine.add_argument(
        "--precision",
        choices=list(PRECISIONS),
        help="default bf16-mixed; 16-mixed on chips without bf16 units",
    )
    machine.add_argument("--context", metavar="T", dest="context_tokens", help="sequence length; default 4096")
    machine.add_argument(
        "--tokens-per-step", metavar="T", help="tokens per optimizer step, over all GPUs (default about 2^22)"
    )
    parser.add_argument("--law", choices=list(LAWS), default=DEFAULT_LAW, help=f"scaling law; default {DEFAULT_LAW}")
    parser.add_argument(
        "--unique-tokens", metavar="U", help="size of the data set in tokens; beyond it, tokens are repeated"
    )
    parser.add_argument(
        "--inference-tokens", metavar="T", help="expected inference tokens; finds the cheapest model over its lifetime"
    )
    parser.add_argument("--wide", action="store_true", help="print every column, with memory by part and bytes sent")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_run, parser=parser)


def _run(arguments: argparse.Namespace) -> int:
    return answer_command(arguments, _answer, as_json, print_answer)


def _answer(arguments: argparse.Namespace) -> Answer:
    config = config_of(arguments)
    given = {name: getattr(arguments, name) for name in _TARGETS if getattr(arguments, name) is not None}
    if config is not None:
        if "parameters" in given:
            raise ValueError("`parameters` follows from the shape of the model. Leave it out, or leave the shape out.")
        given["parameters"] = config.active_parameters
    if arguments.cost is not None:
        given["device_hours"] = _hours_for(arguments, hours_given="device_hours" in given)
    _check_machine(arguments, model_given="parameters" in given)
    for name in ("parameters", "tokens", "unique_tokens"):
        refuse_other_units(getattr(arguments, name), name)
    chip = None if arguments.device is None else chip_of(arguments.device)
    precision, dtype = _formats(arguments.precision, arguments.dtype, chip)
    size = _size(arguments, given, dtype)
    gpus, wanted = count_of(arguments.gpus, "gpus"), arguments.inference_tokens
    time = None
    if chip is not None:
        time = run_time(size.flops, device=chip.name, gpus=gpus, dtype=dtype, mfu=arguments.mfu, price=arguments.price)
    needs_shape = chip is not None or "parameters" in given
    assumed = _assumed_shape(size) if config is None and needs_shape else None
    answer = Answer(
        size=size,
        config=config or assumed,
        assumed_shape=assumed is not None,
        time=time,
        inference=None if wanted is None else _inference(size, wanted),
        precision=precision,
        context_tokens=context_of(arguments.context_tokens, config),
        gpus=gpus,
    )
    return _on_machine(answer, arguments, chip, gpus, dtype)


def _hours_for(arguments: argparse.Namespace, *, hours_given: bool) -> float:
    """Device hours that the cost pays."""
    if hours_given:
        raise ValueError("`device_hours` follow from `cost` and `price`. Leave one of the two out.")
    for name in ("price", "device", "mfu"):
        if getattr(arguments, name) is None:
            raise ValueError(f"`cost` needs `price` of one GPU for an hour, `device` and `mfu`, got no `{name}`.")
    return parse_quantity(arguments.cost, "cost") / parse_quantity(arguments.price, "price")


def _formats(precision: PrecisionName | None, dtype: str | None, chip: Chip | None) -> tuple[PrecisionName, str | None]:
    """The precision, and the format of its matrix products on the chip; fp8 is timed at the bf16 peak.

    MFU is reported against the bf16 peak, of fp8 runs too: at twice the peak they reach less.
    """
    if chip is None:
        return precision or "bf16-mixed", dtype
    if precision is None:
        return ("bf16-mixed" if "bf16" in chip.peak_flops else "16-mixed"), dtype_on(chip, dtype)
    row = find_precision(precision)
    dtype_on(chip, "fp8" if row.fp8 else None)
    return precision, dtype_on(chip, dtype or number_format(row.compute_dtype).name)


def _assumed_shape(size: PlannedRun) -> DecoderConfig | None:
    try:
        return DecoderConfig.of_parameters(size.parameters)
    except ValueError:
        return None  # so small that the table of tokens has all of it


def _on_machine(
    answer: Answer, arguments: argparse.Namespace, chip: Chip | None, gpus: int, dtype: str | None
) -> Answer:
    """With memory of the chip and the layouts on it; without a chip with the chips that suffice."""
    config, context, precision = answer.config, answer.context_tokens, answer.precision
    if config is None:
        return answer
    if chip is None:
        chips = choose_chips(config, gpus, context_tokens=context, precision=precision)
        enough = None
        if all(row.best is None for row in chips):
            enough = enough_gpus(config, gpus, memory_bytes=_USUAL_BYTES, context_tokens=context, precision=precision)
        return replace(answer, chips=chips, enough=enough)
    memory = memory_of(arguments.memory_bytes) or chip.memory_bytes
    step = count_of(arguments.tokens_per_step, "tokens_per_step")
    if arguments.tokens_per_step is None:
        step = ceil(_TOKENS_PER_STEP / (gpus * context)) * gpus * context  # whole sequences on every GPU
    layouts = choose_layouts(
        config,
        gpus,
        machine=machine_with(chip.name),
        memory_bytes=memory,
        context_tokens=context,
        tokens_per_step=step,
        precision=precision,
        dtype=arguments.dtype and dtype,
    )
    enough = None
    if memory is not None and layouts[0].verdict != "fits":
        enough = enough_gpus(config, gpus, memory_bytes=memory, context_tokens=context, precision=precision)
    return replace(answer, layouts=layouts, tokens_per_step=step, memory_bytes=memory, enough=enough)


def _size(arguments: argparse.Namespace, given: dict[str, Any], dtype: str | None) -> ComputeOptimal | TrainingRun:
    law, unique = arguments.law, arguments.unique_tokens
    if len(given) not in (1, 2) or {"flops", "device_hours"} <= given.keys():
        names = " and ".join(f"`{name}`" for name in given) or "none"
        raise ValueError(
            "Pass one of `flops`, `parameters`, `tokens`, `device_hours` and `cost`, or two of model (`parameters` or a"
            f" shape), `tokens` and compute (`flops`, `device_hours` or `cost`), got {names}."
        )
    if len(given) != 2:
        hours = {"device": arguments.device, "mfu": arguments.mfu, "dtype": dtype}
        extra = hours if "device_hours" in given else {}
        return compute_optimal(**given, **extra, unique_tokens=unique, law=law)
    if "device_hours" in given:
        hours_given = given.pop("device_hours")
        budget = device_budget(hours_given, device=arguments.device, mfu=arguments.mfu, dtype=dtype)
        given = {**given, "flops": budget.flops}
    return training_run(**given, unique_tokens=unique, law=law)


def _inference(size: PlannedRun, inference_tokens: str) -> InferenceAware:
    return inference_aware_optimum(
        with_loss(size.law, "inference_tokens"),
        parameters=size.parameters,
        tokens=size.tokens,
        inference_tokens=parse_quantity(inference_tokens, "inference_tokens"),
    )


def _check_machine(arguments: argparse.Namespace, *, model_given: bool) -> None:
    for name in ("precision", "context_tokens"):
        if getattr(arguments, name) is not None and arguments.device is None and not model_given:
            raise ValueError(f"`{name}` needs a chip or a model. Pass `device` or `parameters`, or leave `{name}` out.")
    for name in ("mfu", "dtype", "price", "memory_bytes", "tokens_per_step", "gpus"):
        if name == "gpus" and model_given:
            continue  # without a chip the answer is which chips suffice
        if getattr(arguments, name) is not None and arguments.device is None:
            raise ValueError(f"`{name}` needs a chip. Pass `device`, such as h100, or leave `{name}` out.")
