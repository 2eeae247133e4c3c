"""``lightning-mp advise``: what to use on this machine, or a named one, with reasons and ready code."""

import argparse
from dataclasses import asdict
from typing import Any, get_args

from lightning_mp.cli.model_shape import add_shape, config_of, context_of, count_of, memory_of, refuse_other_units
from lightning_mp.ground.core.cli_text import answer_command, print_paragraph
from lightning_mp.planning.advice.precision_rules import Goal
from lightning_mp.planning.advice.recommend import recommend
from lightning_mp.planning.advice.recommendation import Recommendation

_DESCRIPTION = """\
Recommend precision, strategy, activation checkpointing and accumulation, each with its reason, source and confidence,
and print the Trainer. Nothing is run or measured."""

_EXAMPLES = """\
examples:
  lightning-mp advise
  lightning-mp advise --device t4 --params 100M --goal finetune
  lightning-mp advise --device h100 --gpus 64 --config config.json
  lightning-mp advise --device a100 --params 7B --goal adapters --yaml"""


def fill_advise(parser: argparse.ArgumentParser) -> None:
    """Gives the parser of ``advise`` its options."""
    parser.description, parser.epilog = _DESCRIPTION, _EXAMPLES
    parser.add_argument(
        "--device", metavar="NAME", help="cpu, mps or a GPU such as t4; default: the one in this machine"
    )
    parser.add_argument("--gpus", metavar="N", help="number of devices (default 1)")
    parser.add_argument(
        "--memory-bytes", metavar="B", help="memory of one device, such as 40GB; default: its largest variant"
    )
    parser.add_argument("--goal", choices=get_args(Goal), default="pretrain", help="default pretrain")
    parser.add_argument("--params", metavar="N", help="model size in parameters, such as 7B")
    add_shape(parser.add_argument_group("or the shape of a decoder"))
    parser.add_argument("--context", metavar="T", dest="context_tokens", help="sequence length in tokens; default 4096")
    parser.add_argument("--tokens-per-step", metavar="T", help="tokens per optimizer step, over all devices")
    parser.add_argument(
        "--blocks", metavar="GLOB", default="*.layers.*", help="modules to checkpoint (default %(default)s)"
    )
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--python", action="store_true", help="print only the Python code")
    output.add_argument("--yaml", action="store_true", help="print only the configuration for LightningCLI")
    output.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_run, parser=parser)


def _run(arguments: argparse.Namespace) -> int:
    return answer_command(arguments, _answer, _as_json, _print)


def _answer(arguments: argparse.Namespace) -> Recommendation:
    config = config_of(arguments)
    if config is not None and arguments.params is not None:
        raise ValueError("Pass --params, or the shape of a decoder, not both")
    refuse_other_units(arguments.params, "model")
    return recommend(
        arguments.device,
        gpus=count_of(arguments.gpus, "gpus"),
        model=config if config is not None else arguments.params,
        goal=arguments.goal,
        context_tokens=context_of(arguments.context_tokens, config),
        tokens_per_step=arguments.tokens_per_step,
        memory_bytes=memory_of(arguments.memory_bytes),
        blocks=arguments.blocks,
    )


def _as_json(answer: Recommendation) -> dict[str, Any]:
    return {
        "device": answer.device.name,
        "gpus": answer.gpus,
        "goal": answer.goal,
        "fits": answer.fits,
        "choices": [asdict(choice) for choice in answer.choices],
        "python": answer.python(),
        "yaml": answer.yaml(),
    }


def _print(answer: Recommendation, arguments: argparse.Namespace) -> None:
    if arguments.python or arguments.yaml:
        print(answer.python() if arguments.python else answer.yaml(), end="")
        return
    device = answer.device
    generation = f" ({device.generation})" if device.generation != device.name else ""
    print(f"{answer.goal} on {answer.gpus} x {device.name}{generation}\n")
    for choice in answer.choices:
        print(f"  {choice.what}: {choice.value} [{choice.sure}]")
        print_paragraph(choice.reason, indent="    ")
        print_paragraph(f"Source: {choice.source}\n", indent="    ")
    if answer.fits is False:
        print_paragraph("No Trainer is shown, since memory does not suffice. --python prints it all the same.")
    else:
        print(answer.python(), end="")
