"""Matrix products of linear layers in fp8, the rest in bf16."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_info
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from typing_extensions import override

from lightning_mp.ground.core import private_dispatch_api
from lightning_mp.ground.core.arguments import true_or_false
from lightning_mp.ground.core.float8_gains import SMALLEST_GAIN, UNCOMPILED_FP8
from lightning_mp.ground.core.known_words import refuse_unknown
from lightning_mp.ground.modules.stage_placeholder import full_model
from lightning_mp.training.policy.applied import fsdp_mixed_precision, read_policy
from lightning_mp.training.policy.float8_layers import (
    DIMENSION_MULTIPLE,
    Float8Layer,
    Float8Skip,
    check_skip,
    choose_float8_layers,
    summarise_float8_layers,
)
from lightning_mp.training.policy.policy import PolicyLike
from lightning_mp.training.precision.autocast_context import AutocastRun
from lightning_mp.training.precision.fp8.conversion import (
    RECIPES,
    Float8Conversion,
    Float8Recipe,
    convert_to_float8,
    float8_config,
)
from lightning_mp.training.precision.full_weights import FullWeightsPrecision

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecision as FSDPMixedPrecision
    from torchao.float8 import Float8LinearConfig

_OTHERWISE = "Use AutocastPrecision('bf16-mixed'), or emulate=True to try out the numerics of fp8, slowly."
# Until torch 2.13 the CPU says so of one scale per row.
_ONE_SCALE_ONLY = "only supports per-tensor scaling"
# torch 2.13, aten/src/ATen/native/cuda/ScaledBlas.cpp, `_scaled_mm_allowed_device`: 8.9 (Ada), 9.0 (Hopper) and later.
_FIRST_CUDA_CAPABILITY = (8, 9)
# There as well: MI300, MI350 and Navi 4.
_ROCM_ARCHITECTURES = ("gfx942", "gfx950", "gfx1200", "gfx1201")


def why_no_float8(
    device_type: str,
    capability: tuple[int, int] | None = None,
    *,
    rocm_architecture: str | None = None,
    emulate: bool = False,
) -> str | None:
    """Why a device cannot multiply in fp8, and what to do; None if it can."""
    if device_type == "mps":
        return "torch has no fp8 numbers on MPS, not even emulated. Use AutocastPrecision('bf16-mixed')."
    if emulate or device_type == "cpu":
        return None
    if device_type != "cuda":
        return f"on {device_type!r} torch's fp8 matrix product is not known to work. {_OTHERWISE}"
    if rocm_architecture is not None:
        if rocm_architecture.split(":")[0] in _ROCM_ARCHITECTURES:
            return None
        return (
            f"it is an AMD {rocm_architecture}, and torch multiplies in fp8 on {', '.join(_ROCM_ARCHITECTURES)}."
            f" {_OTHERWISE}"
        )
    if capability is not None and capability < _FIRST_CUDA_CAPABILITY:
        return (
            f"it has compute capability {capability[0]}.{capability[1]}, and fp8 matrix units come with 8.9 (Ada), 9.0"
            f" (Hopper) and later. {_OTHERWISE}"
        )
    return None


def why_no_float8_on(device: torch.device, *, emulate: bool = False) -> str | None:
    """The same of a device that is there."""
    if device.type != "cuda":
        return why_no_float8(device.type, emulate=emulate)
    if torch.version.hip is not None:
        architecture = torch.cuda.get_device_properties(device).gcnArchName
        return why_no_float8(device.type, rocm_architecture=architecture, emulate=emulate)
    return why_no_float8(device.type, torch.cuda.get_device_capability(device), emulate=emulate)


def try_float8(config: "Float8LinearConfig", device: torch.device) -> str | None:
    """Multiplies forward and backward once, with small ones; returns what the device said against it, or None.

    No random numbers are drawn.
    """
    size = DIMENSION_MULTIPLE
    layer = nn.utils.skip_init(nn.Linear, size, size, bias=False, device=device)
    nn.init.ones_(layer.weight)
    convert_to_float8([Float8Layer("", layer, None)], config)
    try:
        with torch.autocast(device.type, dtype=torch.bfloat16):
            layer(torch.ones(size, size, device=device, requires_grad=True)).float().sum().backward()
    except (RuntimeError, NotImplementedError) as error:
        said = str(error).partition("\n")[0]
        if device.type == "cpu" and _ONE_SCALE_ONLY in said:
            said += f" (torch {torch.__version__}; 2.13 can.) {_OTHERWISE}"
        return said
    return None


class Float8Precision(FullWeightsPrecision):
    """fp32 weights and gradients; linear layers multiply in fp8, the rest runs under bf16 autocast; no loss scale.

    ::

        trainer = pl.Trainer(plugins=[Float8Precision(skip=["*.router"])])

    At set-up the chosen ``nn.Linear`` layers become torchao's fp8 layers, in place: parameters, names, tying, hooks and
    ``requires_grad`` stay (:func:`~lightning_mp.training.precision.fp8.conversion.convert_to_float8`). When the Trainer
    finishes, even with an exception, they become ordinary layers again. Validation, test and predict multiply in fp8
    too.

    It is fast only with large layers and ``torch.compile``, which fuses the rounding with preceding operations: layers
    that are too small to gain stay in bf16, and without ``torch.compile`` a line at set-up says what that costs.

    An fp8 layer multiplies in fp8 even where the module disables autocast around it: list such layers in ``skip``.

    Args:
        recipe: How values are scaled before they are rounded. "tensorwise", one factor per tensor, gains from a width
            of 1,536 (1.11x to 1.17x of bf16's tokens per second). "rowwise", one factor per row, is more accurate and
            gains from 4,096 only. "rowwise_with_gw_hp", rowwise with the weight gradients multiplied in bf16, is the
            most accurate.
        skip: Layers to leave in bf16: names and globs, which match a layer or a module around it, and classes.
        emulate: True rounds to fp8 and multiplies in fp32: slow, but works on any device. None and False use the
            device's native fp8 matmul (NVIDIA Ada and later, AMD MI300 and later, CPU) and refuse other devices.
        skip_first_and_last: Whether the first and the last Linear of the model stay in bf16.
        skip_small: Whether layers stay in bf16 that are too small to gain in speed, on any device; the sizes and their
            sources are :data:`lightning_mp.ground.core.float8_gains.SMALLEST_GAIN`. False to see what fp8 does to a
            loss.
        policy: a :class:`~lightning_mp.PrecisionPolicy`, or its rules as a mapping: modules and operations that run in
            another dtype. "low" is fp8 for the chosen layers and bf16 for everything else; a layer for which a rule
            sets "bf16" or "fp32" is not converted to fp8. The resolved rules are printed at set-up.
        weight_by: see :class:`~lightning_mp.AutocastPrecision`.

    Attributes:
        layers: The decision for each Linear, after set-up; see
            :func:`~lightning_mp.training.policy.float8_layers.choose_float8_layers`.

    Raises:
        ModuleNotFoundError: if torchao is not installed.
        ValueError: if ``recipe`` is unknown; at set-up, if an entry of ``skip`` matches no Linear, or a rule of the
            policy matches nothing.
        MisconfigurationException: if the policy requests fp16; at set-up, if the device does not support fp8 or no
            layer is left to multiply in it.

    Example:
        >>> from lightning_mp import Float8Precision
        >>> Float8Precision("tensorwise").precision
        'fp8-mixed'
    """

    def __init__(
        self,
        recipe: Float8Recipe = "tensorwise",
        *,
        skip: Sequence[Float8Skip] = (),
        emulate: bool | None = None,
        skip_first_and_last: bool = True,
        skip_small: bool = True,
        policy: PolicyLike | Literal["default"] | None = None,
        weight_by: Literal["loss"] | None = "loss",
    ) -> None:
        super().__init__("fp8-mixed", None, weight_by)  # Lightning has no such name
        owner = "Float8Precision"
        if emulate is not None:
            true_or_false(emulate, "emulate", owner, hint="None, the default, is False.")
        refuse_unknown(recipe, "recipe", owner, RECIPES)
        self._config = float8_config(recipe, emulate=bool(emulate))
        self.recipe = recipe
        self.skip = check_skip(skip)
        self.emulate = bool(emulate)
        self.skip_first_and_last = true_or_false(skip_first_and_last, "skip_first_and_last", owner)
        self.skip_small = true_or_false(skip_small, "skip_small", owner)
        self.policy = read_policy(policy, None, "AutocastPrecision('16-mixed')")
        self.layers: list[Float8Layer] = []

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        """Checks the device, chooses the layers, converts them in place and applies the policy."""
        module = super().convert_module(module)
        device = self._run.trainer.strategy.root_device
        conversion = self._convert(module, device)
        self._run.cleanups.callback(conversion.undo)
        low = torch.bfloat16
        self._start_autocast(
            AutocastRun(module, device.type, low, eval_dtype=low, policy=self.policy, opaque=conversion.linears)
        )
        return module

    def _convert(self, module: nn.Module, device: torch.device) -> Float8Conversion:
        refusal = why_no_float8_on(device, emulate=self.emulate) or try_float8(self._config, device)
        if refusal is not None:
            raise MisconfigurationException(f"Float8Precision({self.recipe!r}) cannot run on {device}: {refusal}")
        self.layers = self.choose_layers(module)
        refusal = self.why_no_layer(self.layers)
        if refusal is not None:
            raise MisconfigurationException(refusal)
        conversion = convert_to_float8(self.layers, self._config)
        owner = f"Float8Precision({self.recipe!r}{', emulate=True' if self.emulate else ''})"
        rank_zero_info(f"{owner}: {summarise_float8_layers(self.layers)}.")
        if not any(private_dispatch_api.holds_compiled_code(part) for part in module.modules()):
            rank_zero_info(f"{owner}: {UNCOMPILED_FP8}")
        return conversion

    def choose_layers(self, module: nn.Module) -> list[Float8Layer]:
        """The decision for each Linear of a module, which does not change."""
        resolved = self.policy.resolve(module) if self.policy is not None else None
        # Names, and the first and the last layer, are those of the whole model on every stage of a pipeline.
        with full_model(module):
            return choose_float8_layers(
                module,
                self.skip,
                skip_first_and_last=self.skip_first_and_last,
                policy=resolved,
                smallest=SMALLEST_GAIN[self.recipe] if self.skip_small else None,
            )

    def why_no_layer(self, layers: Sequence[Float8Layer]) -> str | None:
        """What is said where no layer would multiply in fp8; None if one does."""
        if any(layer.skipped_because is None for layer in layers):
            return None
        return (
            f"Float8Precision({self.recipe!r}) would multiply nothing in fp8: {summarise_float8_layers(layers)}. Use"
            " AutocastPrecision('bf16-mixed'), or shorten skip, or give skip_first_and_last=False or skip_small=False."
        )

    @override
    def autocast_context_manager(self) -> torch.autocast:
        """bf16 autocast for everything except the fp8 products; weights are cast at every use."""
        return torch.autocast(self._carried.device_type or "cpu", dtype=torch.bfloat16, cache_enabled=False)

    @override
    def _why_not_after_a_run(self) -> str | None:
        return "its layers are ordinary ones again"

    @property
    @override
    def mixed_precision_config(self) -> "FSDPMixedPrecision":
        """For ``FSDPStrategy``: bf16 parameters in forward and backward, gradients reduced in fp32, fp32 buffers.

        A policy with rules about modules gets fp32 parameters, see
        :func:`~lightning_mp.training.policy.applied.fsdp_mixed_precision`.
        """
        return fsdp_mixed_precision(torch.bfloat16, self.policy)
