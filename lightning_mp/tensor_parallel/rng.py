"""Dropout masks that differ between ranks, for what ranks hold different parts of."""

from collections.abc import Callable

import torch

from lightning_mp.core.random_state import default_generator

__all__ = ["RankRNG"]

_SEEDS = 2**62


class RankRNG:
    """For a while a rank draws other random numbers than those that compute the same model with it.

    Ranks that compute one model together draw the same numbers, so that a mask on what all of them have is the same
    mask. On parts that would repeat one part's mask on all others. A seed is drawn from the common numbers, which then
    go on as if the rank's own had not been drawn; an activation checkpoint that restores the former gets the same masks
    again.

    Args:
        rank: among those that compute one model together.
        wanted: whether there is anything to draw.
    """

    def __init__(self, rank: int, wanted: Callable[[], bool]) -> None:
        self._rank = rank
        self._wanted = wanted
        self._common: tuple[torch.Generator, torch.Tensor] | None = None

    def begin(self, device: torch.device) -> None:
        """From here on, on this device, until :meth:`end`."""
        if self._common is not None or not self._wanted():
            return
        seed = int(torch.randint(_SEEDS, ()))  # on the CPU: nothing waits for a device
        generator = default_generator(device)
        self._common = generator, generator.get_state()
        generator.manual_seed(seed + self._rank)

    def end(self) -> None:
        """Back to the common numbers."""
        if self._common is not None:
            generator, state = self._common
            generator.set_state(state)
            self._common = None
