"""A yes or no that any rank may raise and all ranks learn of at the same step, without waiting for the device."""

import torch

from lightning_mp.lagged_sum import LaggedSum

__all__ = ["AgreedFlag"]


class AgreedFlag:
    """Adds up the ranks' answers when asked, and tells the sum when asked the next time.

    Example:
        >>> import torch
        >>> flag = AgreedFlag()
        >>> flag.ask(False, torch.device("cpu")), flag.ask(True, torch.device("cpu"))  # one process knows at once
        (False, True)
    """

    def __init__(self) -> None:
        self._answers = LaggedSum(1)

    def ask(self, answer: bool, device: torch.device) -> bool:
        """Whether a rank said yes: now on one process, when this was asked before on several. To be called on all."""
        return self._answers.add([float(answer)], device)[0] > 0
