"""Recommends precision and strategy for a device, a model and a goal, with reasons and a Trainer."""

from typing import get_args

from lightning_mp.ground.core.arguments import whole_number
from lightning_mp.ground.core.quantities import Quantity, format_quantity, parse_quantity
from lightning_mp.ground.flops.device_traits import DeviceTraits, find_device, named_device
from lightning_mp.planning.advice.layout_rules import LayoutAdvice, Question, advise_layout
from lightning_mp.planning.advice.precision_rules import Goal, PrecisionAdvice, advise_precision
from lightning_mp.planning.advice.recommendation import Choice, Component, Recommendation
from lightning_mp.planning.layouts import GPUS_PER_NODE
from lightning_mp.planning.memory.decoder_config import DecoderConfig
from lightning_mp.planning.memory.decoder_memory import check_memory_bytes


def recommend(
    device: str | DeviceTraits | None = None,
    *,
    gpus: int = 1,
    model: DecoderConfig | Quantity | None = None,
    goal: Goal = "pretrain",
    context_tokens: int = 4096,
    tokens_per_step: Quantity | None = None,
    memory_bytes: float | None = None,
    blocks: str = "*.layers.*",
) -> Recommendation:
    """Recommends precision, strategy, checkpointing and accumulation, each with reason, source and confidence.

    Nothing is run or measured. Speeds given as reasons are published figures, with their source.

    Args:
        device: "cpu", "mps", a known chip such as "T4" or "h100", or the :class:`DeviceTraits` of another device; None
            detects that of this machine.
        gpus: number of devices.
        model: its number of parameters, such as "7B", or the shape of a decoder; None if unknown: memory and fp8 are
            then not considered.
        goal: "pretrain", "finetune" (all weights), "adapters" (a frozen base), "gan" or "inference".
        context_tokens: length of a sequence.
        tokens_per_step: the batch of one optimizer step over all devices, for accumulation; None leaves it out.
        memory_bytes: memory of one device; None uses the largest variant of its chip.
        blocks: glob over names of the modules to checkpoint, if checkpointing is needed.

    Raises:
        ValueError: the device or the goal is unknown, a number is out of range, or two arguments do not go together.

    Example:
        >>> answer = recommend("T4", goal="finetune", model="100M")
        >>> answer.choice("precision").value, answer.choice("loss scale").sure
        ('16-mixed', 'certain')
        >>> print(recommend("h100", gpus=8, model="7B").choice("strategy").value)
        FSDP2Strategy(shard="auto")
        >>> print(recommend("A100").python())
        import lightning.pytorch as pl
        <BLANKLINE>
        from lightning_mp import AutocastPrecision
        <BLANKLINE>
        # precision: bf16-mixed (certain)
        # policy: none (likely)
        trainer = pl.Trainer(
            accelerator="cuda",
            devices=1,
            plugins=[
                AutocastPrecision(precision="bf16-mixed"),
            ],
        )
        <BLANKLINE>
    """
    traits = find_device() if device is None else named_device(device) if isinstance(device, str) else device
    _check(traits, gpus, goal, context_tokens, tokens_per_step, memory_bytes)
    config = model if isinstance(model, DecoderConfig) else None
    parameters = float(config.parameters) if config is not None else None
    if model is not None and not isinstance(model, DecoderConfig):
        parameters = parse_quantity(model, "model")
    precision = advise_precision(traits, goal, parameters, config)
    layout = advise_layout(
        Question(
            goal=goal,
            gpus=gpus,
            device=traits.name,
            memory_bytes=memory_bytes if memory_bytes is not None else traits.memory_bytes,
            parameters=parameters,
            config=config,
            context_tokens=context_tokens,
            storage=precision.storage,
            blocks=blocks,
        )
    )
    batch = None if tokens_per_step is None else parse_quantity(tokens_per_step, "tokens_per_step")
    accumulated, scheduler = _accumulation(batch, gpus, goal, context_tokens, layout.micro_batch_sequences)
    return Recommendation(
        device=traits,
        gpus=gpus,
        goal=goal,
        choices=(*precision.choices, *layout.choices, *accumulated),
        trainer=_trainer(traits, gpus, precision, layout),
        plugins=() if precision.plugin is None else (precision.plugin,),
        callbacks=(*precision.callbacks, *layout.callbacks, *scheduler),
        fits=layout.fits,
    )


def _check(
    traits: DeviceTraits, gpus: int, goal: str, context_tokens: int, tokens_per_step: object, memory_bytes: float | None
) -> None:
    if goal not in get_args(Goal):
        raise ValueError(f"`goal` must be one of {', '.join(get_args(Goal))}, got {goal!r}.")
    whole_number(gpus, "gpus")
    whole_number(context_tokens, "context_tokens")
    if memory_bytes is not None:
        check_memory_bytes(memory_bytes)
    if gpus > 1 and traits.accelerator != "cuda":
        raise ValueError(f"`gpus` is for CUDA devices, got {gpus} of {traits.name}. Leave it out.")
    if tokens_per_step is not None and goal in ("inference", "gan"):
        why = (
            "inference has no optimizer step"
            if goal == "inference"
            else "a GAN steps its two optimizers by hand, and accumulates by hand"
        )
        raise ValueError(f"`tokens_per_step` cannot be used with goal {goal!r}: {why}. Leave it out.")


def _accumulation(
    batch_tokens: float | None, gpus: int, goal: Goal, context_tokens: int, most: int | None
) -> tuple[list[Choice], tuple[Component, ...]]:
    if batch_tokens is None:
        return [], ()
    at_once = gpus * context_tokens
    if batch_tokens < at_once:
        raise ValueError(
            f"`tokens_per_step` of {format_quantity(batch_tokens)} is less than one sequence on every GPU"
            f" ({gpus} x {context_tokens} = {at_once}). Raise it, or use fewer GPUs or a shorter `context_tokens`."
        )
    reason = "Counts the tokens of the first micro-batch and takes the nearest whole number of micro-batches."
    if most is not None:
        sequences = round(batch_tokens / at_once)
        micro_batches = -(-sequences // most)
        each = -(-sequences // micro_batches)
        reason += (
            f" With {each} sequence{'s' if each > 1 else ''} per GPU at once these are {micro_batches}; give the loader"
            " that batch size."
        )
    value = f"target_tokens={int(batch_tokens)}"
    scheduler = Component("AccumulationScheduler", (("target_tokens", int(batch_tokens)),))
    return [Choice("accumulation", value, reason, "documentation of AccumulationScheduler", "certain")], (scheduler,)


def _trainer(
    traits: DeviceTraits, gpus: int, precision: PrecisionAdvice, layout: LayoutAdvice
) -> tuple[tuple[str, str | int | bool | Component], ...]:
    nodes = gpus // GPUS_PER_NODE if gpus > GPUS_PER_NODE and gpus % GPUS_PER_NODE == 0 else 1
    arguments: list[tuple[str, str | int | bool | Component]] = [
        ("accelerator", traits.accelerator),
        ("devices", gpus // nodes),
    ]
    if nodes > 1:
        arguments.append(("num_nodes", nodes))
    if precision.trainer_precision is not None:
        arguments.append(("precision", precision.trainer_precision))
    if layout.strategy is not None:
        arguments.append(("strategy", layout.strategy))
    return tuple(arguments)
