"""What MasterWeightsPrecision refuses, at set-up and with what to do instead."""

from typing import Literal, get_args

from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, Strategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_mp.ground.core.arguments import true_or_false
from lightning_mp.ground.core.known_words import refuse_unknown
from lightning_mp.ground.core.precisions import MASTER_DTYPES
from lightning_mp.training.precision.autocast_context import why_no_autocast

Storage = Literal["fp32", "remainder", "24bit"]


def check_arguments(precision: str, storage: str, scaler: object, fp32_checkpoints: object) -> None:
    """Refuses arguments that are unknown or contradict each other."""
    owner = "MasterWeightsPrecision"
    hint = " For fp32 weights that are cast at each use, take AutocastPrecision('bf16-mixed') or ('16-mixed')."
    refuse_unknown(precision, "precision", owner, MASTER_DTYPES, hint=hint)
    refuse_unknown(storage, "storage", owner, get_args(Storage))
    if storage != "fp32" and precision != "bf16-true":
        raise MisconfigurationException(
            f"MasterWeightsPrecision({precision!r}, {storage=}): an fp32 number is not an fp16 number plus more bits,"
            " because fp16 has a different exponent. Use storage='fp32', or 'bf16-true'."
        )
    if scaler is not None and precision == "bf16-true":
        raise MisconfigurationException(
            f"MasterWeightsPrecision('bf16-true') takes no scaler, got {type(scaler).__name__}: bf16 has the range of"
            " fp32. Leave the scaler out, or use '16-true'."
        )
    if not true_or_false(fp32_checkpoints, "fp32_checkpoints", owner):
        raise ValueError(
            f"MasterWeightsPrecision(fp32_checkpoints={fp32_checkpoints!r}): weights are fp32, and so are those of its"
            " checkpoints. Leave the argument out."
        )


def check_strategy(strategy: Strategy, *, storage: str, fp32_gradients: bool) -> None:
    """Refuses strategies that cannot do what was requested."""
    name = type(strategy).__name__
    if isinstance(strategy, FSDPStrategy) and storage != "fp32":
        raise MisconfigurationException(
            f"MasterWeightsPrecision({storage=}) cannot be used with {name}, which keeps its fp32 shards in memory."
            " Leave storage out, or use FSDP2Strategy."
        )
    if fp32_gradients and isinstance(strategy, DDPStrategy):
        raise MisconfigurationException(
            f"MasterWeightsPrecision(fp32_gradients=True) cannot be used with {name}, which reduces gradients over"
            " ranks in the dtype of the 16-bit copies. Leave it out, or use FSDP2Strategy, which adds in fp32."
        )


def check_autocast(precision: str, device_type: str) -> None:
    """Refuses devices without autocast to the precision's dtype."""
    refusal = why_no_autocast(device_type, MASTER_DTYPES[precision])
    if refusal is not None:
        raise MisconfigurationException(
            f"MasterWeightsPrecision({precision!r}) cannot run on {device_type!r}: {refusal}"
        )


def dtype_hint(error: Exception, precision: str) -> str:
    """What to do about an error of torch about two dtypes, or a dtype that an operation does not have."""
    if "grad_dtype" in str(error):
        return (
            f"HINT: under MasterWeightsPrecision({precision!r}) gradients are {MASTER_DTYPES[precision]} until the"
            " optimizer's step. Assign gradient.to(parameter.grad_dtype), or take fp32_gradients=True."
        )
    return (
        f"HINT: under MasterWeightsPrecision({precision!r}) a module's weights are {MASTER_DTYPES[precision]} inside of"
        " its forward, and an operation outside of autocast's lists mixed them with fp32 values, or does not exist in"
        " 16 bit. Give its module a rule in fp32, policy={'name.of.module': 'fp32'}, or cast where it is called."
    )
