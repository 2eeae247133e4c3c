"""Random numbers of a stage's layers: its own, so that no two stages draw the same dropout masks."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from lightning_mp.core.random_state import default_generator

__all__ = ["RankRNG"]

_SEEDS = 2**63


class RankRNG:
    """A sequence of random numbers for the layers of a rank, beside the one that the rank has as a process.

    All stages begin with the same seed. Were their layers to draw from it, the first layer of each stage would have the
    same dropout mask, and the stages would afterwards be at different places of the sequence: what a step draws itself,
    noise on its input for one, would no longer be the same on all of them. So layers draw from a sequence of their
    own, and the process's goes on as if they had drawn nothing.

    A new seed of the process (``seed_everything``) starts the own sequence anew.

    Args:
        rank: differs for each sequence.
        device: on which layers draw, besides the CPU.

    Example:
        >>> _ = torch.manual_seed(1)
        >>> numbers = RankRNG(0, torch.device("cpu")), RankRNG(1, torch.device("cpu"))
        >>> drawn = []
        >>> for own in (*numbers, numbers[0]):
        ...     with own.drawn():
        ...         drawn.append(float(torch.rand(())))
        >>> len(set(drawn))
        3
        >>> before = float(torch.rand(()))
        >>> _ = torch.manual_seed(1)
        >>> before == float(torch.rand(()))
        True
    """

    def __init__(self, rank: int, device: torch.device) -> None:
        self._rank = rank
        self._device = device
        self._seed: int | None = None
        self._own: list[torch.Tensor] = []

    @contextmanager
    def drawn(self) -> Iterator[None]:
        """Inside, random numbers are the own ones."""
        generators = _generators(self._device)
        seed = torch.initial_seed()
        common = [generator.get_state() for generator in generators]
        if seed != self._seed:
            self._seed = seed
            for generator in generators:
                generator.manual_seed((seed + 1 + self._rank) % _SEEDS)
        else:
            for generator, state in zip(generators, self._own, strict=True):
                generator.set_state(state)
        try:
            yield
        finally:
            self._own = [generator.get_state() for generator in generators]
            for generator, state in zip(generators, common, strict=True):
                generator.set_state(state)


def _generators(device: torch.device) -> list[torch.Generator]:
    """Those that layers on a device draw from; a layer may also draw on the CPU, as to leave itself out."""
    cpu = torch.device("cpu")
    return [default_generator(each) for each in ((cpu,) if device.type == "cpu" else (cpu, device))]
