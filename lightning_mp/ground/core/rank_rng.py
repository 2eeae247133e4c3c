"""Random numbers that differ between ranks which otherwise draw the same, as ranks of one model do."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar
from weakref import WeakSet

import torch
from torch import Tensor

from lightning_mp.ground.core.random_state import default_generator

_SEEDS = 2**62


class RankRNG:
    """For a while a rank draws other random numbers than the ranks that compute the same model with it.

    Those have the same seed, so that a dropout mask on what all of them hold is the same mask. On shards of a tensor,
    and on different layers, that would repeat one rank's mask on all others. So in between each rank draws from a
    separate sequence, and the common one continues as if nothing had been drawn.

    By default a seed is drawn from the common sequence each time, and the rank's own sequence restarts from it: an
    activation checkpoint that restores the common sequence gets the same masks. With ``seed`` the rank's sequence
    continues for as long as the seed stays the same.
    """

    # Those with a sequence that continues, for checkpoints.
    _kept: ClassVar["WeakSet[RankRNG]"] = WeakSet()

    def __init__(
        self, rank: int, is_needed: Callable[[], bool] = lambda: True, *, seed: Callable[[], int] | None = None
    ) -> None:
        self._rank = rank
        self._is_needed = is_needed
        self._given_seed = seed
        self._seed: int | None = None
        self._states: Sequence[Tensor] = ()
        self._common: list[tuple[torch.Generator, Tensor]] = []
        if seed is not None:
            self._kept.add(self)

    @classmethod
    def kept_states(cls) -> list[dict[str, Any]]:
        """Positions of the sequences of this process that continue, by rank."""
        kept = sorted((rng for rng in cls._kept if rng._seed is not None), key=lambda rng: rng._rank)
        return [{"rank": rng._rank, "seed": rng._seed, "states": list(rng._states)} for rng in kept]

    @classmethod
    def restore_kept(cls, states: Sequence[Mapping[str, Any]]) -> None:
        """Has those of the same rank continue."""
        for state in states:
            for rng in cls._kept:
                if rng._rank == state["rank"]:
                    rng._seed, rng._states = state["seed"], state["states"]

    def begin(self, *devices: torch.device) -> None:
        """Switches the generators of these devices to this rank's sequence until :meth:`end`, if that is not done."""
        if self._common or not self._is_needed():
            return
        # drawn on the CPU: nothing waits for a device
        seed = self._given_seed() if self._given_seed is not None else int(torch.randint(_SEEDS, ()))
        generators = [default_generator(device) for device in devices]
        self._common = [(generator, generator.get_state()) for generator in generators]
        if self._given_seed is None or seed != self._seed:
            self._seed = seed
            for generator in generators:
                # + 1: the process itself draws from the seed
                generator.manual_seed((seed + 1 + self._rank) % 2**63)
        else:
            for generator, state in zip(generators, self._states, strict=True):
                generator.set_state(state)

    def end(self) -> None:
        """Restores the common sequence; no-op if it was restored."""
        if not self._common:
            return
        self._states = [generator.get_state() for generator, _ in self._common]
        for generator, state in self._common:
            generator.set_state(state)
        self._common = []

    @contextmanager
    def drawn(self, *devices: torch.device) -> Iterator[None]:
        """Context in which random numbers come from this rank's sequence."""
        self.begin(*devices)
        try:
            yield
        finally:
            self.end()
