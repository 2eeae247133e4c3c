"""A cooldown that any rank may ask for at any time, and that all ranks learn of at the same step, without waiting."""

from typing import Any

import torch

from lightning_mp.core.saved_state import AMOUNT, checked_state, listed_of
from lightning_mp.distributed.async_sum import AsyncAllReduce

__all__ = ["COOLDOWN_KINDS", "CooldownRequest"]

#: What :meth:`CooldownRequest.state_dict` holds.
COOLDOWN_KINDS = {"amount": AMOUNT, "sums": listed_of(AMOUNT, 2)}


class CooldownRequest:
    """How long a cooldown is to be: a number of tokens from 1, or below 1 a fraction of the whole run.

    Ranks add up what they ask for when a window opens, and know their mean when the next one does.

    Example:
        >>> import torch
        >>> request = CooldownRequest()
        >>> request.amount = 0.2
        >>> request.agree(torch.device("cpu")), request.agree(torch.device("cpu"))  # one process knows at once
        (0.2, 0.0)
        >>> CooldownRequest.tokens(0.2, trained_tokens=800), CooldownRequest.tokens(50, trained_tokens=800)
        (200, 50)
    """

    def __init__(self) -> None:
        self.amount = 0.0
        self._asked = AsyncAllReduce(2)

    def agree(self, device: torch.device) -> float:
        """What ranks have asked for; 0 for nothing. To be called on all of them when a window opens."""
        asked, self.amount = self.amount, 0.0
        ranks, total = self._asked.add([float(asked > 0), asked], device)
        return total / ranks if ranks else 0.0

    @staticmethod
    def tokens(amount: float, trained_tokens: int) -> int:
        """The length of a cooldown that begins after so many tokens."""
        if amount >= 1:
            return round(amount)
        return max(1, round(trained_tokens * amount / (1 - amount)))

    def state_dict(self) -> dict[str, Any]:
        """What was asked for and is not agreed on yet."""
        return {"amount": self.amount, "sums": self._asked.arrived()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a saved state; what was asked for since then stays."""
        state = checked_state(state, COOLDOWN_KINDS, "a cooldown that was asked for")
        self.amount = self.amount or state["amount"]
        self._asked.load(state["sums"])
