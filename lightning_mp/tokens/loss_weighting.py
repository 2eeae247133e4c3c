"""What a micro-batch weighs in the mean of its window: itself, its samples or its tokens."""

from collections.abc import Callable, Set
from dataclasses import dataclass
from typing import Any, Literal, get_args

from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_mp.tokens import batch_tokens
from lightning_mp.tokens.count_unit import samples_of

WeightBy = Literal["auto", "batch", "sample", "token"]

#: From a batch to its number of items on this rank: an int, or an integer scalar tensor on any device.
# jsonargparse compares return types by equality, hence the union.
CountFunction = Callable[[Any], int] | Callable[[Any], Tensor] | Callable[[Any], int | Tensor]


@dataclass(frozen=True)
class Measure:
    """One micro-batch on this rank."""

    items: int | Tensor  # what it weighs
    tokens: int | Tensor  # its target tokens; 0 if they are not counted
    input_tokens: int  # tokens in the inputs, padding included
    most_tokens: int  # an upper bound for `tokens` that the host knows from the shape
    samples: int = 0  # its samples; 0 if they are not counted
    divisor: int | Tensor | None = None  # what its loss was divided by, if that is not `items`
    nonpad_tokens: int | Tensor = 0  # tokens that an attention mask does not hide; 0 if tokens are not counted


@dataclass(frozen=True)
class Weighting:
    """Measures micro-batches."""

    weight_by: WeightBy | None = "auto"
    count: CountFunction | None = None
    count_weighs: bool = False  # micro-batches weigh what `count` returns, not their labels or what a loss shows
    counts_inputs: bool = False  # inputs are what `count` returns, not the tokens that labels or a mask show
    shifted: bool = False
    counts_tokens: bool = True
    counts_samples: bool = False

    def __post_init__(self) -> None:
        if self.weight_by is not None and self.weight_by not in get_args(WeightBy):
            raise ValueError(f"weight_by={self.weight_by!r} is unknown; it must be one of {get_args(WeightBy)}.")
        if self.count is not None and not callable(self.count):
            raise ValueError(f"count={self.count!r} must be a function from a batch to its number of tokens.")

    def resolved(
        self, first_batch: Any, *, shifted: bool, needs_tokens: bool = False, needs_samples: bool = False
    ) -> "Weighting":
        """The weighting for a run: "auto" is settled, and what the first batch cannot give is refused."""
        if self.count is samples_of and (needs_tokens or self.weight_by == "token"):
            raise MisconfigurationException(
                "MFUMonitor(unit='sample') has the run counted in samples, and weight_by='token', a budget or a"
                " schedule in tokens has it counted in tokens. A run is counted in one of them: use MFUMonitor() for"
                " figures per token, or remove what counts tokens."
            )
        has_labels = batch_tokens.find_labels(first_batch) is not None
        has_tokens = has_labels or self.count is not None
        if not has_tokens and (needs_tokens or self.weight_by == "token"):
            raise MisconfigurationException(
                f"Tokens cannot be counted in a batch of type {type(first_batch).__name__!r}: batch['labels'] or"
                " batch[1] must be an integer tensor of two dimensions or more. Or pass count=, a function from a"
                " batch to its tokens (ChinchillaBudget: with landing='ceil')."
            )
        weight_by = self.weight_by
        if weight_by == "auto":
            weight_by = "token" if has_labels or self.count not in (None, samples_of) else "sample"
        return Weighting(
            weight_by,
            self.count,
            self.count_weighs,
            self.counts_inputs,
            shifted=shifted,
            counts_tokens=has_tokens,
            counts_samples=needs_samples or weight_by == "sample",
        )

    def measure(self, batch: Any) -> Measure:
        """Counts one micro-batch without waiting for the device."""
        tokens, most_tokens = self._tokens(batch) if self.counts_tokens else (0, 0)
        samples = batch_tokens.count_samples(batch) if self.counts_samples else 0
        items = {"token": self._weight(batch, tokens), "sample": samples, "batch": 1, None: 1}[self.weight_by]
        input_tokens = most_tokens
        nonpad_tokens = batch_tokens.nonpad_tokens(batch) if self.counts_tokens else 0
        if self.count is not None and self.counts_tokens:
            if not self.inputs_are_counted(batch):
                input_tokens = batch_tokens.shown_tokens(batch) or 0
            elif isinstance(nonpad_tokens, Tensor):
                nonpad_tokens = nonpad_tokens.clamp(max=input_tokens)  # a mask hides tokens, not what else is counted
        return Measure(
            items,
            tokens,
            input_tokens,
            most_tokens,
            samples,
            batch_tokens.declared_divisor(batch),
            input_tokens if nonpad_tokens is None else nonpad_tokens,
        )

    def inputs_are_counted(self, batch: Any) -> bool:
        """Whether `count` says how many tokens are in the inputs: a monitor's, or where nothing else shows them."""
        return self.count is not None and (self.counts_inputs or batch_tokens.shown_tokens(batch) is None)

    @property
    def counts_rows(self) -> bool:
        """Whether :meth:`takes_rows` can be true of any batch."""
        return self.weight_by == "sample" or self.count is samples_of or (self.counts_samples and self.count is None)

    def takes_rows(self, batch: Any) -> bool:
        """Whether samples matter, and only the first tensor shows how many a batch has."""
        if self.weight_by == "sample" or self.count is samples_of:
            return True
        return self.counts_rows and batch_tokens.find_labels(batch) is None

    def size(self, batch: Any, units: Set[str]) -> tuple[int, int]:
        """Samples, and tokens with padding or those of ``count``, of a batch on this rank; 0 for other units."""
        samples = batch_tokens.count_samples(batch) if "sample" in units else 0
        if "token" not in units:
            return samples, 0
        return samples, int(self.count(batch)) if self.count is not None else self._tokens(batch)[1]

    def _weight(self, batch: Any, tokens: int | Tensor) -> int | Tensor:
        """Target tokens, whatever a budget counts."""
        labels = batch_tokens.find_labels(batch)
        if self.count is None or self.count_weighs or labels is None:
            return tokens
        return batch_tokens.loss_bearing(labels, shifted=self.shifted).sum()

    def _tokens(self, batch: Any) -> tuple[int | Tensor, int]:
        labels = batch_tokens.find_labels(batch)
        if self.count is not None:
            counted = self.count(batch)
            if labels is not None and isinstance(counted, Tensor):
                return counted, labels.numel()  # reading the tensor would make the host wait for the device
            return counted, int(counted)
        if labels is None:
            raise MisconfigurationException(
                f"The first batch had token labels, this batch of type {type(batch).__name__!r} has none."
                " All batches of a run must have the same structure; otherwise pass count=."
            )
        return batch_tokens.loss_bearing(labels, shifted=self.shifted).sum(), labels.numel()
