"""What decides the outcome of a demo run, and the numbers that follow from it. Pure."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Self

from lightning_mp.demo.model import GPTConfig, config_for_parameters
from lightning_mp.planning import tokens_for

__all__ = [
    "BLOCK_TOKENS",
    "FLAGS",
    "PRECISIONS",
    "Plan",
    "RECIPES",
    "STORAGES",
    "WITH_LOSS_SCALE",
    "Settings",
    "count_optimizer_steps",
    "peak_learning_rate",
    "plan_run",
]

PRECISIONS = ("32-true", "tf32", "bf16-mixed", "16-mixed", "bf16-true", "16-true", "fp8")
WITH_LOSS_SCALE = ("16-mixed", "16-true")
STORAGES = ("fp32", "remainder")
RECIPES = ("rowwise", "tensorwise", "rowwise_with_gw_hp")

#: What a resumed run may change: how the work is shared out, of which the outcome does not depend but for rounding.
SHARED_OUT = ("devices", "strategy", "tensor_parallel", "stages")

#: The command-line option of every setting.
FLAGS = {
    "precision": "--precision",
    "storage": "--storage",
    "recipe": "--recipe",
    "parameters": "--params",
    "tokens_per_parameter": "--tokens-per-parameter",
    "batch_size": "--batch-size",
    "text": "--text",
    "seed": "--seed",
    "devices": "--devices",
    "strategy": "--strategy",
    "tensor_parallel": "--tensor-parallel",
    "stages": "--stages",
    "inject_overflow": "--inject-overflow",
}


@dataclass(frozen=True)
class Settings:
    """Everything that the final weights depend on.

    Attributes:
        precision: One of :data:`PRECISIONS`.
        storage: Of the master weights of "bf16-true" and "16-true"; "remainder" for bf16 only.
        recipe: Of "fp8"; None for "rowwise".
        parameters: Wished model size.
        tokens_per_parameter: Size of the budget; 20 is Chinchilla's ratio.
        batch_size: Sequences per micro-batch and copy of the model.
        text: Path of a text; None takes the standard library's source.
        seed: For the weights and the order of the text.
        devices: Number of processes, one device each.
        strategy: A name that Lightning knows, or "model_parallel" for its FSDP2.
        tensor_parallel: Over how many devices each layer is cut; more than 1 takes "mp_fsdp2".
        stages: Of "mp_pipeline"; None for one on every device.
        inject_overflow: Optimizer step at which one gradient becomes infinite, or None.

    Raises:
        ValueError: If a value is not allowed; the message names the command-line option.
    """

    precision: str = "bf16-mixed"
    storage: str = "fp32"
    recipe: str | None = None
    parameters: int = 100_000
    tokens_per_parameter: float = 20.0
    batch_size: int = 8
    text: str | None = None
    seed: int = 0
    devices: int = 1
    strategy: str = "auto"
    tensor_parallel: int = 1
    stages: int | None = None
    inject_overflow: int | None = None

    def __post_init__(self) -> None:
        self._check_precision()
        for name in ("parameters", "tokens_per_parameter", "batch_size", "devices", "tensor_parallel", "stages"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ValueError(f"{FLAGS[name]} {value:g} is not allowed: give a positive number.")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"--seed {self.seed} is not allowed: give a number from 0 to 4294967295.")
        self._check_layout()
        if self.inject_overflow is None:
            return
        if self.inject_overflow < 0:
            raise ValueError(
                f"--inject-overflow {self.inject_overflow} is not allowed: give an optimizer step, counted from 0."
            )
        if not self.has_loss_scale:
            raise ValueError(
                f"--inject-overflow shows how a loss scaler skips a step, and {self.precision} has none: "
                "add --precision 16-mixed or 16-true."
            )

    def _check_precision(self) -> None:
        for name, allowed in (("precision", PRECISIONS), ("storage", STORAGES), ("recipe", (None, *RECIPES))):
            if getattr(self, name) not in allowed:
                *first, last = [choice for choice in allowed if choice is not None]
                raise ValueError(
                    f"{FLAGS[name]} {getattr(self, name)} is unknown: choose {', '.join(first)} or {last}."
                )
        if self.storage == "remainder" and self.precision != "bf16-true":
            raise ValueError(
                f"--storage remainder keeps the 16 bits that a bf16 weight lacks, and --precision {self.precision} has "
                "no bf16 weights: add --precision bf16-true."
            )
        if self.recipe is not None and self.precision != "fp8":
            raise ValueError(f"--recipe is about fp8, and --precision is {self.precision}: add --precision fp8.")

    def _check_layout(self) -> None:
        if self.tensor_parallel > 1 and self.strategy not in ("auto", "mp_fsdp2"):
            raise ValueError(
                f"--tensor-parallel {self.tensor_parallel} needs --strategy mp_fsdp2, got {self.strategy}: leave "
                "--strategy out, or --tensor-parallel."
            )
        if self.stages is not None and self.strategy != "mp_pipeline":
            raise ValueError(f"--stages is about --strategy mp_pipeline, and that is {self.strategy}: leave one out.")
        for name in ("tensor_parallel", "stages"):
            parts = getattr(self, name)
            if parts is not None and self.devices % parts:
                raise ValueError(
                    f"{FLAGS[name]} {parts} needs a multiple of {parts} devices, got --devices {self.devices}."
                )

    @property
    def has_loss_scale(self) -> bool:
        """Whether the loss is scaled, so that steps may be skipped."""
        return self.precision in WITH_LOSS_SCALE

    @property
    def replicas(self) -> int:
        """Copies of the model, each with its own part of every batch."""
        if self.strategy == "mp_pipeline":
            return self.devices // (self.stages or self.devices)
        return self.devices // self.tensor_parallel

    @property
    def sequences(self) -> int:
        """Sequences of one micro-batch over all copies of the model."""
        return self.batch_size * self.replicas

    @classmethod
    def resolve(cls, given: Mapping[str, Any], saved: Mapping[str, Any] | None = None) -> Self:
        """Settings from the options that were given, on top of the defaults or of those of the run to resume.

        Args:
            given: Values by name, only those that the user gave.
            saved: :meth:`as_dict` of the run to resume, or None for a new run.

        Raises:
            ValueError: If a given value differs from the saved one and the outcome depends on it, or batches cannot be
                shared out otherwise.

        Example:
            >>> Settings.resolve({"seed": 3}).seed
            3
            >>> Settings.resolve({"seed": 3}, saved=Settings().as_dict())
            Traceback (most recent call last):
            ValueError: --seed 3 differs from the run to resume, which has 0: leave --seed out to go on with that run,
            or start a new one without --resume.
        """
        if saved is None:
            return cls(**given)
        # a setting that is younger than the checkpoint had its default then
        kept = cls(**{field.name: saved[field.name] for field in fields(cls) if field.name in saved})
        for name, value in given.items():
            if name not in SHARED_OUT and getattr(kept, name) != value:
                raise ValueError(
                    f"{FLAGS[name]} {value} differs from the run to resume, which has {getattr(kept, name)}: leave "
                    f"{FLAGS[name]} out to go on with that run, or start a new one without --resume."
                )
        settings = replace(kept, **{name: value for name, value in given.items() if name in SHARED_OUT})
        batch_size, rest = divmod(kept.sequences, settings.replicas)
        if rest or not batch_size:
            raise ValueError(
                f"the run to resume has batches of {kept.sequences} sequences, which {settings.replicas} copies of the "
                "model cannot share evenly: choose --devices so that they can."
            )
        return replace(settings, batch_size=batch_size)

    def as_dict(self) -> dict[str, Any]:
        """Plain values by name."""
        return asdict(self)


def count_optimizer_steps(micro_batches: int, schedule: Mapping[int, int]) -> int:
    """Optimizer steps that ``micro_batches`` make, the last one perhaps with fewer micro-batches than planned.

    Args:
        micro_batches: Micro-batches of the whole run, per rank.
        schedule: From which optimizer step on how many micro-batches make one step.

    Example:
        >>> count_optimizer_steps(11, {0: 1, 3: 2})  # 1 + 1 + 1 + 2 + 2 + 2 + 2
        7
    """
    steps = 0
    thresholds = sorted(schedule)
    for first_step, end_step in zip(thresholds, [*thresholds[1:], None], strict=True):
        length = schedule[first_step]
        wanted = -(-micro_batches // length)
        made = wanted if end_step is None else min(wanted, end_step - first_step)
        steps += made
        micro_batches -= min(micro_batches, made * length)
    return steps


def peak_learning_rate(parameters: int) -> float:
    """Peak rate for AdamW that falls with the third root of the model size.

    Anchored at 6e-4 for 124M parameters (Brown et al. 2020, arXiv:2005.14165, table 2.1, GPT-3 Small). The exponent
    makes it 6.4e-3 at 0.1M, which ended lower there than 4e-3 and 1e-2. At most 1e-2.

    Example:
        >>> round(peak_learning_rate(124_337_664), 6)
        0.0006
    """
    return min(1e-2, 6e-4 * math.cbrt(124_337_664 / parameters))


#: Tokens per sequence.
BLOCK_TOKENS = 128

#: From which optimizer step on how many micro-batches make one step: small batches while the loss falls fast, larger
#: ones later (McCandlish et al. 2018, arXiv:1812.06162: the useful batch size grows as the loss falls).
ACCUMULATION: Mapping[int, int] = {0: 1, 200: 2}

_VALIDATIONS = 12
_CHECKPOINTS = 10


@dataclass(frozen=True)
class Plan:
    """Numbers of a run that follow from its :class:`~lightning_mp.demo.settings.Settings`.

    Attributes:
        model: The model's shape.
        budget_tokens: Tokens to train on, over all ranks.
        micro_batch_tokens: Tokens of one micro-batch over all ranks.
        micro_batches: Micro-batches of the whole run, per rank; the last one is trimmed to the budget.
        optimizer_steps: Optimizer steps of the whole run.
        learning_rate: The peak.
        validate_every_micro_batches: How often to validate; besides, once at the end.
        checkpoint_every_steps: How often to write a checkpoint, in optimizer steps.
        accumulation: Schedule for the ``AccumulationScheduler``, by optimizer step.
    """

    model: GPTConfig
    budget_tokens: int
    micro_batch_tokens: int
    micro_batches: int
    optimizer_steps: int
    learning_rate: float
    validate_every_micro_batches: int
    checkpoint_every_steps: int
    accumulation: Mapping[int, int] = field(default_factory=lambda: dict(ACCUMULATION))


def plan_run(settings: Settings) -> Plan:
    """Works out a run.

    Raises:
        ValueError: If the budget is smaller than one micro-batch, the model cannot be that small, or the step to break
            lies past the end.

    Example:
        >>> plan = plan_run(Settings())
        >>> plan.budget_tokens == 20 * plan.model.parameters, plan.micro_batches, plan.optimizer_steps
        (True, 1987, 1094)
    """
    try:
        model = config_for_parameters(settings.parameters, block_tokens=BLOCK_TOKENS)
    except ValueError as error:
        raise ValueError(f"--params {settings.parameters}: {error}") from error
    _check_parts(settings, model)
    budget_tokens = tokens_for(model.parameters, settings.tokens_per_parameter)
    micro_batch_tokens = settings.sequences * BLOCK_TOKENS
    if budget_tokens < micro_batch_tokens:
        raise ValueError(
            f"the budget of {budget_tokens:,} tokens ({settings.tokens_per_parameter:g} for each of "
            f"{model.parameters:,} parameters) is smaller than one batch of {micro_batch_tokens:,} tokens: raise "
            "--tokens-per-parameter or --params, or lower --batch-size or --devices."
        )
    micro_batches = -(-budget_tokens // micro_batch_tokens)
    optimizer_steps = count_optimizer_steps(micro_batches, ACCUMULATION)
    if settings.inject_overflow is not None and settings.inject_overflow >= optimizer_steps:
        raise ValueError(
            f"--inject-overflow {settings.inject_overflow} lies past the end: this run has {optimizer_steps} optimizer "
            f"steps, so give a number from 0 to {optimizer_steps - 1}."
        )
    return Plan(
        model=model,
        budget_tokens=budget_tokens,
        micro_batch_tokens=micro_batch_tokens,
        micro_batches=micro_batches,
        optimizer_steps=optimizer_steps,
        learning_rate=peak_learning_rate(model.parameters),
        validate_every_micro_batches=-(-micro_batches // _VALIDATIONS),
        checkpoint_every_steps=-(-optimizer_steps // _CHECKPOINTS),
    )


def _check_parts(settings: Settings, model: GPTConfig) -> None:
    """Refuses to cut the model into more parts than it has."""
    if model.heads % settings.tensor_parallel:
        raise ValueError(
            f"--tensor-parallel {settings.tensor_parallel} does not divide the {model.heads} heads "
            f"of attention in a model of {model.parameters:,} parameters: choose another, or raise --params."
        )
    stages = settings.devices // settings.replicas if settings.strategy == "mp_pipeline" else 1
    layers = model.layers + 3  # embedding, norm and head besides
    if stages > layers:
        raise ValueError(
            f"--strategy mp_pipeline cannot cut the {layers} layers of a model of {model.parameters:,} parameters into "
            f"{stages} stages: give --stages {layers} or less, or a larger model with --params."
        )
