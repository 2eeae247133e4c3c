"""The settings of a demo run, which are also its command-line options, and the numbers that follow from them."""

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cached_property
from typing import Any, Literal, Self, get_args

from lightning_mp.ground.core.arguments import whole_quantity
from lightning_mp.language_model import GPTConfig, config_for_parameters
from lightning_mp.language_model.text import BLOCK_TOKENS
from lightning_mp.planning import tokens_for
from lightning_mp.training.accumulation.schedule import Thresholds, estimate_steps
from lightning_mp.training.precision.fp8.conversion import Float8Recipe
from lightning_mp.training.precision.masters.checks import Storage


def setting(
    default: Any,
    help: str,
    *,
    group: str = "",
    metavar: str | None = None,
    read: Callable[[str], Any] | None = None,
    **only_with: Sequence[Any],
) -> Any:
    """A field of the dataclass."""
    about = {"help": help, "group": group, "metavar": metavar, "read": read, "only_with": only_with}
    return field(default=default, metadata=about)


def flag(name: str) -> str:
    """The option of a setting."""
    return "--" + name.replace("_", "-")


def add_options(cls: type[Any], groups: Mapping[str, Any]) -> None:
    """Adds an option for each field. One that was not given has no entry in the parsed namespace.

    >>> from dataclasses import dataclass
    >>> @dataclass
    ... class Settings:
    ...     batch_size: int = setting(8, "sequences per batch")
    >>> parser = argparse.ArgumentParser()
    >>> add_options(Settings, {"": parser})
    >>> parser.parse_args(["--batch-size", "4"]), parser.parse_args([])
    (Namespace(batch_size=4), Namespace())
    """
    for each in fields(cls):
        help = each.metadata["help"]
        if each.default not in (None, False, MISSING):
            help += f"; default {each.default}"
        options: dict[str, Any] = {"help": help, "default": argparse.SUPPRESS}
        kinds = get_args(each.type) or (each.type,)  # of a Literal its values
        if each.default is False:
            options["action"] = "store_true"
        elif isinstance(kinds[0], type):
            metavar = each.metadata["metavar"] or ("N" if kinds[0] in (int, float) else None)
            options |= {"type": each.metadata["read"] or kinds[0], "metavar": metavar}
        else:
            options["choices"] = kinds
        groups[each.metadata["group"]].add_argument(flag(each.name), **options)


def check_combinations(settings: Any) -> None:
    """Refuses a setting that would be without effect."""
    for each in fields(settings):
        for other, values in each.metadata["only_with"].items():
            if getattr(settings, each.name) != each.default and getattr(settings, other) not in values:
                raise ValueError(
                    f"{flag(each.name)} works only with {flag(other)} {' or '.join(map(str, values))}, not "
                    f"{getattr(settings, other)}: change one of the two."
                )


Precision = Literal["32-true", "tf32", "bf16-mixed", "16-mixed", "bf16-true", "16-true", "fp8-mixed"]
SCALED_PRECISIONS = ("16-mixed", "16-true")  # with a loss scale, so that steps may be skipped

#: Micro-batches per optimizer step, by the step from which on: small batches while the loss falls fast, larger ones
#: later (McCandlish et al. 2018, arXiv:1812.06162: the useful batch size grows as the loss falls).
ACCUMULATION: Mapping[int, int] = {0: 1, 200: 2}

CLIP_NORM = 1.0  # Brown et al. 2020 (arXiv:2005.14165), appendix B
WARMUP_SHARE = 0.05  # of the learning-rate schedule


def _read_parameters(text: str) -> int:
    """As ``lightning-mp compare`` reads them: 100k, 1e5, 100_000."""
    try:
        return int(text) if text.lstrip("-").isdigit() else whole_quantity(text, "params")
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


@dataclass(frozen=True)
class Plan:
    """The numbers that follow from the settings. A micro-batch is that of all copies of the model together."""

    parameters: int
    budget_tokens: int
    micro_batch_tokens: int
    micro_batches: int  # the last one is trimmed to the budget
    optimizer_steps: int


@dataclass(frozen=True)
class Settings:
    """Everything that the final weights depend on. What a resumed run may change is in the group "layout"."""

    precision: Precision = setting(
        "bf16-mixed", "bf16-true and 16-true keep fp32 masters; on a CPU, fp16 is slow and fp8 is emulated"
    )
    storage: Storage = setting("fp32", "master weights of bf16-true", precision=["bf16-true"])
    recipe: Float8Recipe = setting("tensorwise", "scaling of fp8", precision=["fp8-mixed"])
    params: int = setting(100_000, "model size in parameters", read=_read_parameters)
    tokens_per_parameter: float = setting(20.0, "token budget; 20 is the Chinchilla rule")
    batch_size: int = setting(8, "sequences per micro-batch and data-parallel rank")
    text: str | None = setting(None, "train on this file instead of the standard library", metavar="FILE")
    seed: int = setting(0, "seed of the weights and the order of the text")
    inject_overflow: int | None = setting(
        None, "make a gradient infinite at this optimizer step, counted from 0", precision=SCALED_PRECISIONS
    )
    devices: int = setting(1, "number of GPUs or CPU processes", group="layout")
    strategy: str = setting(
        "auto",
        "auto (ddp on several devices), ddp, fsdp (GPUs only), model_parallel (Lightning's FSDP2), mp_fsdp2, "
        "mp_pipeline, mp_ddp_bf16_reduce, mp_ddp_fp16_reduce, or any other that Lightning knows",
        group="layout",
    )
    tensor_parallel: int = setting(
        1, "devices that share each layer, with mp_fsdp2", group="layout", strategy=["auto", "mp_fsdp2"]
    )
    stages: int | None = setting(
        None, "stages of mp_pipeline; default: one per device", group="layout", strategy=["mp_pipeline"]
    )

    def __post_init__(self) -> None:
        check_combinations(self)
        for name in ("params", "tokens_per_parameter", "batch_size", "devices", "tensor_parallel", "stages"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{flag(name)} {value:g} is not allowed: give a positive number.")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"--seed {self.seed} is not allowed: give a number from 0 to 4294967295.")
        plan, steps = self.plan, self.plan.optimizer_steps
        if plan.budget_tokens < plan.micro_batch_tokens:
            raise ValueError(
                f"the budget of {plan.budget_tokens:,} tokens ({self.tokens_per_parameter:g} for each of "
                f"{plan.parameters:,} parameters) is smaller than one batch of {plan.micro_batch_tokens:,} tokens: "
                "raise --tokens-per-parameter or --params, or lower --batch-size or --devices."
            )
        if self.inject_overflow is not None and not 0 <= self.inject_overflow < steps:
            raise ValueError(
                f"--inject-overflow {self.inject_overflow} is not allowed: this run has {steps} optimizer steps, so "
                f"give a number from 0 to {steps - 1}."
            )

    @cached_property
    def model(self) -> GPTConfig:
        """The shape of the model."""
        return config_for_parameters(self.params, block_tokens=BLOCK_TOKENS)

    @property
    def replicas(self) -> int:
        """Copies of the model, each with its own part of every batch; the strategy refuses what cannot be divided."""
        parts = (self.stages or self.devices) if self.strategy == "mp_pipeline" else self.tensor_parallel
        return max(1, self.devices // parts)

    @property
    def accumulation(self) -> dict[int, int]:
        """Micro-batches per optimizer step, by the step from which on."""
        return dict(ACCUMULATION)

    @cached_property
    def plan(self) -> Plan:
        """How much is trained, in which portions."""
        budget_tokens = tokens_for(self.model.parameters, self.tokens_per_parameter)
        micro_batch_tokens = self.batch_size * self.replicas * BLOCK_TOKENS
        micro_batches = math.ceil(budget_tokens / micro_batch_tokens)
        steps = estimate_steps(Thresholds(self.accumulation, "step"), micro_batches, max_epochs=1)
        return Plan(self.model.parameters, budget_tokens, micro_batch_tokens, micro_batches, int(steps))

    @classmethod
    def resume(cls, saved: Mapping[str, Any], given: Mapping[str, Any]) -> Self:
        """The saved settings of a run to continue with.

        Of those given, only the group "layout" may differ from them.
        """
        kept = cls(**saved)
        layout = {each.name for each in fields(cls) if each.metadata["group"] == "layout"}
        for name, value in given.items():
            if name not in layout and getattr(kept, name) != value:
                raise ValueError(
                    f"{flag(name)} {value} differs from the run to resume, which has {getattr(kept, name)}: leave"
                    f" {flag(name)} out to resume that run, or start a new one without --resume."
                )
        going_on = replace(kept, **{name: given[name] for name in layout & given.keys()}, batch_size=1)
        batch_size, left = divmod(kept.batch_size * kept.replicas, going_on.replicas)
        if left:
            raise ValueError(
                f"the run to resume has batches of {kept.batch_size * kept.replicas} sequences, which "
                f"{going_on.replicas} copies of the model cannot share evenly: choose --devices so that they can."
            )
        return replace(going_on, batch_size=batch_size)
