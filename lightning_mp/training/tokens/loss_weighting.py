"""What a micro-batch weighs in the mean of its window: itself, its samples or its tokens."""

import math
from collections.abc import Callable, Set
from dataclasses import dataclass, replace
from typing import Any, Literal

from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_mp.training.tokens import batch_tokens
from lightning_mp.training.tokens.count_unit import samples_of

WeightBy = Literal["auto", "batch", "sample", "token"]

#: From a batch to its number of items on this rank: an int, or an integer scalar tensor on any device.
# jsonargparse compares return types by equality, hence the union.
CountFunction = Callable[[Any], int] | Callable[[Any], Tensor] | Callable[[Any], int | Tensor]


@dataclass(frozen=True)
class Measure:
    """One micro-batch on this rank."""

    items: float | Tensor = 1  # what it weighs
    tokens: int | Tensor = 0  # its target tokens; 0 if they are not counted
    input_tokens: int = 0  # tokens in the inputs, padding included
    most_tokens: int = 0  # an upper bound for `tokens` that the host knows from the shape
    samples: int = 0  # its samples; 0 if they are not counted
    divisor: float | Tensor | None = None  # what its loss was divided by, if that is not `items`
    nonpad_tokens: int | Tensor = 0  # tokens that an attention mask does not hide; 0 if tokens are not counted
    wrong_count: str = ""  # what a user's function returned instead of a count; then `items` is 0


@dataclass(frozen=True)
class Weighting:
    """Measures micro-batches."""

    weight_by: WeightBy | None = "auto"
    count: CountFunction | None = None  # of the tokens of a batch, in place of its labels
    count_weighs: bool = False  # micro-batches weigh what `count` returns, not their labels or what a loss shows
    input_count: CountFunction | None = None  # of a monitor; where tokens cannot be counted, it stands in for them
    shifted: bool = False
    counts_tokens: bool = True
    counts_samples: bool = False

    def __post_init__(self) -> None:
        if self.count is not None and not callable(self.count):
            raise ValueError(f"count={self.count!r} must be a function from a batch to its number of tokens.")

    def joined_by(
        self,
        weight_by: WeightBy | None,
        count: CountFunction | None,
        *,
        count_weighs: bool = False,
        input_count: CountFunction | None = None,
    ) -> "Weighting":
        """The weighting of several callbacks, with what one more of them requests.

        Micro-batches are weighted by ``weight_by``, or only counted with None. ``count`` counts tokens in place of
        labels; with ``count_weighs`` it also says what micro-batches weigh. ``input_count`` is a monitor's, which
        changes neither.
        """
        if count is not None and self.count is not None and self.count is not count:
            raise MisconfigurationException("Two callbacks count tokens with different count= functions; use one.")
        return Weighting(
            self.weight_by if self.weight_by not in (None, "auto") or weight_by is None else weight_by,
            self.count if self.count is not None else count,
            self.count_weighs or (count_weighs and count is not None),
            self.input_count if self.input_count is not None else input_count,
        )

    def resolved(
        self,
        first_batch: Any,
        *,
        shifted: bool,
        tokens_for: str = "",
        needs_samples: bool = False,
        by_loss: bool = False,
    ) -> "Weighting":
        """The weighting for a run: "auto" is settled, and what the first batch cannot give is refused.

        ``tokens_for`` names the part that needs tokens, whatever micro-batches weigh. With ``by_loss`` losses show what
        micro-batches weigh, and batches are only counted.
        """
        has_tokens = self.has_tokens(first_batch)
        if not has_tokens and (tokens_for or self.weight_by == "token"):
            owner = tokens_for or "AccumulationScheduler(weight_by='token')"
            landing = " (and landing='ceil' or 'floor')" if tokens_for == "ChinchillaBudget" else ""
            raise batch_tokens.no_tokens_in(first_batch, owner, landing)
        weight_by = None if by_loss else self.weight_by
        if weight_by == "auto":
            weight_by = "token" if has_tokens else "sample"
        return replace(
            self,
            weight_by=weight_by,
            shifted=shifted,
            counts_tokens=has_tokens or self.input_count is not None,
            counts_samples=needs_samples or weight_by == "sample",
        )

    def has_tokens(self, batch: Any) -> bool:
        """Whether the tokens of a run can be counted in a batch; what a monitor counts are not these."""
        return self.count is not None or batch_tokens.find_labels(batch) is not None

    def measure(self, batch: Any) -> Measure:
        """Counts one micro-batch without waiting for the device."""
        counted = None if self.input_count is None else _counted(self.input_count, batch)
        wrong_count = ""
        try:
            tokens, most_tokens = self._tokens(batch, counted) if self.counts_tokens else (0, 0)
        except WrongCount as error:
            if not self.count_weighs:
                raise
            tokens, most_tokens, wrong_count = 0, 0, str(error)
        samples = batch_tokens.count_samples(batch) if self.counts_samples else 0
        nonpad_tokens = batch_tokens.nonpad_tokens(batch) if self.counts_tokens else 0
        divisor = batch_tokens.declared_divisor(batch)
        target_tokens, input_tokens = tokens, most_tokens if counted is None else counted[1]
        if self.count is not None or self.input_count is not None:
            target_tokens = self._target_tokens(batch, tokens)
            if not self.inputs_are_counted(batch):
                input_tokens = batch_tokens.shown_tokens(batch) or 0
            elif isinstance(nonpad_tokens, Tensor):
                nonpad_tokens = nonpad_tokens.clamp(max=input_tokens)  # a mask hides tokens, not what else is counted
        items = {"token": target_tokens, "sample": samples, "batch": 1, None: 1}[self.weight_by]
        nonpad_tokens = input_tokens if nonpad_tokens is None else nonpad_tokens
        return Measure(items, tokens, input_tokens, most_tokens, samples, divisor, nonpad_tokens, wrong_count)

    def inputs_are_counted(self, batch: Any) -> bool:
        """Whether a function says how many tokens are in the inputs: a monitor's, or where nothing else shows them."""
        return self.input_count is not None or (self.count is not None and batch_tokens.shown_tokens(batch) is None)

    def takes_rows(self, batch: Any) -> bool:
        """Whether samples matter, and only the first tensor shows how many a batch has."""
        if self.weight_by == "sample" or self.input_count is samples_of:
            return True
        return self.counts_samples and self.count is None and batch_tokens.find_labels(batch) is None

    def size(self, batch: Any, units: Set[str]) -> tuple[int, int]:
        """Samples, and tokens with padding or those of ``count``, of a batch on this rank; 0 for other units."""
        samples = batch_tokens.count_samples(batch) if "sample" in units else 0
        if "token" not in units:
            return samples, 0
        return samples, int(self.count(batch)) if self.count is not None else self._tokens(batch, None)[1]

    def _target_tokens(self, batch: Any, tokens: int | Tensor) -> int | Tensor:
        """What micro-batches weigh by tokens: those of the labels, whatever a budget counts."""
        labels = None if self.count is None or self.count_weighs else batch_tokens.find_labels(batch)
        return tokens if labels is None else batch_tokens.loss_bearing(labels, shifted=self.shifted).sum()

    def _tokens(self, batch: Any, counted: tuple[int | Tensor, int] | None) -> tuple[int | Tensor, int]:
        """Target tokens, and an upper bound for them; else what was ``counted`` in the inputs."""
        if self.count is not None:
            return _counted(self.count, batch)
        labels = batch_tokens.find_labels(batch)
        if labels is not None:
            return batch_tokens.loss_bearing(labels, shifted=self.shifted).sum(), labels.numel()
        if counted is not None:
            return counted
        raise MisconfigurationException(
            f"The first batch had token labels, this batch of type {type(batch).__name__!r} has none."
            " All batches of a run must have the same structure; otherwise pass count=."
        )


def _counted(count: CountFunction, batch: Any) -> tuple[int | Tensor, int]:
    """What a function counts, and an upper bound for it that does not wait for the device where labels give one.

    Raises:
        WrongCount: if it is no count.
    """
    counted: Any = count(batch)
    if isinstance(counted, Tensor):
        if counted.numel() != 1:
            raise WrongCount(f"count= returned a tensor of shape {list(counted.shape)}, which is no count")
        if counted.device.type == "cpu":
            counted = counted.reshape(1).tolist()[0]
    if not isinstance(counted, Tensor):
        if not isinstance(counted, int | float) or not 0 <= counted < math.inf:
            raise WrongCount(f"count= returned {counted!r}, which is no count")
        return int(counted), int(counted)
    labels = batch_tokens.find_labels(batch)
    return counted, labels.numel() if labels is not None else int(counted)


class WrongCount(ValueError):
    """A user's function returned something that is no count."""
