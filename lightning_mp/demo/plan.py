"""The run worked out in advance: model, budget, number of steps. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from lightning_mp.demo.learning_rate import count_optimizer_steps, peak_learning_rate
from lightning_mp.demo.model import GPTConfig, config_for_parameters
from lightning_mp.demo.settings import Settings
from lightning_mp.planning import tokens_for

__all__ = ["BLOCK_TOKENS", "Plan", "plan_run"]

#: Tokens per sequence.
BLOCK_TOKENS = 128

#: From which optimizer step on how many micro-batches make one step: small batches while the loss falls fast, larger
#: ones later (McCandlish et al. 2018, arXiv:1812.06162: the useful batch size grows as the loss falls).
ACCUMULATION: Mapping[int, int] = {0: 1, 200: 2}

_WARMUP_SHARE = 0.05
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
        warmup_steps: Of these, until the peak learning rate.
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
    warmup_steps: int
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
    budget_tokens = tokens_for(model.parameters, settings.tokens_per_parameter)
    micro_batch_tokens = settings.batch_size * settings.devices * BLOCK_TOKENS
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
        warmup_steps=max(1, round(_WARMUP_SHARE * optimizer_steps)),
        learning_rate=peak_learning_rate(model.parameters),
        validate_every_micro_batches=-(-micro_batches // _VALIDATIONS),
        checkpoint_every_steps=-(-optimizer_steps // _CHECKPOINTS),
    )
