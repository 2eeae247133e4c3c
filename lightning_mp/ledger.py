"""The run's account of tokens: global integers, exact, read from the device one window late."""

from collections import deque
from typing import Any

import torch
from torch import Tensor

from lightning_mp.gradients import accumulation_dtype
from lightning_mp.host_copy import HostCopy

__all__ = ["TokenLedger", "WindowTotals"]


class WindowTotals:
    """Running totals of one window on one rank: items, loss-bearing and presented tokens, largest micro-batch.

    Numbers that the host knows stay on the host; counts made on the device stay there, as int64, so that nothing waits.
    """

    def __init__(self) -> None:
        self.micro_batches = 0
        self._host = [0.0, 0.0, 0.0, 0.0]
        self._device: list[Tensor | None] = [None, None, None, None]

    def add(self, items: float | Tensor, tokens: float | Tensor, presented_tokens: int) -> None:
        """Adds one micro-batch that was trained on."""
        self.micro_batches += 1
        for index, number in enumerate((items, tokens, presented_tokens)):
            if isinstance(number, Tensor):
                sum_before = self._device[index]
                self._device[index] = number if sum_before is None else sum_before + number
            else:
                self._host[index] += number
        self._host[3] = max(self._host[3], presented_tokens)

    @property
    def host_items(self) -> float | None:
        """The items, if the host knows them all."""
        return self._host[0] if self._device[0] is None else None

    def tensor(self, device: torch.device) -> Tensor:
        """Items, tokens, presented tokens, and those of the largest micro-batch, shape ``[4]``, on ``device``.

        Summed over ranks, the last one bounds the largest micro-batch over all ranks from above.
        """
        dtype = accumulation_dtype(device)
        return torch.stack([self._entry(index, device, dtype) for index in range(4)])

    def tokens(self, device: torch.device) -> Tensor:
        """The loss-bearing tokens, a scalar tensor on ``device``."""
        return self._entry(1, device, accumulation_dtype(device))

    def _entry(self, index: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        # `full` is a kernel; `torch.tensor(number, device=...)` would make the host wait for the device.
        known = torch.full((), self._host[index], dtype=dtype, device=device)
        counted = self._device[index]
        return known if counted is None else known + counted.to(device=device, dtype=dtype)


class TokenLedger:
    """Global totals of all windows closed so far. They do not depend on the number of ranks.

    Attributes:
        tokens: loss-bearing tokens.
        presented_tokens: tokens shown to the model, padding included.
        windows: windows closed.
        largest_micro_batch: upper bound of the presented tokens of the largest micro-batch over all ranks.
    """

    def __init__(self) -> None:
        self.tokens = 0
        self.presented_tokens = 0
        self.windows = 0
        self.largest_micro_batch = 0
        self._unread: deque[tuple[HostCopy, int]] = deque()

    @property
    def unread_micro_batches(self) -> int:
        """Micro-batches of closed windows whose totals are still on their way."""
        return sum(micro_batches for _, micro_batches in self._unread)

    def close_window(self, totals: Tensor, micro_batches: int) -> None:
        """Takes the totals of a window, already summed over all ranks, and reads those of the windows before."""
        self.settle()
        self._unread.append((HostCopy(totals), micro_batches))

    def settle(self) -> None:
        """Reads everything that is still on its way."""
        while self._unread:
            copy, _ = self._unread.popleft()
            _, tokens, presented_tokens, largest = (round(number) for number in copy.read())
            self.tokens += tokens
            self.presented_tokens += presented_tokens
            self.windows += 1
            self.largest_micro_batch = max(self.largest_micro_batch, largest)

    def state_dict(self) -> dict[str, Any]:
        """All totals, settled."""
        self.settle()
        return {
            "tokens": self.tokens,
            "presented_tokens": self.presented_tokens,
            "windows": self.windows,
            "largest_micro_batch": self.largest_micro_batch,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from saved totals."""
        self._unread.clear()
        self.tokens = state["tokens"]
        self.presented_tokens = state["presented_tokens"]
        self.windows = state["windows"]
        self.largest_micro_batch = state["largest_micro_batch"]
