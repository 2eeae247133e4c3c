"""States of the random number generators, to restore."""

import pickle
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor


@dataclass(frozen=True)
class RandomState:
    """The states of torch's generators (CPU and one device), Python's and NumPy's global ones.

    Taking one copies about 10 kB on the host. CUDA's generator is a seed and an offset that torch keeps on the host, so
    the device is not waited for.

    >>> import torch
    >>> from lightning_mp.ground.core.random_state import RandomState
    >>> state = RandomState.capture(torch.device("cpu"))
    >>> first = torch.rand(3)
    >>> state.restore()
    >>> torch.equal(torch.rand(3), first)
    True
    """

    device: torch.device
    torch_state: Tensor
    device_state: Tensor | None
    python_state: Any
    numpy_state: Any

    @classmethod
    def capture(cls, device: torch.device) -> Self:
        """The states now; ``device`` is the one that the module runs on."""
        import numpy as np

        return cls(
            device, torch.get_rng_state(), _device_state(device), random.getstate(), np.random.get_state(legacy=False)
        )

    def is_current(self) -> bool:
        """Whether all generators are still where they were: nothing was drawn from them."""
        now = self.capture(self.device)
        same = self.device_state is now.device_state or (
            self.device_state is not None
            and now.device_state is not None
            and torch.equal(self.device_state, now.device_state)
        )
        same = same and torch.equal(self.torch_state, now.torch_state) and self.python_state == now.python_state
        return same and pickle.dumps(self.numpy_state) == pickle.dumps(now.numpy_state)

    def restore(self) -> None:
        """Puts all generators back to where they were."""
        import numpy as np

        torch.set_rng_state(self.torch_state)
        random.setstate(self.python_state)
        np.random.set_state(self.numpy_state)
        if self.device_state is not None:
            module = torch.get_device_module(self.device)
            if self.device.type == "mps":
                module.set_rng_state(self.device_state)
            else:
                module.set_rng_state(self.device_state, self.device)


def _device_state(device: torch.device) -> Tensor | None:
    if device.type == "cpu":
        return None
    module = torch.get_device_module(device)
    state: Tensor = module.get_rng_state() if device.type == "mps" else module.get_rng_state(device)
    return state


@contextmanager
def random_state_kept(device: torch.device) -> Iterator[None]:
    """Whatever is drawn inside, the generators continue afterwards as if nothing had been."""
    state = RandomState.capture(device)
    try:
        yield
    finally:
        state.restore()


def default_generator(device: torch.device) -> torch.Generator:
    """That of the process for a device.

    >>> default_generator(torch.device("cpu")) is torch.default_generator
    True
    """
    if device.type == "cpu":
        return torch.default_generator
    module = torch.get_device_module(device)
    index = device.index if device.index is not None else module.current_device()
    generator: torch.Generator = module.default_generators[index]
    return generator
