"""Finished runs in a file, one JSON line each, so that a comparison continues where it was killed."""

import hashlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

_FORMAT = "lightning_mp precision comparison"


@dataclass(frozen=True, slots=True)
class FinishedRun:
    """One run of one precision with one seed."""

    precision: str  # its name in the comparison
    seed: int  # of weights, data and dropout
    final_loss: float  # what is compared; NaN or infinite if the run diverged
    train_losses: tuple[float, ...]  # of each batch
    items: int  # tokens or samples trained on
    seconds: float  # of the fit
    weights_digest: str  # of the initial weights
    data_digest: str  # of the data

    def to_json(self) -> dict[str, Any]:
        """Plain values; null stands for a number that is not finite."""
        finite = [loss if math.isfinite(loss) else None for loss in (self.final_loss, *self.train_losses)]
        return {**asdict(self), "final_loss": finite[0], "train_losses": finite[1:]}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """The inverse of :meth:`to_json`."""
        losses = tuple(math.nan if loss is None else loss for loss in values["train_losses"])
        final = math.nan if values["final_loss"] is None else values["final_loss"]
        return cls(**{**values, "final_loss": final, "train_losses": losses})


class RunFile:
    """The runs of one comparison: a first line with its settings, then a line per run.

    A line is written at once and brought to the disk before the next run starts. What a kill left of a line is dropped.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self._path = path
        self._settings = dict(settings)
        self._key = hashlib.sha256(json.dumps(self._settings, sort_keys=True).encode()).hexdigest()[:16]
        header = {"format": _FORMAT, "comparison": self._key, "settings": self._settings}
        self._header = json.dumps(header, sort_keys=True)
        self._whole_bytes = 0
        self._runs = self._read()

    def read(self) -> list[FinishedRun]:
        """The runs that are complete, in the order in which they ended."""
        return list(self._runs)

    def append(self, run: FinishedRun) -> None:
        """Adds a run."""
        text = json.dumps({"comparison": self._key, **run.to_json()}) + "\n"
        if not self._whole_bytes:
            text = self._header + "\n" + text
        content = text.encode()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("ab") as file:
            file.truncate(self._whole_bytes)  # what a kill left of a line
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        self._whole_bytes += len(content)
        self._runs.append(run)

    def _read(self) -> list[FinishedRun]:
        try:
            content = self._path.read_bytes()
        except FileNotFoundError:
            return []
        lines = content.split(b"\n")[:-1]  # what follows the last newline is no whole line
        if not lines:
            if content and not self._header.encode().startswith(content):
                raise ValueError(self._refusal("it is not the file of a comparison"))
            return []
        self._check_header(lines[0])
        runs = []
        for number, line in enumerate(lines[1:], start=2):
            try:
                values = json.loads(line)
                if values.pop("comparison") != self._key:
                    raise ValueError
                runs.append(FinishedRun.from_json(values))
            except (ValueError, KeyError, TypeError, AttributeError):
                raise ValueError(self._refusal(f"line {number} cannot be read")) from None
        self._whole_bytes = len(content) - len(content.rpartition(b"\n")[2])
        return runs

    def _check_header(self, line: bytes) -> None:
        try:
            header = json.loads(line)
            known = header["format"] == _FORMAT
        except (ValueError, KeyError, TypeError):
            known = False
        if not known:
            raise ValueError(self._refusal("it is not the file of a comparison"))
        theirs = header["settings"]
        differing = [name for name in {**self._settings, **theirs} if theirs.get(name) != self._settings.get(name)]
        if differing:
            name = differing[0]
            raise ValueError(
                self._refusal(
                    f"its runs belong to another comparison: {name} was {theirs.get(name)!r} and is now"
                    f" {self._settings.get(name)!r}"
                )
            )

    def _refusal(self, reason: str) -> str:
        return f"`file` {self._path} cannot be continued: {reason}. Name another file, or delete this one."
