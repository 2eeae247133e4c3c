"""The best model size and run length for a budget, under a named law, with what the other published laws say."""

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace

from lightning_mp.ground.core.arguments import quantity_from
from lightning_mp.ground.core.quantities import Quantity, format_quantity, parse_flops, parse_fraction, parse_quantity
from lightning_mp.ground.flops.chinchilla import FLOPS_PER_PARAMETER_AND_TOKEN
from lightning_mp.ground.flops.hardware import chip_of, dtype_on
from lightning_mp.planning.scaling_laws.scaling_law import (
    DEFAULT_LAW,
    FAR_OUTSIDE,
    LAWS,
    MUENNIGHOFF_2023,
    ParametricLaw,
    RepetitionLaw,
    ScalingLaw,
    find_law,
    with_loss,
)

SECONDS_PER_HOUR = 3600
_WORTHLESS = 0.1


@dataclass(frozen=True, slots=True)
class DeviceBudget:
    """Device hours and their cost."""

    device_hours: float  # hours times devices
    device: str  # the chip that was meant
    dtype: str  # format of the matmul inputs
    peak_flops_per_second: float  # dense peak of one device
    mfu: float  # model FLOPs over peak

    @property
    def flops(self) -> float:
        """C = hours x 3600 x peak x MFU."""
        return self.device_hours * SECONDS_PER_HOUR * self.peak_flops_per_second * self.mfu


def device_budget(
    device_hours: Quantity, *, device: str | None, mfu: float | str | None, dtype: str | None = None
) -> DeviceBudget:
    """Turns device hours into FLOPs."""
    if device is None or mfu is None:
        missing = "device" if device is None else "mfu"
        raise ValueError(
            f"`device_hours` needs `device` and `mfu`, got no `{missing}`. Pass both; where no MFU was measured,"
            " 0.3 and 0.5 give the usual range."
        )
    chip = chip_of(device)
    dtype = dtype_on(chip, dtype)
    return DeviceBudget(
        device_hours=parse_quantity(device_hours, "device_hours"),
        device=chip.name,
        dtype=dtype,
        peak_flops_per_second=chip.peak_flops[dtype],
        mfu=parse_fraction(mfu, "mfu"),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRun:
    """A model, its tokens and its compute, under a law."""

    law: ScalingLaw  #: The law of this answer.
    parameters: float  #: N, in what ``law.counts`` says.
    tokens: float  #: D, repeated ones counted each time.
    flops: float  #: C = 6 N D.
    loss: float | None  #: Predicted loss in nats per token; None where the law has none.
    unique_tokens: float | None = None  #: Tokens to draw from, None where no limit was given.

    @property
    def tokens_per_parameter(self) -> float:
        """D / N."""
        return self.tokens / self.parameters

    @property
    def epochs(self) -> float:
        """Passes over the unique tokens; 1 where no limit was given."""
        return 1.0 if self.unique_tokens is None else max(1.0, self.tokens / self.unique_tokens)

    @property
    def times_outside(self) -> float:
        """How many times beyond the models that the law was fitted to: 1 inside."""
        return self.law.trained.times_outside(self.parameters, self.tokens)

    @property
    def repetition_note(self) -> str | None:
        """What repeated tokens are worth, and whether further epochs still help; None if nothing is repeated."""
        if self.unique_tokens is None or self.tokens <= self.unique_tokens:
            return None
        law = MUENNIGHOFF_2023
        worth = law.effective_tokens(self.tokens, self.unique_tokens) / self.unique_tokens
        said = f"{self.epochs:.3g} epochs: they are worth {worth:.3g} epochs of new tokens."
        last, end = law.value_of_next_token(self.tokens, self.unique_tokens), law.epochs_until_worth(_WORTHLESS)
        if last < _WORTHLESS:
            return (
                f"{said} Further epochs stopped paying after {end:.0f}: a token then adds less than {_WORTHLESS:.0%} of"
                " a new one."
            )
        return f"{said} The next token adds {last:.0%} of a new one; after {end:.0f} epochs it adds {_WORTHLESS:.0%}."


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeOptimal(PlannedRun):
    """One answer: a model, its tokens, its compute, and the answers of the other laws."""

    devices: DeviceBudget | None = None  #: The device hours that were asked about, if they were.
    #: The same question under every preset, in their order. The presets differ: read this before you spend.
    spread: tuple["ComputeOptimal", ...] = ()


def compute_optimal(
    *,
    flops: Quantity | None = None,
    parameters: Quantity | None = None,
    tokens: Quantity | None = None,
    device_hours: Quantity | None = None,
    device: str | None = None,
    mfu: float | str | None = None,
    dtype: str | None = None,
    unique_tokens: Quantity | None = None,
    repetition: RepetitionLaw | None = None,
    law: str | ScalingLaw = DEFAULT_LAW,
) -> ComputeOptimal:
    """The compute-optimal model for exactly one of: a compute budget, a model size, a number of tokens, device hours.

    Args:
        flops: Training compute C = 6 N D.
        parameters: N; the answer is the compute and tokens for which this size is optimal.
        tokens: D; likewise.
        device_hours: Hours times devices; needs ``device`` and ``mfu``.
        device: Chip, such as "h100" or "A100".
        mfu: Model FLOPs utilisation, as a fraction.
        dtype: Format of the matmul inputs, "bf16" when None, "fp16" on chips without bf16 units; only with
            ``device_hours``.
        unique_tokens: Number of available tokens, if the run would use more: they are then repeated. Needs a law with a
            loss, and ``flops`` or ``device_hours``.
        repetition: What repeated tokens are worth; None takes
            :data:`~lightning_mp.planning.scaling_laws.scaling_law.MUENNIGHOFF_2023`.
        law: A name of :data:`~lightning_mp.planning.scaling_laws.scaling_law.LAWS` or a law of your own, such as
            that of a fit.

    Raises:
        ValueError: Not exactly one target, an argument that does not belong to it, or a number out of range.

    Warns:
        UserWarning: The answer lies more than ten times beyond the models that the law was fitted to.

    Example:
        GPT-3 (175B parameters, 300B tokens) was undertrained: its compute (Brown et al. 2020, Table D.1) would have
        bought a model of a third of the size with three times the tokens. Chinchilla (70B, 1.4T tokens) was not.

        >>> gpt3 = compute_optimal(flops="3.14e23")
        >>> round(gpt3.parameters / 1e9), round(gpt3.tokens / 1e9)
        (53, 989)
        >>> chinchilla = compute_optimal(flops="5.76e23")
        >>> round(chinchilla.parameters / 1e9), round(chinchilla.tokens / 1e9)
        (72, 1329)

        The published laws do not agree on the tokens per parameter:

        >>> {answer.law.name: round(answer.tokens_per_parameter) for answer in chinchilla.spread}
        {'hoffmann-1': 21, 'hoffmann-2': 24, 'hoffmann-3': 59, 'besiroglu': 18, 'muennighoff': 20, 'rule-of-20': 20,
         'kaplan': 0}
    """
    given = {"flops": flops, "parameters": parameters, "tokens": tokens, "device_hours": device_hours}
    target, amount = _only_one(given)
    devices = _devices(device_hours, device, mfu, dtype)
    if devices is not None:
        value = devices.flops
    else:
        value = parse_flops(amount, target) if target == "flops" else parse_quantity(amount, target)
    unique = None if unique_tokens is None else parse_quantity(unique_tokens, "unique_tokens")
    if unique is None and repetition is not None:
        raise ValueError("`repetition` says what repeated tokens are worth. Pass `unique_tokens`, or leave it out.")
    if unique is not None and target not in ("flops", "device_hours"):
        raise ValueError(f"`unique_tokens` needs a compute budget, got `{target}`. Pass `flops` or `device_hours`.")
    chosen = find_law(law)
    worth = repetition or MUENNIGHOFF_2023

    def answer(one: ScalingLaw) -> ComputeOptimal:
        best = _unlimited(one, target, value)
        return best if unique is None else _limited(best, unique, worth)

    if unique is not None:
        with_loss(chosen, "unique_tokens")
    result = answer(chosen)
    _refuse_less_than_one(result)
    warn_far_outside(chosen, result.parameters, result.tokens, stacklevel=3)
    others = (row for row in LAWS.values() if unique is None or isinstance(row, ParametricLaw))
    return replace(result, devices=devices, spread=tuple(answer(row) for row in others))


def warn_far_outside(law: ScalingLaw, parameters: float, tokens: float, stacklevel: int = 2) -> None:
    """Warns, with the range, when a prediction lies more than ten times beyond the models of a law."""
    times = law.trained.times_outside(parameters, tokens)
    if times > FAR_OUTSIDE:
        warnings.warn(
            f"{format_quantity(parameters)} parameters on {format_quantity(tokens)} tokens lie "
            f"{format_quantity(times)} times outside the models that {law.name!r} was fitted to: {law.trained}. Expect"
            " no more than an order of magnitude.",
            stacklevel=stacklevel,
        )


def _only_one(given: dict[str, Quantity | None]) -> tuple[str, Quantity]:
    targets = [(name, value) for name, value in given.items() if value is not None]
    if len(targets) != 1:
        got = f"got {' and '.join(f'`{name}`' for name, _ in targets)}" if targets else "got none"
        raise ValueError(f"Pass exactly one of `flops`, `parameters`, `tokens` and `device_hours`, {got}.")
    return targets[0]


def _devices(
    hours: Quantity | None, device: str | None, mfu: float | str | None, dtype: str | None
) -> DeviceBudget | None:
    if hours is None:
        extra = [name for name, value in (("device", device), ("mfu", mfu), ("dtype", dtype)) if value is not None]
        if extra:
            raise ValueError(
                f"`{extra[0]}` belongs to `device_hours`, which is missing. Pass it, or leave `{extra[0]}` out."
            )
        return None
    return device_budget(hours, device=device, mfu=mfu, dtype=dtype)


def _unlimited(law: ScalingLaw, target: str, value: float) -> ComputeOptimal:
    frontier = law.frontier
    try:
        if target == "parameters":
            flops = frontier.flops_for_parameters(value)
        elif target == "tokens":
            flops = frontier.flops_for_tokens(value)
        else:
            flops = value
    except OverflowError:
        raise ValueError(
            f"{format_quantity(value)} {target} cost more FLOPs under {law.name!r} than a float can hold. Is the unit"
            " right?"
        ) from None
    parameters, tokens = frontier.optimum(flops)
    loss = law.loss(parameters, tokens) if isinstance(law, ParametricLaw) else None
    return ComputeOptimal(law=law, parameters=parameters, tokens=tokens, flops=flops, loss=loss)


def _limited(best: ComputeOptimal, unique_tokens: float, repetition: RepetitionLaw) -> ComputeOptimal:
    law = best.law
    assert isinstance(law, ParametricLaw)
    if best.tokens <= unique_tokens:
        return replace(best, unique_tokens=unique_tokens)

    def tokens_of(log_parameters: float) -> float:
        return best.flops / (FLOPS_PER_PARAMETER_AND_TOKEN * math.exp(log_parameters))

    def loss_of(log_parameters: float) -> float:
        return repetition(law, math.exp(log_parameters), tokens_of(log_parameters), unique_tokens)

    log_parameters = minimum(loss_of, middle=math.log(best.parameters), reach=math.log(1e4))
    return replace(
        best,
        parameters=math.exp(log_parameters),
        tokens=tokens_of(log_parameters),
        loss=loss_of(log_parameters),
        unique_tokens=unique_tokens,
    )


def minimum(function: Callable[[float], float], middle: float, reach: float, points: int = 201) -> float:
    """The lowest point of a grid, refined by golden sections between its neighbours."""
    step = 2 * reach / (points - 1)
    lowest = min((middle - reach + step * index for index in range(points)), key=function)
    low, high = lowest - step, lowest + step
    golden = (math.sqrt(5) - 1) / 2
    while high - low > 1e-9:
        left, right = high - golden * (high - low), low + golden * (high - low)
        low, high = (low, right) if function(left) < function(right) else (left, high)
    return (low + high) / 2


def _refuse_less_than_one(result: ComputeOptimal) -> None:
    for name, value in (("parameter", result.parameters), ("token", result.tokens)):
        if not 1 <= value < math.inf:
            raise ValueError(
                f"{format_quantity(result.flops)} FLOPs come to {value:.2g} {name}s under {result.law.name!r}. "
                "Is the unit right? Write 1e21, not 21."
            )


_FLOPS_OF_INFERENCE = 2


@dataclass(frozen=True, slots=True)
class InferenceAware:
    """A model with the same loss that is cheapest over its lifetime."""

    parameters: float  #: N.
    tokens: float  #: of training.
    inference_tokens: float  #: read and written over the model's life.
    lifetime_flops: float  #: of training and inference together.
    lifetime_flops_before: float  #: the same for the model that it is compared with.

    @property
    def saving(self) -> float:
        """Share of the lifetime's operations that is saved."""
        return 1 - self.lifetime_flops / self.lifetime_flops_before


def inference_aware_optimum(
    law: ParametricLaw, *, parameters: float | str, tokens: float | str, inference_tokens: float | str
) -> InferenceAware:
    """The cheapest model over its lifetime among those that reach the same loss.

    Sardana et al. 2024 (arXiv:2401.00448), equation 2: of all N and D that reach a loss, those that minimise
    6 N D_training + 2 N D_inference; inference of a token costs a forward, 2 N operations. Beyond the models that a law
    was fitted to, it overestimates the value of more tokens (their section 5), so the prediction for a far smaller
    model that trains longer is a guess.

    Args:
        law: a law that predicts a loss.
        parameters: N of the model to compare with.
        tokens: D of that model.
        inference_tokens: inference tokens over the lifetime; 0 gives the optimum for training alone.

    Raises:
        ValueError: a number is not finite, or negative.

    Example:
        The paper's figure 1: 2 trillion tokens of inference. Instead of a 13B model, train a 7B model on more data; the
        paper reports 17%, with rounded constants of the law.

        >>> from lightning_mp.planning.scaling_laws.scaling_law import LAWS
        >>> law = LAWS["hoffmann-3"]
        >>> _, tokens = law.frontier.optimum(law.frontier.flops_for_parameters(13e9))
        >>> best = inference_aware_optimum(law, parameters=13e9, tokens=tokens, inference_tokens=2e12)
        >>> round(best.parameters / 1e9), f"{best.saving:.0%}"
        (7, '16%')
    """
    given, seen = quantity_from(1, parameters, "parameters"), quantity_from(1, tokens, "tokens")
    requested = quantity_from(0, inference_tokens, "inference_tokens")
    loss = law.loss(given, seen)
    # Below this size no number of tokens reaches the loss.
    smallest = (law.A / (loss - law.E)) ** (1 / law.alpha)

    def tokens_of(size: float) -> float:
        return float((law.B / (loss - law.E - law.A * size**-law.alpha)) ** (1 / law.beta))

    def cost(log_excess: float) -> float:
        size = smallest * (1 + math.exp(log_excess))
        training = FLOPS_PER_PARAMETER_AND_TOKEN * size * tokens_of(size)
        return math.log(training + _FLOPS_OF_INFERENCE * size * requested)

    best = smallest * (1 + math.exp(minimum(cost, middle=0.0, reach=math.log(1e6))))
    before = FLOPS_PER_PARAMETER_AND_TOKEN * given * seen + _FLOPS_OF_INFERENCE * given * requested
    return InferenceAware(
        parameters=best,
        tokens=tokens_of(best),
        inference_tokens=requested,
        lifetime_flops=FLOPS_PER_PARAMETER_AND_TOKEN * best * tokens_of(best) + _FLOPS_OF_INFERENCE * best * requested,
        lifetime_flops_before=before,
    )
