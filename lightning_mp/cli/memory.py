"""``lightning-mp memory``: what a training step keeps in memory, measured on one's own module or from a shape."""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from lightning_mp.cli.model_shape import add_shape, config_of, context_of, count_of
from lightning_mp.ground.core.cli_text import answer_command, print_paragraph, print_table
from lightning_mp.ground.core.imported_function import import_function
from lightning_mp.ground.core.pictures import check_picture
from lightning_mp.ground.core.precisions import PRECISIONS, PrecisionName
from lightning_mp.ground.core.quantities import format_bytes, format_quantity
from lightning_mp.monitors.step_memory.estimate import MemoryEstimate, MemoryStrategy, estimate_memory
from lightning_mp.planning.communication import ParallelLayout
from lightning_mp.planning.memory.decoder_config import DecoderConfig
from lightning_mp.planning.memory.decoder_memory import DecoderMemory, decoder_memory

_DESCRIPTION = """\
Show what one training step keeps in memory, by part. With --module, a step of your own module is traced on fake
tensors, which needs no GPU and allocates no memory. With a model shape or a config.json, formulas estimate it for one
GPU."""

_EXAMPLES = """\
examples:
  lightning-mp memory --module my_project.model:example --precision bf16-mixed
  lightning-mp memory --module my_project.model:example --plot memory.png
  lightning-mp memory --module my_project.model:example \\
    --strategy fsdp2 --ranks 8
  lightning-mp memory --config config.json --sequences 4 --context 4096

  example() returns (module, batch) or (module, batch, step), where step(module, batch) gives the loss."""


_SHARDS = 8


def fill_memory(parser: argparse.ArgumentParser) -> None:
    """Gives the parser of ``memory`` its options."""
    parser.description, parser.epilog = _DESCRIPTION, _EXAMPLES
    module = parser.add_argument_group("your own module")
    module.add_argument(
        "--module", metavar="PACKAGE:FUNCTION", help="function that returns the module and one micro-batch"
    )
    module.add_argument(
        "--optimizer", metavar="NAME", help="class in torch.optim; default: configure_optimizers, or AdamW"
    )
    module.add_argument("--strategy", choices=get_args(MemoryStrategy), help="default single")
    module.add_argument("--ranks", metavar="N", help="data-parallel ranks (default 1)")
    module.add_argument("--accumulate", metavar="N", help="micro-batches per optimizer step (default 1)")
    module.add_argument("--device-type", choices=("cuda", "cpu"), help="default cuda")
    module.add_argument("--plot", type=Path, metavar="FILE", help="plot the parts over the step: png, pdf or svg")
    add_shape(parser.add_argument_group("or the shape of a decoder"))
    step = parser.add_argument_group("step of a decoder")
    step.add_argument("--sequences", metavar="S", help="sequences per micro-batch (default 1)")
    step.add_argument("--context", metavar="T", dest="context_tokens", help="sequence length; default 4096")
    parser.add_argument("--precision", choices=list(PRECISIONS), default="bf16-mixed", help="default bf16-mixed")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_run, parser=parser)


def _run(arguments: argparse.Namespace) -> int:
    return answer_command(arguments, _answer, _as_json, _print)


def _answer(arguments: argparse.Namespace) -> MemoryEstimate | DecoderMemory:
    config = config_of(arguments)
    if (config is None) == (arguments.module is None):
        raise ValueError("Pass one of --module, --config and the shape of a decoder (`layers`, `width`, `vocabulary`)")
    if config is not None:
        names = ("optimizer", "strategy", "ranks", "accumulate", "device_type", "plot")
        extra = [name for name in names if getattr(arguments, name) is not None]
        if extra:
            option = "--" + extra[0].replace("_", "-")
            raise ValueError(f"{option} belongs to --module. Leave it out; for layouts see lightning-mp plan")
        return decoder_memory(
            config,
            sequences=count_of(arguments.sequences, "sequences"),
            context_tokens=context_of(arguments.context_tokens, config),
            precision=arguments.precision,
        )
    for name in ("sequences", "context_tokens"):
        if getattr(arguments, name) is not None:
            raise ValueError(f"`{name}` belongs to the shape of a decoder. Leave it out; --module gives the batch")
    if arguments.plot is not None:
        check_picture(arguments.plot, "--plot")
    module, batch, step = _made_by(arguments.module)
    estimate = estimate_memory(
        module,
        batch,
        step,
        precision=arguments.precision,
        optimizer=arguments.optimizer,
        strategy=arguments.strategy or "single",
        ranks=count_of(arguments.ranks, "ranks"),
        accumulate_grad_batches=count_of(arguments.accumulate, "accumulate"),
        device_type=arguments.device_type or "cuda",
    )
    if arguments.plot is not None:
        estimate.plot(arguments.plot)
    return estimate


def _made_by(path: str) -> tuple[Any, Any, Any]:
    made = import_function(path, "--module")()
    if not isinstance(made, tuple) or len(made) not in (2, 3):
        raise ValueError(f"--module {path} must return (module, batch) or (module, batch, step), got {type(made)}")
    return (*made, None) if len(made) == 2 else made


def _as_json(answer: MemoryEstimate | DecoderMemory) -> dict[str, Any]:
    if isinstance(answer, DecoderMemory):
        return {
            "bytes_by_part": dict(answer.bytes_by_part),
            "total_bytes": answer.total_bytes,
            "reserved_bytes": answer.reserved_bytes,
        }
    return {
        "precision": answer.precision,
        "strategy": answer.strategy,
        "ranks": answer.ranks,
        "peak_bytes": answer.peak_bytes,
        "peak_phase": answer.peak.phase,
        "bytes_by_part": dict(answer.peak.bytes_by_part),
        "end_of_forward": dict(answer.end_of_forward.bytes_by_part),
        "reserved_bytes": answer.reserved_bytes,
    }


def _print(answer: MemoryEstimate | DecoderMemory, arguments: argparse.Namespace) -> None:
    if isinstance(answer, MemoryEstimate):
        print(answer)
        if answer.device_type != "cpu":
            _print_remedies_of_module(answer)
        if arguments.plot is not None:
            print(f"\nSaved the plot to {arguments.plot}.")
        return
    config = config_of(arguments)
    assert config is not None
    print_paragraph(
        f"A decoder of {format_quantity(config.parameters)} parameters, {arguments.precision} with Adam, on one GPU"
        " at the peak of a step; by formulas:\n"
    )
    rows = [(part, format_bytes(size)) for part, size in answer.bytes_by_part.items()]
    print_table(("part", "bytes"), [*rows, ("sum", format_bytes(answer.total_bytes))])
    print_paragraph(f"\nA GPU needs {_needs(answer)}: its allocator was not measured.")
    _print_remedies(config, arguments)


def _print_remedies(config: DecoderConfig, arguments: argparse.Namespace) -> None:
    """What the same step takes with less, and where to look for more."""
    step: dict[str, Any] = {
        "sequences": count_of(arguments.sequences, "sequences"),
        "context_tokens": context_of(arguments.context_tokens, config),
    }
    shards = ParallelLayout(shards=_SHARDS)
    changes: list[tuple[str, ParallelLayout, PrecisionName]] = [
        ("ActivationCheckpointing", ParallelLayout(checkpointed=True), arguments.precision),
        (f"FSDP2Strategy on {_SHARDS} GPUs", shards, arguments.precision),
        ("both", replace(shards, checkpointed=True), arguments.precision),
    ]
    if arguments.precision in ("bf16-mixed", "bf16-true"):
        remainder = "MasterWeightsPrecision, storage remainder"
        changes.insert(1, (remainder, ParallelLayout(), "bf16-true+remainder"))
    rows = [(name, _needs(decoder_memory(config, to, precision=dtype, **step))) for name, to, dtype in changes]
    print("\nIf it does not fit:\n")
    print_table(("change", "GPU needs"), rows)
    print_paragraph("\nFor every layout, and the GPUs that suffice, run lightning-mp plan with the same shape.")


def _print_remedies_of_module(estimate: MemoryEstimate) -> None:
    parts = dict(estimate.peak.bytes_by_part)
    states = sum(parts.get(part, 0) for part in ("weights", "gradients", "masters", "optimizer states"))
    if 2 * states > estimate.peak_bytes - parts.get("workspaces", 0):
        advice = "most of it is weights, gradients and optimizer states: shard them with FSDP2Strategy()"
        advice += " (--strategy fsdp2 --ranks 8 shows the effect). ActivationCheckpointing(...) reduces the rest"
    else:
        advice = "most of it is kept for backward: use a smaller micro-batch with accumulation, or"
        advice += " ActivationCheckpointing(...) on the repeated blocks"
    print_paragraph(f"If it does not fit: {advice}.")


def _needs(answer: DecoderMemory) -> str:
    low, high = answer.reserved_bytes
    return f"{low / 1e9:.3g} to {high / 1e9:.3g} GB"
