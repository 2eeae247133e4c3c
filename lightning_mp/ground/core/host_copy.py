"""A device value that the host reads later, when the device has long finished it.

Reading ``tensor.item()`` right after the kernel that makes it stops the host until the device has caught up. A
:class:`HostCopy` starts the transfer at once and lets the host read the numbers one optimizer step later: by then
the transfer is over and asking costs nothing.
"""

import torch
from torch import Tensor


class HostCopy:
    """A transfer of a small tensor to the host, started now and read later."""

    def __init__(self, values: Tensor) -> None:
        values = values.detach()
        on_cuda = values.device.type == "cuda"
        self._buffer = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=on_cuda)
        self._buffer.copy_(values, non_blocking=on_cuda)
        self._event: torch.cuda.Event | None = None
        self.is_there = not on_cuda  # reading waits for no device
        if on_cuda:
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(values.device))

    def read(self) -> list[float]:
        """Waits until the transfer is over, then returns the numbers."""
        if self._event is not None:
            self._event.synchronize()
            self._event, self.is_there = None, True
        # `tolist` reads host memory directly; `item` would count as one more dispatcher call per number.
        return [float(value) for value in self._buffer.tolist()]
