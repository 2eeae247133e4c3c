"""One training run by its numbers: two of model, tokens and compute make the third; time, cost and loss follow."""

import warnings
from dataclasses import dataclass

from lightning_mp.ground.core.arguments import whole_quantity
from lightning_mp.ground.core.quantities import Quantity, parse_flops, parse_fraction, parse_quantity
from lightning_mp.ground.flops.chinchilla import FLOPS_PER_PARAMETER_AND_TOKEN
from lightning_mp.ground.flops.hardware import chip_of, dtype_on
from lightning_mp.planning.scaling_laws.optimum import (
    SECONDS_PER_HOUR,
    ComputeOptimal,
    PlannedRun,
    compute_optimal,
    warn_far_outside,
)
from lightning_mp.planning.scaling_laws.scaling_law import (
    DEFAULT_LAW,
    MUENNIGHOFF_2023,
    ParametricLaw,
    ScalingLaw,
    find_law,
)

USUAL_MFU = (0.3, 0.5)
"""Where none is measured: PaLM reports 46% (Chowdhery et al. 2022, table 3), Llama 3 405B 38 to 43% (Dubey et al. 2024,
table 4), and most own code is below."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRun(PlannedRun):
    """A model, its tokens and its compute, whether or not they are compute-optimal."""

    optimum: ComputeOptimal  #: the best model for the same compute.


def training_run(
    *,
    parameters: Quantity | None = None,
    tokens: Quantity | None = None,
    flops: Quantity | None = None,
    unique_tokens: Quantity | None = None,
    law: str | ScalingLaw = DEFAULT_LAW,
) -> TrainingRun:
    """A run given by two of parameters, tokens and FLOPs, with the loss that a law predicts for it.

    Args:
        parameters: N.
        tokens: D.
        flops: C = 6 N D.
        unique_tokens: number of available tokens; beyond it, tokens are repeated.
        law: a name of :data:`~lightning_mp.planning.scaling_laws.scaling_law.LAWS`, or a law of your own.

    Raises:
        ValueError: not exactly two were given, or a number is out of range.

    Warns:
        UserWarning: the run lies more than ten times beyond the models that the law was fitted to.

    Example:
        Llama 3 8B saw 15 trillion tokens. A model ten times its size would have used the compute better:

        >>> import warnings
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("ignore")
        ...     run = training_run(parameters="8.03B", tokens="15T")
        >>> f"{run.flops:.2e}", round(run.loss, 2), round(run.optimum.loss, 2), round(run.optimum.parameters / 1e9)
        ('7.23e+23', 2.02, 1.97, 81)
    """
    given = {"parameters": parameters, "tokens": tokens, "flops": flops}
    numbers = {
        name: parse_flops(value, name) if name == "flops" else parse_quantity(value, name)
        for name, value in given.items()
        if value is not None
    }
    if len(numbers) != 2:
        names = " and ".join(f"`{name}`" for name in numbers) or "none"
        raise ValueError(f"Pass exactly two of `parameters`, `tokens` and `flops` (C = 6 N D), got {names}.")
    n, d, c = numbers.get("parameters"), numbers.get("tokens"), numbers.get("flops")
    per = FLOPS_PER_PARAMETER_AND_TOKEN
    n = n if n is not None else (c or 0) / (per * (d or 1))
    d = d if d is not None else (c or 0) / (per * n)
    c = per * n * d
    if n < 1 or d < 1:
        raise ValueError(f"{c:.3g} FLOPs come to {n:.3g} parameters and {d:.3g} tokens. Is the unit right?")
    chosen = find_law(law)
    unique = None if unique_tokens is None else parse_quantity(unique_tokens, "unique_tokens")
    loss = None
    if isinstance(chosen, ParametricLaw):
        repeats = unique is not None and d > unique
        loss = MUENNIGHOFF_2023(chosen, n, d, unique or d) if repeats else chosen.loss(n, d)
    warn_far_outside(chosen, n, d, stacklevel=3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of the run itself it was said
        optimum = compute_optimal(flops=c, law=chosen)
    return TrainingRun(law=chosen, parameters=n, tokens=d, flops=c, loss=loss, optimum=optimum, unique_tokens=unique)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTime:
    """Time that a number of FLOPs takes on GPUs; pairs range from the best to the worst utilisation."""

    chip: str  #: the chip.
    gpus: int  #: how many.
    dtype: str  #: format of matrix products.
    peak_flops_per_second: float  #: of one chip in it, dense.
    mfu: tuple[float, float]  #: the highest and the lowest utilisation.
    measured: bool  #: whether the caller gave it.
    hours: tuple[float, float]  #: from start to end.
    gpu_hours: tuple[float, float]  #: times GPUs.
    cost: tuple[float, float] | None  #: at the price, None without one.


def run_time(
    flops: Quantity,
    *,
    device: str,
    gpus: float | str = 1,
    dtype: str | None = None,
    mfu: Quantity | None = None,
    price: Quantity | None = None,
) -> RunTime:
    """Time, GPU hours and cost of a number of FLOPs.

    Args:
        flops: C, such as 1e21, "1EFLOP" or "5PF-days".
        device: a chip, such as "h100".
        gpus: number of GPUs.
        dtype: format of matrix products; None is "bf16", or "fp16" on chips without bf16 units.
        mfu: measured utilisation, such as 0.4 or "40%"; None gives the range :data:`USUAL_MFU`.
        price: price of one GPU hour, in any currency.

    Raises:
        ValueError: the chip is unknown, or has no figure for the format, or a number is out of range.

    Example:
        Llama 3 405B: 3.8e25 FLOPs on 16,384 H100, at the 41% that its report gives for this size of job (table 4).

        >>> round(run_time(3.8e25, device="h100", gpus=16384, mfu="41%").hours[0] / 24)
        66
    """
    chip = chip_of(device)
    dtype = dtype_on(chip, dtype)
    low, high = USUAL_MFU if mfu is None else (parse_fraction(mfu, "mfu"),) * 2
    operations, count = parse_flops(flops, "flops"), whole_quantity(gpus, "gpus")
    fastest, slowest = (operations / (share * chip.peak_flops[dtype]) / SECONDS_PER_HOUR for share in (high, low))
    each = None if price is None else parse_quantity(price, "price")
    return RunTime(
        chip=chip.name,
        gpus=count,
        dtype=dtype,
        peak_flops_per_second=chip.peak_flops[dtype],
        mfu=(high, low),
        measured=mfu is not None,
        hours=(fastest / count, slowest / count),
        gpu_hours=(fastest, slowest),
        cost=None if each is None else (each * fastest, each * slowest),
    )
