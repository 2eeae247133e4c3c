"""How the batches of a run are split: what a user has set, and what the run has found out."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from lightning_mp.accumulation.batch_split import (
    Microbatch,
    SplitFunction,
    copied_containers,
    num_samples,
    split_batch,
    split_by,
)
from lightning_mp.accumulation.loss_form import LossForm

_MOST_COMPARISONS = 4


class Comparison(NamedTuple):
    """Samples of a batch, and the same in halves."""

    whole: Microbatch
    halves: list[Microbatch]
    fits: bool  # the whole, with what its backward would need


@dataclass
class SplitState:
    """The settings of ``MicroBatchOnOOM``, and what is kept in checkpoints."""

    split: SplitFunction | None  # a user's function
    min_size: int
    least: int = 1  # rows in a part: two where layers normalise over them
    size: int | None = None  # samples in a part at most; None while everything has fitted
    form: LossForm | None = None  # how the loss of a batch is made of its parts'; None before the first split

    def parts_of(self, batch: Any) -> list[Microbatch]:
        """The batch, or its parts; a training step may pop entries of each."""
        if self.size is None:
            return [Microbatch(copied_containers(batch), 1)]
        if self.split is not None:
            return split_by(self.split, copied_containers(batch), self.size)
        parts = split_batch(batch, self.size, self.least)
        return parts if len(parts) > 1 else [Microbatch(copied_containers(batch), parts[0].samples)]

    def samples_of(self, batch: Any) -> int:
        """How many samples a batch holds."""
        return num_samples(batch) if self.split is None else len(self.split(batch, 1))

    def comparisons(self, batch: Any) -> Iterator[Comparison]:
        """The first parts and their halves; of parts with one sample, two together, which need not fit."""
        assert self.size is not None
        fits = self.size > 1
        pieces = replace(self, size=max(self.size, 2)).parts_of(batch)
        for piece in [piece for piece in pieces if piece.samples > 1][:_MOST_COMPARISONS]:
            halves = replace(self, size=-(-piece.samples // 2), least=1)
            yield Comparison(piece, halves.parts_of(copied_containers(piece.batch)), fits)
