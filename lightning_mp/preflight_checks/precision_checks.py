"""Checks of what a run computes in: device, loss scale, format of the weights, sizes of the products."""

from collections.abc import Iterator

from lightning_mp.core.messages import listed
from lightning_mp.preflight_checks.found import Found
from lightning_mp.preflight_checks.report import PreflightFinding

# NVIDIA, Matrix Multiplication Background User's Guide, table 1: tensor cores need multiples of 16 bytes; on A100 and
# later they are most efficient with multiples of 128 bytes. torch._scaled_mm needs multiples of 16 in fp8.
_MULTIPLE_OF = {"fp16": 8, "bf16": 8, "fp8": 16}
_BEST_MULTIPLE = 64
# Sizes below the first come from the data as a rule (channels of an image, classes); padding up to the second multiple
# pays where the product is large.
_SMALLEST_SIZE, _SMALLEST_LARGE_SIZE = 64, 1024


def check_device(found: Found) -> Iterator[PreflightFinding]:
    """Whether the device multiplies in the format that was requested."""
    device, precision = found.device, found.precision
    what = f"{precision.plugin} needs {precision.base}, and {device.name}"
    if device.accelerator == "mps":
        if precision.base in ("fp64", "fp8"):
            yield PreflightFinding(
                "error", "device", f"{what} has no such numbers.", "Use Trainer(precision='32-true') or '16-mixed'."
            )
        return
    if device.accelerator != "cuda" or precision.base in device.formats:
        return
    if precision.base == "fp8" and not precision.emulates_fp8:
        cure = "AutocastPrecision('bf16-mixed')" if "bf16" in device.formats else "AutocastPrecision('16-mixed')"
        yield PreflightFinding("error", "device", f"{what} ({device.generation}) has no fp8 units.", f"Use {cure}.")
    elif precision.base == "bf16":
        yield PreflightFinding(
            "warning",
            "device",
            f"{what} ({device.generation}) has no bf16 units: bf16 is emulated there and slow.",
            "Use AutocastPrecision('16-mixed')."
            if "fp16" in device.formats
            else "Use Trainer(precision='32-true'), which is faster on this device.",
        )
    elif precision.base == "fp16":
        yield PreflightFinding(
            "warning",
            "device",
            f"{what} ({device.generation}) has no fp16 units: nothing gets faster.",
            "Use Trainer(precision='32-true').",
        )


def check_scaler(found: Found) -> Iterator[PreflightFinding]:
    """Whether a loss scale is missing, or there is one too many."""
    precision = found.precision
    if precision.base == "fp16" and not precision.has_scaler and not precision.own_scalers:
        weights = precision.name.endswith("-true")
        yield PreflightFinding(
            "error",
            "scaler_missing",
            f"{precision.plugin} computes gradients in fp16 without a loss scale: those below 6e-8 become 0, and"
            " training stalls without an error.",
            "Use MasterWeightsPrecision('16-true'), which scales and keeps fp32 masters."
            if weights
            else "Use AutocastPrecision('16-mixed'), or give the plugin a scaler that is enabled.",
        )
    if precision.own_scalers and precision.has_scaler:
        yield PreflightFinding(
            "error",
            "scaler_superfluous",
            f"{precision.plugin} scales the loss, and so does a GradScaler in the module"
            f" ({listed(precision.own_scalers)}): losses are scaled twice and gradients unscaled once.",
            "Remove the module's GradScaler and its calls; give the plugin its settings: scaler=LossScaler(...).",
        )
    elif precision.base == "bf16" and (precision.own_scalers or precision.has_scaler):
        owner = f"the module's {listed(precision.own_scalers)}" if precision.own_scalers else precision.plugin
        yield PreflightFinding(
            "warning",
            "scaler_superfluous",
            f"{owner} scales the loss of a bf16 run: bf16 has the range of fp32, so a scale prevents nothing, and steps"
            " may be skipped that need not be.",
            "Remove the scaler.",
        )


def check_precisions(found: Found) -> Iterator[PreflightFinding]:
    """Whether precision is set in two places; ``precision=`` beside a plugin is refused by the Trainer itself."""
    precision = found.precision
    if precision.of_strategy:
        yield PreflightFinding(
            "warning",
            "two_precisions",
            f"Precision is set twice, by {precision.plugin} and by {precision.of_strategy}, which wins where they"
            " differ.",
            "Leave the strategy's setting out; the plugin tells the strategy what it needs.",
        )


def check_weights_in_16_bit(found: Found) -> Iterator[PreflightFinding]:
    """Whether an optimizer would step 16-bit weights without fp32 masters."""
    precision = found.precision
    if precision.has_masters:
        return
    if precision.name in ("16-true", "bf16-true"):
        yield PreflightFinding(
            "warning",
            "weights_in_16_bit",
            f"{precision.plugin} casts the weights to {precision.base}, and the optimizer steps them there: updates"
            " smaller than about 1/256 (bf16) or 1/2048 (fp16) of a weight are lost.",
            f"Use MasterWeightsPrecision({precision.name!r}), which keeps fp32 masters.",
        )
        return
    for dtype in ("float16", "bfloat16"):
        weights = [weight for weight in found.weights if weight.is_trainable and weight.dtype == dtype]
        if weights:
            trainable = sum(weight.is_trainable for weight in found.weights)
            yield PreflightFinding(
                "error" if dtype == "float16" else "warning",
                "weights_in_16_bit",
                f"{len(weights)} of {trainable} trainable parameters are {dtype}"
                f" ({listed([weight.names[0] for weight in weights], 3)}), and {precision.plugin} keeps no fp32 masters"
                " of them: small updates are lost"
                + (", and Adam's epsilon and small second moments are 0." if dtype == "float16" else "."),
                "Load the model in fp32 (dtype=torch.float32, or module.float()), or use"
                f" MasterWeightsPrecision('{'16' if dtype == 'float16' else 'bf16'}-true').",
            )


def check_tensor_cores(found: Found) -> Iterator[PreflightFinding]:
    """Whether dimensions of matrix products are multiples of what tensor cores take."""
    multiple = _MULTIPLE_OF.get(found.precision.base)
    if multiple is None or found.device.accelerator != "cuda":
        return
    layers_of: dict[tuple[str, int], list[str]] = {}
    for layer in found.layers:
        for dimension, size in layer.sizes:
            layers_of.setdefault((dimension, size), []).append(layer.name)
    for (dimension, size), names in layers_of.items():
        smallest = 0 if dimension == "head_dim" else _SMALLEST_SIZE
        wanted = multiple if size % multiple else _BEST_MULTIPLE
        if size < smallest or not size % wanted or (wanted == _BEST_MULTIPLE and size < _SMALLEST_LARGE_SIZE):
            continue
        best = _BEST_MULTIPLE if size >= _SMALLEST_LARGE_SIZE else wanted
        yield PreflightFinding(
            "advice",
            "tensor_cores",
            f"{dimension} of {listed(names, 3)} is {size}, not a multiple of {wanted}: "
            + (
                "tensor cores are not used, or in part only."
                if wanted == multiple
                else "tensor cores are used, not at their best."
            ),
            f"Make it {-(-size // best) * best}.",
        )
