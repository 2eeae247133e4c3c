"""How far a run is with accumulation, besides the totals of its token counter: one value that never changes.

``lightning_mp.accumulation.transitions`` has the functions from one state to the next. A checkpoint holds the run's own
numbers; those of an open window are saved with its gradient
(:class:`lightning_mp.accumulation.partial_state.PartialAccumulation`), because without that the window is lost.
"""

from collections.abc import Set
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

import lightning.pytorch as pl

from lightning_mp.accumulation.schedule import Progress
from lightning_mp.core.saved_state import COUNT, FLAG, POSITIVE, checked_state, or_none
from lightning_mp.distributed.data_ranks import num_data_ranks
from lightning_mp.tokens.counter import AccumulationTotals, TokenCounter
from lightning_mp.tokens.loss_weighting import Measure

__all__ = ["AccumulationState", "DataLayout", "MicroBatch", "Window"]


@dataclass(frozen=True)
class DataLayout:
    """How a batch of all ranks is made up.

    Attributes:
        data_ranks: ranks that see different data.
        batch_size: samples that the data loader gives each of them; None where it has no such attribute.
    """

    data_ranks: int
    batch_size: int | None

    @classmethod
    def of(cls, trainer: "pl.Trainer") -> Self:
        """That of a Trainer whose data are set up."""
        batch_size = getattr(trainer.train_dataloader, "batch_size", None)
        return cls(num_data_ranks(trainer), batch_size if isinstance(batch_size, int) and batch_size > 0 else None)

    def ratio_to(self, other: "DataLayout") -> float:
        """How many times as large a micro-batch over all ranks is as in another layout.

        Example:
            >>> DataLayout(2, 4).ratio_to(DataLayout(1, 4)), DataLayout(2, 2).ratio_to(DataLayout(1, 4))
            (2.0, 1.0)
        """
        ranks = self.data_ranks / other.data_ranks
        known = self.batch_size is not None and other.batch_size is not None
        return ranks * self.batch_size / other.batch_size if known else ranks  # type: ignore[operator]  # both known


@dataclass(frozen=True)
class MicroBatch:
    """What is known of a micro-batch when it begins.

    Attributes:
        measure: its items and tokens on this rank, after it was trimmed.
        ends_run: the token budget ends in it.
        ends_epoch: it is the last of its epoch.
        another_epoch_follows: and that epoch is not the last of the run.
        is_repeated: it is not of the first epoch.
    """

    measure: Measure
    ends_run: bool = False
    ends_epoch: bool = False
    another_epoch_follows: bool = False
    is_repeated: bool = False


@dataclass(frozen=True)
class Window:
    """The micro-batches of one optimizer step.

    Attributes:
        planned: micro-batches that it is to have.
        position: those that are over.
        is_open: the last one left it open.
        closes: the optimizer steps after the micro-batch at hand.
        totals: of those that came to backward on this rank; None once the optimizer step has taken them.
    """

    planned: int = 1
    position: int = 0
    is_open: bool = False
    closes: bool = False
    totals: AccumulationTotals | None = None


@dataclass(frozen=True)
class AccumulationState:
    """Where a run stands.

    Attributes:
        reference_items: what the run's first micro-batch weighs on rank 0; None before it.
        layout: the data's layout in which the sizes below were measured; None before the first micro-batch.
        micro_batch_samples: samples of the first micro-batch in that layout, over all ranks; 0 if it is not needed.
        micro_batch_tokens: the same for tokens, padding included.
        budget_reached: whether the run has ended on its budget.
        end_tokens: where this fit ends, if not where its settings say; it is saved by the callback that asked for it.
        window: the window at hand, or the last one.
        micro_batch: the micro-batch at hand, or the last one.
    """

    reference_items: float | None = None
    layout: DataLayout | None = None
    micro_batch_samples: int = 0
    micro_batch_tokens: int = 0
    budget_reached: bool = False
    end_tokens: int | None = None
    window: Window = Window()
    micro_batch: MicroBatch | None = None

    def changed(self, **changes: Any) -> "AccumulationState":
        """The state with other values, as ``dataclasses.replace``, with a third of its Python calls."""
        made = object.__new__(AccumulationState)
        vars(made).update(vars(self))
        vars(made).update(changes)
        return made

    def in_layout(self, layout: DataLayout) -> "AccumulationState":
        """The state for a run that goes on in a layout: in another one, sizes are measured again."""
        if self.layout in (None, layout):
            return replace(self, layout=layout)
        return replace(self, layout=layout, micro_batch_samples=0, micro_batch_tokens=0)

    def measured(self, samples: int, tokens: int) -> "AccumulationState":
        """The state once the first micro-batch was seen."""
        return replace(self, micro_batch_samples=samples, micro_batch_tokens=tokens)

    def lacks_sizes(self, units: Set[str]) -> bool:
        """Whether a schedule in these units needs the size of a micro-batch, and it is not known."""
        return bool(units & {"sample", "token"}) and not self.micro_batch_samples and not self.micro_batch_tokens

    def progress(self, counter: TokenCounter, *, epoch: int, step: int) -> Progress:
        """How far the run is, for a schedule; ``epoch`` and ``step`` as in :class:`Progress`."""
        return Progress(
            epoch=epoch,
            step=step,
            samples=counter.samples_before_last_window,
            tokens=counter.tokens_before_last_window,
            micro_batch_samples=self.micro_batch_samples,
            micro_batch_tokens=self.micro_batch_tokens,
        )

    def state_dict(self) -> dict[str, Any]:
        """Where the run stands, for a checkpoint."""
        return {
            "reference_items": self.reference_items,
            "layout": None if self.layout is None else asdict(self.layout),
            "micro_batch_samples": self.micro_batch_samples,
            "micro_batch_tokens": self.micro_batch_tokens,
            "budget_reached": self.budget_reached,
        }

    @classmethod
    def read(cls, saved: Any) -> Self:
        """From a checkpoint.

        Raises:
            ValueError: if an entry is missing or cannot be.
        """
        kinds = {
            "reference_items": or_none(POSITIVE),
            "micro_batch_samples": COUNT,
            "micro_batch_tokens": COUNT,
            "budget_reached": FLAG,
        }
        state = checked_state(saved, kinds, "accumulation windows")
        layout = state.get("layout")
        if layout is not None:
            ranks = {"data_ranks": POSITIVE, "batch_size": or_none(POSITIVE)}
            layout = DataLayout(**checked_state(layout, ranks, "the layout of data over ranks"))
        return cls(layout=layout, **{name: state[name] for name in kinds})
