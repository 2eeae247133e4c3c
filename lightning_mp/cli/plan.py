"""``lightning-mp plan``: the compute-optimal model for a budget."""

import argparse
from typing import Any

from lightning_mp.cli.text import print_json, print_table, print_warnings, run_with_one_line_errors
from lightning_mp.core.quantities import format_quantity
from lightning_mp.planning.scaling_laws.optimum import ComputeOptimal, compute_optimal
from lightning_mp.planning.scaling_laws.presets import DEFAULT_LAW, LAWS

_DESCRIPTION = """\
The best model size and number of tokens for exactly one of --flops, --params, --tokens and --device-hours (C = 6 N D),
under a named scaling law, with what the other published laws say. Numbers may be written 1.3B, 1e21 or 300_000_000."""

_OPTIONS = {
    "flops": "--flops",
    "parameters": "--params",
    "tokens": "--tokens",
    "device_hours": "--device-hours",
    "device": "--device",
    "mfu": "--mfu",
    "dtype": "--dtype",
    "unique_tokens": "--unique-tokens",
    "law": "--law",
}


def add_plan_command(commands: "argparse._SubParsersAction[Any]") -> None:
    """Adds ``plan`` to the command line."""
    parser = commands.add_parser("plan", help="size a model and its run for a budget", description=_DESCRIPTION)
    target = parser.add_argument_group("budget (one of them)")
    target.add_argument("--flops", metavar="C", help="training compute")
    target.add_argument("--params", metavar="N", dest="parameters", help="model size: what it takes to train it well")
    target.add_argument("--tokens", metavar="D", help="training tokens: the model that goes with them")
    target.add_argument("--device-hours", metavar="H", help="hours times devices, with --device and --mfu")
    machine = parser.add_argument_group("with --device-hours")
    machine.add_argument("--device", metavar="CHIP", help="h100, a100, 'RTX 4090', ...")
    machine.add_argument("--mfu", metavar="F", help="model FLOPs utilisation, over 0 and at most 1")
    machine.add_argument("--dtype", metavar="T", help="format of the matmuls: bf16 (default), fp16, fp8, tf32 or fp32")
    parser.add_argument("--law", choices=list(LAWS), default=DEFAULT_LAW, help=f"default {DEFAULT_LAW}")
    parser.add_argument(
        "--unique-tokens", metavar="U", help="all the tokens there are; beyond them, tokens are repeated"
    )
    parser.add_argument("--json", action="store_true", help="for machines")
    parser.set_defaults(run=_run, parser=parser)


def _run(arguments: argparse.Namespace) -> int:
    given = {name: getattr(arguments, name) for name in _OPTIONS}
    plan, said = run_with_one_line_errors(arguments.parser, _OPTIONS, lambda: compute_optimal(**given))
    if arguments.json:
        print_json({**_as_json(plan), "spread": [_as_json(row) for row in plan.spread], "warnings": said})
    else:
        _print_plan(plan)
        print_warnings(said)
    return 0


def _as_json(plan: ComputeOptimal) -> dict[str, Any]:
    content: dict[str, Any] = {
        "law": plan.law.name,
        "source": plan.law.source,
        "parameters": plan.parameters,
        "parameters_counted": plan.law.counts,
        "tokens": plan.tokens,
        "tokens_per_parameter": plan.tokens_per_parameter,
        "flops": plan.flops,
        "loss_nats_per_token": plan.loss,
        "times_outside_range": plan.times_outside,
    }
    if plan.unique_tokens is not None:
        content |= {"unique_tokens": plan.unique_tokens, "epochs": plan.epochs}
    if plan.devices is not None:
        content |= {
            "device_hours": plan.devices.device_hours,
            "device": plan.devices.device,
            "dtype": plan.devices.dtype,
            "peak_flops_per_second": plan.devices.peak_flops_per_second,
            "mfu": plan.devices.mfu,
        }
    return content


def _print_plan(plan: ComputeOptimal) -> None:
    law = plan.law
    print(f"Compute-optimal under {law.name}: {law.source}\n")
    lines = [
        ("parameters N", f"{format_quantity(plan.parameters)} ({law.counts})"),
        ("tokens D", format_quantity(plan.tokens)),
        ("tokens per parameter", f"{plan.tokens_per_parameter:.3g}"),
        ("FLOPs 6 N D", f"{plan.flops:.3g}".replace("e+", "e")),
        ("predicted loss", "this law has none" if plan.loss is None else f"{plan.loss:.3f} nats per token"),
        ("range of the law", _range(plan)),
    ]
    if plan.devices is not None:
        devices = plan.devices
        peak = f"{devices.peak_flops_per_second / 1e12:g} TFLOP/s dense {devices.dtype}"
        lines.insert(0, ("machine", f"{devices.device_hours:g} hours of {devices.device}, {peak}, MFU {devices.mfu:g}"))
    if plan.unique_tokens is not None:
        lines.insert(-3, ("epochs", f"{plan.epochs:.3g} over {format_quantity(plan.unique_tokens)} unique tokens"))
    for name, text in lines:
        print(f"  {name:<20}  {text}")
    print("\nThe same question to every published law; they do not agree:\n")
    print_table(
        ("law", "parameters", "tokens", "tokens/parameter", "FLOPs", "loss", "times outside"),
        [_row(row) for row in plan.spread],
    )


def _range(plan: ComputeOptimal) -> str:
    (small, large), (short, long) = plan.law.trained.parameters, plan.law.trained.tokens
    models = (
        f"{format_quantity(small)} to {format_quantity(large)} parameters, "
        f"{format_quantity(short)} to {format_quantity(long)} tokens"
    )
    times = plan.times_outside
    return f"inside ({models})" if times == 1 else f"{format_quantity(float(f'{times:.2g}'))} times outside ({models})"


def _row(plan: ComputeOptimal) -> tuple[str, ...]:
    return (
        plan.law.name,
        format_quantity(plan.parameters),
        format_quantity(plan.tokens),
        f"{plan.tokens_per_parameter:.3g}",
        f"{plan.flops:.3g}".replace("e+", "e"),
        "-" if plan.loss is None else f"{plan.loss:.3f}",
        "-" if plan.times_outside == 1 else format_quantity(float(f"{plan.times_outside:.2g}")),
    )
