"""Which precision for which device, model and goal: the rules, each with its reason and source."""

from dataclasses import dataclass
from typing import Literal

from lightning_mp.ground.core.float8_gains import SMALLEST_GAIN
from lightning_mp.ground.core.precisions import PrecisionName
from lightning_mp.ground.core.quantities import format_quantity
from lightning_mp.ground.flops.device_traits import DeviceTraits
from lightning_mp.planning.advice.recommendation import Choice, Component, Sure
from lightning_mp.planning.memory.decoder_config import DecoderConfig

Goal = Literal["pretrain", "finetune", "adapters", "gan", "inference"]
"""What the model is to do; "finetune" trains all weights, "adapters" a few beside a frozen base."""

TINY_PARAMETERS = 1e6
_SMALLEST_FP8_WIDTH = SMALLEST_GAIN["tensorwise"].features
_FLOAT8_MULTIPLE = 16

_PRECISION_PAGE = "docs/precision.md, fp16 or bf16"
_AUTOCAST = "torch.amp documentation, autocast op reference"
_MIXED = "Micikevicius et al. 2018, arXiv:1710.03740, section 3"
_BF16 = "Kalamkar et al. 2019, arXiv:1905.12322"
_FLOAT8 = "torchtitan commit 7a04053 (Llama 3 8B, 8 H100); karpathy/nanochat dev/LOG.md, 2026-02-02"
_VOLTA = "pytorch#172352, pytorch#175253, pytorch#190385"


@dataclass(frozen=True, slots=True)
class PrecisionAdvice:
    """What was decided about precision."""

    choices: tuple[Choice, ...]  # with their reasons
    storage: PrecisionName
    plugin: Component | None = None  # of this package; None leaves it to `trainer_precision`
    trainer_precision: str | None = None  # for `Trainer(precision=...)`; None where there is a plugin
    callbacks: tuple[Component, ...] = ()  # that belong to it


def advise_precision(
    device: DeviceTraits, goal: Goal, parameters: float | None, config: DecoderConfig | None
) -> PrecisionAdvice:
    """The first rule that applies, and what goes with it."""
    if goal == "inference":
        advice = _inference(device)
    elif parameters is not None and parameters < TINY_PARAMETERS:
        reason = (
            f"{format_quantity(parameters)} parameters: below about 1M, and with short sequences, a step is spent on"
            " starting kernels, and casts start more of them: 16 bit does not pay."
        )
        advice = _full(reason, "rule of thumb: time both on your model", "likely")
    elif device.generation in _WITHOUT_16_BIT:
        advice = _full(*_WITHOUT_16_BIT[device.generation])
    elif "bf16" not in device.formats:
        advice = _fp16(device, goal)
    elif goal in ("pretrain", "finetune") and config is not None and why_no_fp8(device, config) is None:
        advice = _fp8(config)
    else:
        advice = _bf16(device, goal, config)
    choices = [*advice.choices, *_about_weights(goal, advice.storage)]
    if advice.plugin is not None:
        choices.append(_policy())
    if device.generation == "Volta":
        choices.append(_volta_wheels())
    return PrecisionAdvice(tuple(choices), advice.storage, advice.plugin, advice.trainer_precision, advice.callbacks)


def why_no_fp8(device: DeviceTraits, config: DecoderConfig | None) -> str | None:
    """Why bf16 is the better start on this device with this model; None if fp8 is worth a try."""
    if "fp8" not in device.formats:
        return f"{device.name} has no fp8 matrix units."
    if device.generation not in ("Hopper", "Blackwell"):
        return "It also multiplies in fp8, but no gain in training is published for it: measure before you take it."
    if config is None:
        return "fp8 pays for large matrix products only: give the shape of the model to have it considered."
    if min(config.width, config.ffn_width) < _SMALLEST_FP8_WIDTH:
        return (
            f"No fp8 at a width of {min(config.width, config.ffn_width)}: below {_SMALLEST_FP8_WIDTH:,} rounding costs"
            " more than products gain, and Float8Precision leaves such layers in bf16. Published for a GPT of width"
            " 1,536: 1.17x tokens/s tensorwise, about 1.05x at equal loss, 0.90x rowwise (karpathy/nanochat"
            " dev/LOG.md, 2026-02-02)."
        )
    sizes = {
        "width": config.width,
        "ffn_width": config.ffn_width,
        "head_width * heads": config.head_width * config.heads,
    }
    odd = [f"{name} {size}" for name, size in sizes.items() if size % _FLOAT8_MULTIPLE]
    return f"No fp8: {', '.join(odd)} is not a multiple of 16, which fp8 products require." if odd else None


_WITHOUT_16_BIT: dict[str, tuple[str, str, Sure]] = {
    "CPU": (
        "Most CPUs convert 16-bit numbers to fp32 and back. Those with AMX or AVX-512 BF16 multiply in bf16: there"
        " compare with AutocastPrecision('bf16-mixed').",
        "torch.amp documentation, CPU autocast",
        "measure it",
    ),
    "MPS": (
        "torch has no fp8 and no float64 on MPS. What 16 bit gains there is not known: this package was not run on MPS."
        " Compare with AutocastPrecision('bf16-mixed').",
        "torch documentation, MPS backend",
        "measure it",
    ),
    "before Volta": (
        "Before Volta there are no tensor cores. 16 bit would save memory of activations and gain no speed.",
        "NVIDIA Volta whitepaper WP-08608-001",
        "certain",
    ),
}


def _full(reason: str, source: str, sure: Sure) -> PrecisionAdvice:
    choice = Choice("precision", "32-true", reason, source, sure)
    return PrecisionAdvice((choice,), "32-true", trainer_precision="32-true")


def _fp16(device: DeviceTraits, goal: Goal) -> PrecisionAdvice:
    reason = (
        f"{device.generation} multiplies fp16 on tensor cores and has no bf16 units. torch.cuda.is_bf16_supported()"
        " counts emulation: ask with including_emulation=False."
    )
    scale = (
        "Gradients below 3.0e-8 are 0 in fp16 and training stalls without an error. Scaling moves them up; an overflow"
        " halves the scale and skips the step, a few times at the start of a run."
    )
    if goal == "gan":
        scale += " One scale serves both optimizers and is updated once per batch."
    monitor = "Logs the scale and skipped steps, ends a run that only skips."
    return PrecisionAdvice(
        (
            Choice("precision", "16-mixed", reason, _PRECISION_PAGE, "certain"),
            Choice("loss scale", "LossScaler()", scale, _MIXED, "certain"),
            Choice("monitor", "OverflowMonitor()", monitor, "docs/logged_names.md", "certain"),
        ),
        "16-mixed",
        plugin=Component("AutocastPrecision", (("precision", "16-mixed"), ("scaler", Component("LossScaler")))),
        callbacks=(Component("OverflowMonitor"),),
    )


def _bf16(device: DeviceTraits, goal: Goal, config: DecoderConfig | None) -> PrecisionAdvice:
    reason = "fp32's range, so no loss scale; weights and gradients stay fp32."
    without_fp8 = why_no_fp8(device, config) if "fp8" in device.formats else None
    if goal not in ("pretrain", "finetune"):
        without_fp8 = None
    reason = " ".join(part for part in (reason, without_fp8) if part)
    choice = Choice("precision", "bf16-mixed", reason, f"{_BF16}; {_PRECISION_PAGE}", "certain")
    return PrecisionAdvice(
        (choice,), "bf16-mixed", plugin=Component("AutocastPrecision", (("precision", "bf16-mixed"),))
    )


def _fp8(config: DecoderConfig) -> PrecisionAdvice:
    reason = (
        f"Linear layers of a width of {config.width} are large enough for fp8, with torchao (pip install"
        " '.[fp8]'); the first, the last and all else stay bf16. Published, compiled, tensorwise: 1.17x"
        " tokens/s at a width of 1,536, about 1.05x at equal loss, and 1.25x for 8B with fp8 all-gather, which FSDP2"
        " does only for layers that you shard yourself; rowwise 0.90x and 1.12x. On an H200 at 2,048: 1.11x and 0.87x."
        " Compare with AutocastPrecision('bf16-mixed') by the time to an equal loss."
    )
    recipe = (
        "One factor per tensor costs less than one per row, and speed is what fp8 is taken for. One large value"
        " coarsens the whole tensor: if the loss falls behind bf16, take 'rowwise', then 'rowwise_with_gw_hp'."
    )
    compiled = (
        "Uncompiled, rounding to fp8 is passes over memory that cost more than the product gains. Compile blocks in"
        " place: block.compile()."
    )
    return PrecisionAdvice(
        (
            Choice("precision", "fp8-mixed", reason, _FLOAT8, "measure it"),
            Choice("fp8 recipe", "tensorwise", recipe, _FLOAT8, "measure it"),
            Choice("compile", "block.compile()", compiled, "torchao, float8 training documentation", "likely"),
        ),
        "fp8-mixed",
        plugin=Component("Float8Precision", (("recipe", "tensorwise"),)),
    )


def _inference(device: DeviceTraits) -> PrecisionAdvice:
    if device.generation in ("CPU", "before Volta"):
        return _full(*_WITHOUT_16_BIT[device.generation])
    value: PrecisionName = "bf16-true" if "bf16" in device.formats else "16-true"
    reason = (
        "Lightning's own precision, which stores weights in 16 bit, not that of MasterWeightsPrecision: without an"
        " optimizer nothing needs fp32 masters."
    )
    if value == "16-true":
        reason += " fp16 ends at 65,504: look for inf in the outputs of models that were trained in bf16."
    sure: Sure = "measure it" if device.accelerator == "mps" else "likely"
    choice = Choice("precision", f"Trainer(precision={value!r})", reason, _PRECISION_PAGE, sure)
    return PrecisionAdvice((choice,), value, trainer_precision=value)


def _about_weights(goal: Goal, storage: str) -> list[Choice]:
    if goal == "adapters":
        low = {"16-mixed": "fp16", "bf16-mixed": "bf16"}.get(storage)
        if low is None:
            reason = "Autocast combines a 16-bit base with fp32 adapters."
            return [Choice("base weights", "frozen, fp32", reason, _AUTOCAST, "certain")]
        reason = (
            f"Load the base in {low} and set requires_grad=False: 2 bytes per parameter, no gradient, no optimizer"
            " state. Adapters in fp32 need no masters and cost little."
        )
        source = "Hu et al. 2021, arXiv:2106.09685; docs/precision.md"
        return [Choice("base weights", f"frozen, {low}; adapters fp32", reason, source, "certain")]
    if goal == "finetune" and storage != "32-true":
        reason = (
            "Checkpoints are often bf16. Trained as they are, an update below half of a weight's last bit is lost;"
            " trainable fp16 weights are refused. Load them as fp32."
        )
        return [Choice("weights", "fp32", reason, _PRECISION_PAGE, "certain")]
    if goal == "gan":
        manual = "Two optimizers need manual optimization: self.manual_backward(loss), and optimizer.step() of each."
        return [Choice("optimization", "manual", manual, "lightning documentation, manual optimization", "certain")]
    return []


def _policy() -> Choice:
    reason = (
        "Autocast on CUDA keeps norms, softmax and losses in fp32 by itself. Give policy=PrecisionPolicy(...) for a"
        " layer that PrecisionAudit() or OverflowPostMortem() names."
    )
    return Choice("policy", "none", reason, _AUTOCAST, "likely")


def _volta_wheels() -> Choice:
    reason = (
        "The default wheels of torch 2.11 and later have no kernels for Volta (sm_70). Take wheels for CUDA 12.6 of"
        " 2.11 to 2.14; 2.15 ends them."
    )
    return Choice("torch", "cu126 wheels, 2.11 to 2.14", reason, _VOLTA, "certain")
