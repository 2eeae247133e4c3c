"""What fits on the devices, and what follows: strategy, checkpointing, the largest micro-batch."""

from dataclasses import dataclass
from math import ceil

from lightning_mp.ground.core.precisions import PrecisionName, find_precision
from lightning_mp.ground.core.quantities import format_bytes, format_quantity
from lightning_mp.monitors.step_memory.estimate import reserved_range
from lightning_mp.planning.advice.precision_rules import Goal
from lightning_mp.planning.advice.recommendation import Choice, Component, Sure
from lightning_mp.planning.communication import ParallelLayout
from lightning_mp.planning.layouts import LayoutChoice, choose_layouts, enough_gpus
from lightning_mp.planning.memory.decoder_config import DecoderConfig

_FSDP = "Rajbhandari et al. 2020, arXiv:1910.02054; Zhao et al. 2023, arXiv:2304.11277"
_DDP = "Li et al. 2020, arXiv:2006.15704"
_CHECKPOINTING = "Chen et al. 2016, arXiv:1604.06174; Korthikanti et al. 2022, arXiv:2205.05198"
_CALCULATED = "calculated: decoder_memory"
_ADAM_STATE_BYTES = 8
# 4 bits and the quantized constants of a block: Dettmers et al. 2023, arXiv:2305.14314, section 3
_NF4_BYTES = (4 + 0.127) / 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is to fit where."""

    goal: Goal  # of the run
    gpus: int  # how many devices
    device: str  # its name
    memory_bytes: float | None  # of one; None where it is not limited by a device's own memory
    parameters: float | None  # of the model, if known
    config: DecoderConfig | None  # its shape, if it is a decoder
    context_tokens: int  # length of a sequence
    storage: PrecisionName
    blocks: str  # glob for `ActivationCheckpointing`


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutAdvice:
    """What was decided."""

    choices: tuple[Choice, ...]  # with their reasons
    strategy: str | Component | None = None  # for the Trainer; None leaves it out
    callbacks: tuple[Component, ...] = ()  # checkpointing, if it is needed
    fits: bool | None = None  # False if nothing does; None where it was not calculated or only the allocator decides
    micro_batch_sequences: int | None = None  # the most that fit on one device; None where not calculated


def advise_layout(question: Question) -> LayoutAdvice:
    """Strategy and checkpointing: by formulas for a decoder in training, else by the bytes of weights and states."""
    if question.goal == "gan":
        return _gan(question)
    if question.memory_bytes is None or question.parameters is None:
        if question.gpus == 1:
            return LayoutAdvice(choices=())
        reason = "What the model keeps is not known: every GPU holds all of it. Give parameters or a shape to compare."
        return LayoutAdvice(choices=(Choice("strategy", "ddp", reason, _DDP, "measure it"),), strategy="ddp")
    if question.config is not None and question.goal in ("pretrain", "finetune"):
        return _decoder(question, question.config, question.memory_bytes)
    return _by_states(question, question.parameters, question.memory_bytes)


def _gan(question: Question) -> LayoutAdvice:
    if question.gpus == 1:
        return LayoutAdvice(choices=())
    value = "ddp_find_unused_parameters_true"
    reason = "Each backward reaches the parameters of one of the two networks only, and DDP waits for all without it."
    choice = Choice("strategy", value, reason, "lightning documentation, DDP strategies; torch DDP notes", "certain")
    return LayoutAdvice(choices=(choice,), strategy=value)


def _decoder(question: Question, config: DecoderConfig, memory_bytes: float) -> LayoutAdvice:
    """The layout of data parallelism that sends and computes least of those that fit, or else keeps least."""
    layouts = choose_layouts(
        config,
        question.gpus,
        memory_bytes=memory_bytes,
        context_tokens=question.context_tokens,
        precision=question.storage,
    )
    layouts = [choice for choice in layouts if choice.layout.tensor == choice.layout.stages == 1]
    layouts.sort(key=lambda choice: (choice.layout.checkpointed, choice.layout.shards))
    chosen = next((choice for choice in layouts if choice.verdict == "fits"), layouts[-1])
    layout, most = chosen.layout, chosen.largest_micro_batch
    choices = [_fit_choice(question, config, chosen, memory_bytes)]
    strategy = _strategy(layout)
    if question.gpus > 1:
        choices.append(_strategy_choice(layout, strategy))
    callbacks: tuple[Component, ...] = ()
    if layout.checkpointed:
        callbacks = (Component("ActivationCheckpointing", (("modules", question.blocks),)),)
        reason = (
            "Without it, not even one sequence is sure to fit. Every block runs again in backward, a third more FLOPs."
            f" Replace {question.blocks!r} by the class or glob of your blocks."
        )
        choices.append(
            Choice("checkpointing", f"ActivationCheckpointing({question.blocks!r})", reason, _CHECKPOINTING, "certain")
        )
    if most:
        reason = "The most that fit with the allocator at its worst; a larger one may fit."
        if not isinstance(strategy, Component):
            reason += " MicroBatchOnOOM() halves one that does not."
        value = f"up to {most} sequence{'s' if most > 1 else ''} of {question.context_tokens:,} tokens per GPU"
        choices.append(Choice("micro-batch", value, reason, _CALCULATED, "likely"))
    return LayoutAdvice(
        choices=tuple(choices),
        strategy=strategy,
        callbacks=callbacks,
        fits={"fits": True, "does not fit": False}.get(chosen.verdict or ""),
        micro_batch_sequences=most or None,
    )


def _fit_choice(question: Question, config: DecoderConfig, chosen: LayoutChoice, memory_bytes: float) -> Choice:
    assert chosen.verdict is not None
    low, high = chosen.memory.reserved_bytes
    reason = (
        f"{chosen.layout.name}, one sequence of {question.context_tokens:,} tokens and Adam: {format_bytes(low)} to"
        f" {format_bytes(high)} of {format_bytes(memory_bytes)} ({question.device}, {memory_bytes / 1e9:.3g} GB). The"
        " range is the allocator's, which was not measured."
    )
    if chosen.verdict == "fits":
        return Choice("memory", "fits", reason, _CALCULATED, "likely")
    enough = enough_gpus(
        config,
        1,
        memory_bytes=memory_bytes,
        context_tokens=question.context_tokens,
        precision=question.storage,
        split_layers=False,
    )
    if enough is not None and enough[0] > question.gpus:
        reason += f" {enough[0]} GPUs suffice, sharded and checkpointed."
    reason += _with_less(question)
    sure: Sure = "measure it" if chosen.verdict == "may fit" else "certain"
    return Choice("memory", chosen.verdict, reason, _CALCULATED, sure)


def _with_less(question: Question) -> str:
    """What trains the same model with fewer bytes."""
    text = ""
    if question.goal in ("pretrain", "finetune") and question.storage in ("bf16-mixed", "bf16-true", "fp8-mixed"):
        text = " MasterWeightsPrecision('bf16-true', storage='24bit') with AdamW8bit keeps 7 bytes per parameter."
    if question.goal == "finetune":
        text += " Adapters on a frozen 16-bit base keep least: goal 'adapters'."
    return text


def _strategy(layout: ParallelLayout) -> str | Component | None:
    if layout.gpus == 1:
        return None
    if layout.shards == 1:
        return "ddp"
    arguments: tuple[tuple[str, str | int | bool | Component], ...] = (("shard", "auto"),)
    if layout.copies > 1:
        arguments += (("replicate_size", layout.copies),)
    return Component("FSDP2Strategy", arguments)


def _strategy_choice(layout: ParallelLayout, strategy: str | Component | None) -> Choice:
    if isinstance(strategy, Component):
        reason = (
            "It is not certain that the whole model fits on every GPU, so weights, gradients and states are sharded."
        )
        if layout.copies > 1:
            reason += " Inside of a node only: between nodes gradients alone are sent."
        return Choice("strategy", strategy.python(), reason, _FSDP, "likely")
    reason = "All of the model fits on every GPU, and DDP sends gradients only, no weights."
    return Choice("strategy", "ddp", reason, f"{_DDP}; {_FSDP}", "likely")


def _on_top(question: Question) -> str:
    """What weights and states leave out."""
    if question.goal != "inference":
        return " Activations come on top: estimate_memory(module, batch) measures them."
    config = question.config
    if config is None:
        return " The cache of keys and values comes on top; give the shape of the decoder to count it."
    latent = config.latent_attention
    per_layer = latent.kv_lora_rank + latent.qk_rope_head_dim if latent else 2 * config.kv_heads * config.head_width
    elements = config.layers * per_layer * question.context_tokens
    cache = format_bytes(elements * find_precision(question.storage).activation_bytes)
    return f" The cache of keys and values comes on top: {cache} per sequence of {question.context_tokens:,} tokens."


def _by_states(question: Question, parameters: float, memory_bytes: float) -> LayoutAdvice:
    """Without formulas for activations: only what weights and states keep can be said."""
    row = find_precision(question.storage)
    if question.goal in ("inference", "adapters"):
        per_parameter = row.activation_bytes  # a frozen base in 16 bit, or weights alone
    else:
        per_parameter = row.bytes_per_parameter(_ADAM_STATE_BYTES)
    states = per_parameter * parameters
    whole = reserved_range(states)[1] <= memory_bytes
    least, most = reserved_range(states if whole else states / question.gpus)
    fitting, roomy = least <= memory_bytes, most <= memory_bytes
    kept = f"{format_quantity(parameters)} parameters keep {format_bytes(states)} ({per_parameter} bytes each)"
    choices: list[Choice] = []
    strategy: str | Component | None = None
    if question.gpus > 1:
        strategy = "ddp" if whole else Component("FSDP2Strategy", (("shard", "auto"),))
        value = "ddp" if isinstance(strategy, str) else strategy.python()
        too_much = "more than one GPU has" if states > memory_bytes else "one GPU may not have that much to spare"
        reason = f"{kept}: {'one GPU holds all of it' if whole else f'{too_much}, so they are sharded'}."
        sure: Sure = "certain" if states > memory_bytes else "likely"
        choices.append(Choice("strategy", value, reason, _DDP if whole else _FSDP, sure))
    share = (
        "" if whole or question.gpus == 1 else f", {format_bytes(states / question.gpus)} on each of {question.gpus}"
    )
    reason = f"{kept}{share}; one {question.device} has {format_bytes(memory_bytes)} ({memory_bytes / 1e9:.3g} GB)."
    if roomy:
        verdict = "weights and states fit"
        reason += _on_top(question)
    elif fitting:
        verdict = "little room beside weights and states"
        reason += f"{_on_top(question)} Use more GPUs, or a smaller model."
    else:
        verdict = "does not fit"
        reason += f" {ceil(states / memory_bytes)} GPUs would hold them, without activations.{_with_less(question)}"
    if question.goal == "adapters" and not roomy:
        quantized = format_bytes(_NF4_BYTES * parameters)
        reason += f" QLoRA keeps the base in 4 bit, {quantized}: BitsandbytesPrecision('nf4') of Lightning, CUDA only."
    sure = "measure it" if fitting else "certain"
    choices.insert(0, Choice("memory", verdict, reason, "calculated: bytes per parameter", sure))
    return LayoutAdvice(choices=tuple(choices), strategy=strategy, fits=None if fitting else False)
