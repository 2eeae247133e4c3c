"""The run's account of tokens: global integers, exact, read from the device one window late."""

from collections import deque
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import Tensor

from lightning_mp.ground.core.devices import accumulation_dtype
from lightning_mp.ground.core.host_copy import HostCopy
from lightning_mp.ground.core.saved_state import COUNT, checked_state

#: Entries of a counter's state that are parts of its ``tokens``.
_PARTS = ("skipped_tokens", "repeated_tokens", "last_window_tokens")

#: Length of the vector that a window adds over all ranks, see :meth:`AccumulationTotals.tensor`.
NUM_TOTALS = 8
#: In that vector: what micro-batches weigh, how many had a loss, and how many of these losses were unknown.
ITEMS, LARGEST, LOSSES, UNKNOWN = 0, 5, 6, 7


@dataclass(frozen=True, eq=False)
class AccumulationTotals:
    """Running totals of one window on one rank, see :meth:`tensor`.

    Numbers that the host knows stay on the host; counts made on the device stay there, as int64, so that nothing waits.
    """

    micro_batches: int = 0  # micro-batches that were trained on
    host: tuple[float, ...] = (0.0,) * NUM_TOTALS  # what the host knows of each entry of `tensor`
    # what was counted on the device, to be added to it; None where nothing was
    device: tuple[Tensor | None, ...] = (None,) * NUM_TOTALS

    def plus(
        self,
        items: float | Tensor,
        tokens: float | Tensor,
        input_tokens: int,
        samples: int = 0,
        nonpad_tokens: float | Tensor = 0,
        most_tokens: int | None = None,
        *,
        losses: float = 1.0,
        unknown: float | Tensor = 0.0,
        micro_batches: int = 1,
    ) -> "AccumulationTotals":
        """The totals with one more micro-batch that was trained on; None for as many as there are in the inputs."""
        host, device = list(self.host), list(self.device)
        for index, number in enumerate((items, tokens, input_tokens, samples, nonpad_tokens, 0, losses, unknown)):
            if isinstance(number, Tensor):
                sum_before = device[index]
                device[index] = number if sum_before is None else sum_before + number
            else:
                host[index] += number
        host[LARGEST] = max(host[LARGEST], input_tokens if most_tokens is None else most_tokens)
        return AccumulationTotals(self.micro_batches + micro_batches, tuple(host), tuple(device))

    def tensor(self, device: torch.device) -> Tensor:
        """Items; target, input tokens; samples; non-pad tokens; largest micro-batch; losses, unknown ones; ``[8]``.

        Summed over ranks, the sixth bounds the largest micro-batch over all ranks from above.
        """
        dtype = accumulation_dtype(device)
        return torch.stack([self._entry(index, device, dtype) for index in range(NUM_TOTALS)])

    def number(self, index: int) -> float | Tensor:
        """One entry, of which a part may be on the device."""
        counted = self.device[index]
        return self.host[index] if counted is None else self.host[index] + counted

    def tokens(self, device: torch.device) -> Tensor:
        """The target tokens, a scalar tensor on ``device``."""
        return self._entry(1, device, accumulation_dtype(device))

    def _entry(self, index: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        # `full` is a kernel; `torch.tensor(number, device=...)` would make the host wait for the device.
        known = torch.full((), self.host[index], dtype=dtype, device=device)
        counted = self.device[index]
        return known if counted is None else known + counted.to(device=device, dtype=dtype)


@dataclass
class _Unread:
    totals: HostCopy
    micro_batches: int
    repeated: bool
    skipped: bool = False


@dataclass(eq=False)
class TokenCounter:
    """Global totals of all windows closed so far. They do not depend on the number of ranks."""

    tokens: int = 0
    input_tokens: int = 0
    nonpad_tokens: int = 0
    samples: int = 0
    skipped_tokens: int = 0
    repeated_tokens: int = 0
    windows: int = 0
    largest_micro_batch: int = 0
    last_window_tokens: int = 0
    last_window_samples: int = 0

    def __post_init__(self) -> None:
        self._unread: deque[_Unread] = deque()
        #: Non-pad tokens of skipped steps since this object was made; a checkpoint holds none of it.
        self.skipped_nonpad_tokens = 0
        self._last_window_nonpad_tokens = 0
        self._last_window_was_skipped = False

    @property
    def last_window_was_skipped(self) -> bool:
        """Whether the step of the window closed last is known to have been skipped."""
        return self._last_window_was_skipped

    @property
    def unread_micro_batches(self) -> int:
        """Micro-batches of closed windows whose totals are still pending."""
        return sum(window.micro_batches for window in self._unread)

    @property
    def tokens_before_last_window(self) -> int:
        """Tokens of all windows but the one closed last: the same whether or not that one has been read."""
        return self.tokens if self._unread else self.tokens - self.last_window_tokens

    @property
    def samples_before_last_window(self) -> int:
        """Samples of all windows but the one closed last."""
        return self.samples if self._unread else self.samples - self.last_window_samples

    def close_window(self, totals: Tensor, micro_batches: int, *, repeated: bool = False) -> HostCopy:
        """Takes the totals of a window, summed over all ranks; they are read one window late, on a CPU immediately."""
        self.flush_pending()
        self._last_window_was_skipped = False
        copy = HostCopy(totals)
        self._unread.append(_Unread(copy, micro_batches, repeated))
        if copy.is_there:
            self.flush_pending()
        return copy

    def skip_last_window(self) -> None:
        """The optimizer step of the window that was closed last turned out to be skipped."""
        self._last_window_was_skipped = True
        if self._unread:
            self._unread[-1].skipped = True
        else:
            self.skipped_tokens += self.last_window_tokens
            self.skipped_nonpad_tokens += self._last_window_nonpad_tokens

    def flush_pending(self) -> None:
        """Reads everything that is still pending."""
        while self._unread:
            window = self._unread.popleft()
            _, tokens, input_tokens, samples, nonpad, largest = map(round, window.totals.read()[: LARGEST + 1])
            self.last_window_tokens, self.last_window_samples = tokens, samples
            self.tokens += tokens
            self.input_tokens += input_tokens
            self.nonpad_tokens += nonpad
            self.samples += samples
            self.skipped_tokens += tokens * window.skipped
            self.skipped_nonpad_tokens += nonpad * window.skipped
            self._last_window_nonpad_tokens = nonpad
            self.repeated_tokens += tokens * window.repeated
            self.windows += 1
            self.largest_micro_batch = max(self.largest_micro_batch, largest)

    def forget_sizes(self) -> None:
        """Micro-batches to come have other sizes than those before."""
        self.largest_micro_batch = 0

    def state_dict(self) -> dict[str, Any]:
        """All totals, settled."""
        self.flush_pending()
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from saved totals."""
        names = [entry.name for entry in fields(self)]
        state = checked_state(state, dict.fromkeys(names, COUNT), "the token counter")
        if too_large := [name for name in _PARTS if state[name] > state["tokens"]]:
            raise ValueError(
                f"The checkpoint's state of the token counter cannot be loaded: {too_large[0]!r} is"
                f" {state[too_large[0]]:,}, more than its {state['tokens']:,} tokens. Nothing was changed. Resume from"
                " another checkpoint."
            )
        self._unread.clear()
        for name in names:
            setattr(self, name, state[name])
