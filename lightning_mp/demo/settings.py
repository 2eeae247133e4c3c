"""The settings of a demo run, which are also its command-line options, and the numbers that follow from them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, Self

from lightning_mp.accumulation.schedule import Thresholds
from lightning_mp.accumulation.step_estimate import estimate_steps
from lightning_mp.demo.model import GPTConfig, config_for_parameters
from lightning_mp.planning import tokens_for

__all__ = ["BLOCK_TOKENS", "Settings", "flag", "peak_learning_rate"]

PRECISIONS = ("32-true", "tf32", "bf16-mixed", "16-mixed", "bf16-true", "16-true", "fp8")
#: Those that Lightning has, too.
STOCK_PRECISIONS = ("32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true")
#: Those with a loss scale, so that steps may be skipped.
SCALED_PRECISIONS = ("16-mixed", "16-true")

BLOCK_TOKENS = 128

#: Micro-batches per optimizer step, by the step from which on: small batches while the loss falls fast, larger ones
#: later (McCandlish et al. 2018, arXiv:1812.06162: the useful batch size grows as the loss falls).
ACCUMULATION: Mapping[int, int] = {0: 1, 200: 2}

CLIP_NORM = 1.0  # Brown et al. 2020 (arXiv:2005.14165), appendix B

#: Of the learning-rate schedule.
WARMUP_SHARE = 0.05

_VALIDATIONS = 12


def _setting(default: Any, help: str, *, group: str = "model", **argparse_options: Any) -> Any:
    return field(default=default, metadata={"group": group, "help": help, **argparse_options})


def flag(setting: str) -> str:
    """The command-line option of a setting."""
    return "--" + setting.replace("_", "-")


@dataclass(frozen=True)
class Settings:
    """Everything that the final weights depend on. What a resumed run may change is in the group "layout".

    Raises:
        ValueError: If a value is not allowed; the message names the command-line option.
    """

    precision: str = _setting(
        "bf16-mixed",
        "bf16-true and 16-true keep fp32 masters; on a CPU fp16 is slow and fp8 emulated",
        choices=PRECISIONS,
    )
    storage: str = _setting("fp32", "master weights of bf16-true", choices=("fp32", "remainder"))
    recipe: str = _setting("rowwise", "scaling of fp8", choices=("rowwise", "tensorwise", "rowwise_with_gw_hp"))
    params: int = _setting(100_000, "size of the model", metavar="N", type=int)
    tokens_per_parameter: float = _setting(20.0, "token budget; 20 is Chinchilla's", metavar="R", type=float)
    batch_size: int = _setting(8, "sequences per micro-batch and data-parallel rank", metavar="B", type=int)
    text: str | None = _setting(None, "train on this file instead of the standard library", metavar="FILE")
    seed: int = _setting(0, "of the weights and the order of the text", metavar="S", type=int)
    inject_overflow: int | None = _setting(
        None, "make a gradient infinite at this optimizer step, from 0", metavar="STEP", type=int
    )
    compare: bool = _setting(
        False,
        "train once more with Lightning's own plugin for the same precision, and print both results; both runs "
        "accumulate a constant number of micro-batches",
        action="store_true",
    )
    devices: int = _setting(1, "number of GPUs or CPU processes", group="layout", metavar="N", type=int)
    strategy: str = _setting(
        "auto",
        "auto (ddp on several devices), ddp, fsdp (GPUs only), model_parallel (Lightning's FSDP2), mp_fsdp2, "
        "mp_pipeline, mp_ddp_bf16_reduce, mp_ddp_fp16_reduce, or any other that Lightning knows",
        group="layout",
        metavar="NAME",
    )
    tensor_parallel: int = _setting(1, "devices per layer, with mp_fsdp2", group="layout", metavar="N", type=int)
    stages: int | None = _setting(
        None, "stages of mp_pipeline; else one per device", group="layout", metavar="N", type=int
    )

    def __post_init__(self) -> None:
        for name in ("params", "tokens_per_parameter", "batch_size", "devices", "tensor_parallel", "stages"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{flag(name)} {value:g} is not allowed: give a positive number.")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"--seed {self.seed} is not allowed: give a number from 0 to 4294967295.")
        if self.storage == "remainder" and self.precision != "bf16-true":
            raise ValueError(
                f"--storage remainder keeps the 16 bits that a bf16 weight lacks, and --precision {self.precision} has "
                "no bf16 weights: add --precision bf16-true."
            )
        if self.recipe != "rowwise" and self.precision != "fp8":
            raise ValueError(f"--recipe is about fp8, and --precision is {self.precision}: add --precision fp8.")
        self._check_layout()
        if self.compare and self.precision not in STOCK_PRECISIONS:
            raise ValueError(
                f"--compare runs Lightning's own plugin, and it has none for {self.precision}: choose --precision "
                f"{', '.join(STOCK_PRECISIONS[:-1])} or {STOCK_PRECISIONS[-1]}."
            )
        if self.compare and (self.devices > 1 or self.strategy != "auto"):
            raise ValueError("--compare runs on one device: leave --devices and --strategy out.")
        if self.budget_tokens < self.micro_batch_tokens:
            raise ValueError(
                f"the budget of {self.budget_tokens:,} tokens ({self.tokens_per_parameter:g} for each of "
                f"{self.model.parameters:,} parameters) is smaller than one batch of {self.micro_batch_tokens:,} "
                "tokens: raise --tokens-per-parameter or --params, or lower --batch-size or --devices."
            )
        step, steps = self.inject_overflow, self.optimizer_steps
        if step is not None and not 0 <= step < steps:
            raise ValueError(
                f"--inject-overflow {step} is not allowed: this run has {steps} optimizer steps, so give a number from "
                f"0 to {steps - 1}."
            )
        if step is not None and self.precision not in SCALED_PRECISIONS:
            raise ValueError(
                f"--inject-overflow shows how a loss scaler skips a step, and {self.precision} has none: "
                f"add --precision {' or '.join(SCALED_PRECISIONS)}."
            )

    def _check_layout(self) -> None:
        if self.tensor_parallel > 1 and self.strategy not in ("auto", "mp_fsdp2"):
            raise ValueError(
                f"--tensor-parallel {self.tensor_parallel} needs --strategy mp_fsdp2, got {self.strategy}: leave "
                "--strategy out, or --tensor-parallel."
            )
        if self.stages is not None and self.strategy != "mp_pipeline":
            raise ValueError(f"--stages is about --strategy mp_pipeline, and that is {self.strategy}: leave one out.")
        for name in ("tensor_parallel", "stages"):
            if self.devices % (getattr(self, name) or 1):
                parts = getattr(self, name)
                raise ValueError(
                    f"{flag(name)} {parts} needs a multiple of {parts} devices, got --devices {self.devices}."
                )
        # The strategies say the same, but only once all processes have started.
        if self.model.heads % self.tensor_parallel:
            raise ValueError(
                f"--tensor-parallel {self.tensor_parallel} does not divide the {self.model.heads} attention heads of a "
                f"model of {self.model.parameters:,} parameters: choose another number, or raise --params."
            )
        stages, layers = self.devices // self.replicas, self.model.layers + 3  # embedding, norm and head besides
        if self.strategy == "mp_pipeline" and stages > layers:
            raise ValueError(
                f"--strategy mp_pipeline cannot split the {layers} layers of a model of {self.model.parameters:,} "
                f"parameters into {stages} stages: give --stages {layers} or less, or raise --params."
            )

    @property
    def replicas(self) -> int:
        """Copies of the model, each with its own part of every batch."""
        if self.strategy == "mp_pipeline":
            return self.devices // (self.stages or self.devices)
        return self.devices // self.tensor_parallel

    @property
    def micro_batch_tokens(self) -> int:
        """Tokens of one micro-batch over all copies of the model."""
        return self.batch_size * self.replicas * BLOCK_TOKENS

    @cached_property
    def model(self) -> GPTConfig:
        """The shape of the model."""
        return config_for_parameters(self.params, block_tokens=BLOCK_TOKENS)

    @cached_property
    def budget_tokens(self) -> int:
        """Tokens to train on, over all ranks."""
        return tokens_for(self.model.parameters, self.tokens_per_parameter)

    @property
    def micro_batches(self) -> int:
        """Micro-batches of the whole run per rank; the last one is trimmed to the budget."""
        return -(-self.budget_tokens // self.micro_batch_tokens)

    @property
    def accumulation(self) -> dict[int, int]:
        """Micro-batches per optimizer step; in a comparison constant, as Lightning has no schedule by step."""
        return {0: max(ACCUMULATION.values())} if self.compare else dict(ACCUMULATION)

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps of the whole run."""
        return int(estimate_steps(Thresholds(self.accumulation, "step"), self.micro_batches, max_epochs=1))

    @property
    def validate_every_micro_batches(self) -> int:
        """How often to validate; besides, once at the end."""
        return -(-self.micro_batches // _VALIDATIONS)

    @classmethod
    def resume(cls, saved: Mapping[str, Any], given: Mapping[str, Any]) -> Self:
        """The saved settings of a run to go on with; of those given, only the group "layout" may differ from them.

        Raises:
            ValueError: If another setting differs, or the batches cannot be divided over so many devices.

        Example:
            >>> Settings.resume({"seed": 0}, {"seed": 3})
            Traceback (most recent call last):
            ValueError: --seed 3 differs from the run to resume, which has 0: leave --seed out to go on with that run,
            or start a new one without --resume.
        """
        kept = cls(**saved)
        layout = {setting.name for setting in fields(cls) if setting.metadata["group"] == "layout"}
        for name, value in given.items():
            if name not in layout and getattr(kept, name) != value:
                raise ValueError(
                    f"{flag(name)} {value} differs from the run to resume, which has {getattr(kept, name)}: leave "
                    f"{flag(name)} out to go on with that run, or start a new one without --resume."
                )
        smallest = replace(kept, **{name: given[name] for name in layout & given.keys()}, batch_size=1)
        sequences = kept.batch_size * kept.replicas
        batch_size, rest = divmod(sequences, smallest.replicas)
        if rest or not batch_size:
            raise ValueError(
                f"the run to resume has batches of {sequences} sequences, which {smallest.replicas} copies of the "
                "model cannot share evenly: choose --devices so that they can."
            )
        return replace(smallest, batch_size=batch_size)


def peak_learning_rate(parameters: int) -> float:
    """Peak learning rate for AdamW by model size, ``6e-4 * (124M / parameters) ** (1/3)``, at most 1e-2.

    Anchored at 6e-4 for 124M parameters (Brown et al. 2020, arXiv:2005.14165, table 2.1, GPT-3 Small). The exponent
    makes it 6.4e-3 at 0.1M, which ended lower there than 4e-3 and 1e-2.

    Example:
        >>> round(peak_learning_rate(124_337_664), 6)
        0.0006
    """
    return min(1e-2, 6e-4 * math.cbrt(124_337_664 / parameters))
