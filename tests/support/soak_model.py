"""What must hold of a run that is interrupted, resumed elsewhere and rescheduled: plain numbers and plain PyTorch.

Nothing of ``lightning_mp`` is used here. :class:`Run` is a run as it should be; :meth:`Run.micro_batch` takes it one
micro-batch further, and a deep copy of it is a checkpoint.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from small_models import TokenModel, token_batches
from torch import Tensor, nn

ROWS_PER_RANK = 2
SCALE, MIN_SCALE, MAX_SCALE, GROWTH_INTERVAL = 2.0**9, 2.0**-4, 2.0**12, 4
PEAK_RATE, MOMENTUM = 0.3, 0.9
BUDGET_TOKENS = 1_000_000
#: Sequences of one to six tokens.
SEQUENCES = [row for batch in token_batches([2 + 3 * i % 11 for i in range(90)]) for row in zip(*batch, strict=True)]


def rate(fraction: float) -> float:
    """The factor of the peak learning rate after this share of the budget; steep, so that a wrong share is seen."""
    return 1.0 / (1.0 + 400.0 * fraction)


def rows(first: int, count: int) -> list[tuple[Tensor, Tensor]]:
    """Sequences and labels of the endless data."""
    return [SEQUENCES[i % len(SEQUENCES)] for i in range(first, first + count)]


class Stream:
    """The data from one row on; ranks together see them in order, however many they are."""

    def __init__(self, first: int, rank: int, ranks: int) -> None:
        self.first, self.rank, self.ranks = first, rank, ranks

    def __iter__(self) -> Iterator[list[Tensor]]:
        first = self.first
        while True:
            own = rows(first + self.rank * ROWS_PER_RANK, ROWS_PER_RANK)
            width = max(len(x) for x, _ in own)
            yield [
                torch.stack([nn.functional.pad(x, (0, width - len(x))) for x, _ in own]),
                torch.stack([nn.functional.pad(y, (0, width - len(y)), value=-100) for _, y in own]),
            ]
            first += self.ranks * ROWS_PER_RANK


@dataclass
class Run:
    """A run, exactly where it is."""

    weights: list[Tensor]
    momentum: list[Tensor | None]
    scaled: bool
    scale: float = SCALE
    since_overflow: int = 0
    next_row: int = 0
    attempts: int = 0
    skipped: int = 0
    tokens: int = 0
    skipped_tokens: int = 0
    planned: int = 0
    """Micro-batches of the window that is open; 0 between windows."""
    done: int = 0
    open_rows: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    open_is_finite: bool = True
    way: float = 0.0
    """How far the weights have gone, as a sum over steps."""

    @classmethod
    def start(cls, *, scaled: bool) -> "Run":
        """Before the first step."""
        weights = [p.detach().clone() for p in TokenModel().parameters()]
        return cls(weights, [None] * len(weights), scaled)

    @property
    def is_inside(self) -> bool:
        """Whether a window is open."""
        return self.done > 0

    def micro_batch(self, ranks: int, schedule: Mapping[int, int], *, finite: bool = True) -> tuple[bool, float] | None:
        """The next one. Where it ends a window: whether the step is made, and the rate that it has or would have."""
        if not self.is_inside:
            self.planned = next(length for step, length in sorted(schedule.items())[::-1] if step <= self.attempts)
        count = ranks * ROWS_PER_RANK
        self.open_rows += rows(self.next_row, count)
        self.next_row += count
        self.done += 1
        self.open_is_finite &= finite
        return self._attempt() if self.done >= self.planned else None

    def _attempt(self) -> tuple[bool, float]:
        labels = sum(int((y != -100).sum()) for _, y in self.open_rows)
        lr = PEAK_RATE * rate((self.tokens - self.skipped_tokens) / BUDGET_TOKENS)
        stepped = self.open_is_finite
        if stepped:
            self._step(self._gradients(labels), lr)
        self.tokens += labels
        self.attempts += 1
        self.skipped += not stepped
        self.skipped_tokens += 0 if stepped else labels
        self._update_scale(stepped)
        self.planned = self.done = 0
        self.open_rows, self.open_is_finite = [], True
        return stepped, lr

    def _gradients(self, labels: int) -> list[Tensor]:
        """The mean over all tokens of the window at once."""
        embedding, weight, bias = (w.requires_grad_() for w in self.weights)
        losses = [
            nn.functional.cross_entropy(embedding[x] @ weight.T + bias, y, reduction="sum") for x, y in self.open_rows
        ]
        return list(torch.autograd.grad(sum(losses) / labels, [embedding, weight, bias]))

    def _step(self, gradients: list[Tensor], lr: float) -> None:
        with torch.no_grad():
            for place, gradient in enumerate(gradients):
                before = self.momentum[place]
                velocity = gradient if before is None else MOMENTUM * before + gradient
                self.momentum[place] = velocity
                self.weights[place] = self.weights[place].detach() - lr * velocity
                self.way += float((lr * velocity).norm())

    def _update_scale(self, stepped: bool) -> None:
        if not self.scaled:
            return
        self.since_overflow = self.since_overflow + 1 if stepped else 0
        if not stepped:
            self.scale = max(self.scale / 2, MIN_SCALE)
        elif self.since_overflow == GROWTH_INTERVAL:
            self.scale, self.since_overflow = min(self.scale * 2, MAX_SCALE), 0
