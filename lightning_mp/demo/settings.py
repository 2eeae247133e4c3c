"""What decides the outcome of a demo run, and how a resumed run gets the same."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

__all__ = ["FLAGS", "PRECISIONS", "Settings"]

PRECISIONS = ("32-true", "bf16-mixed", "16-mixed")

#: The command-line option of every setting.
FLAGS = {
    "precision": "--precision",
    "parameters": "--params",
    "tokens_per_parameter": "--tokens-per-parameter",
    "batch_size": "--batch-size",
    "text": "--text",
    "seed": "--seed",
    "devices": "--devices",
    "inject_overflow": "--inject-overflow",
}


@dataclass(frozen=True)
class Settings:
    """Everything that the final weights depend on.

    Attributes:
        precision: One of :data:`PRECISIONS`.
        parameters: Wished model size.
        tokens_per_parameter: Size of the budget; 20 is Chinchilla's ratio.
        batch_size: Sequences per micro-batch and device.
        text: Path of a text; None takes the standard library's source.
        seed: For the weights and the order of the text.
        devices: Number of processes, one device each.
        inject_overflow: Optimizer step at which one gradient becomes infinite, or None.

    Raises:
        ValueError: If a value is not allowed; the message names the command-line option.
    """

    precision: str = "bf16-mixed"
    parameters: int = 100_000
    tokens_per_parameter: float = 20.0
    batch_size: int = 8
    text: str | None = None
    seed: int = 0
    devices: int = 1
    inject_overflow: int | None = None

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS:
            raise ValueError(
                f"--precision {self.precision} is unknown: choose {', '.join(PRECISIONS[:-1])} or {PRECISIONS[-1]}."
            )
        for name in ("parameters", "tokens_per_parameter", "batch_size", "devices"):
            value = getattr(self, name)
            if not 0 < value < float("inf"):
                raise ValueError(f"{FLAGS[name]} {value:g} is not allowed: give a positive number.")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"--seed {self.seed} is not allowed: give a number from 0 to 4294967295.")
        if self.inject_overflow is None:
            return
        if self.inject_overflow < 0:
            raise ValueError(
                f"--inject-overflow {self.inject_overflow} is not allowed: give an optimizer step, counted from 0."
            )
        if self.precision != "16-mixed":
            raise ValueError(
                f"--inject-overflow shows how a loss scaler skips a step, and {self.precision} has none: "
                "add --precision 16-mixed."
            )

    @classmethod
    def resolve(cls, given: Mapping[str, Any], saved: Mapping[str, Any] | None = None) -> Self:
        """Settings from the options that were given, on top of the defaults or of those of the run to resume.

        Args:
            given: Values by name, only those that the user gave.
            saved: :meth:`as_dict` of the run to resume, or None for a new run.

        Raises:
            ValueError: If a given value differs from the saved one.

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
        settings = cls(**{field.name: saved[field.name] for field in fields(cls) if field.name in saved})
        for name, value in given.items():
            kept = getattr(settings, name)
            if kept != value:
                raise ValueError(
                    f"{FLAGS[name]} {value} differs from the run to resume, which has {kept}: leave {FLAGS[name]} out "
                    "to go on with that run, or start a new one without --resume."
                )
        return settings

    def as_dict(self) -> dict[str, Any]:
        """Plain values by name."""
        return asdict(self)
