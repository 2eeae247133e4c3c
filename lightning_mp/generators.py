"""Which random number generator a device draws from."""

import torch

__all__ = ["default_generator"]


def default_generator(device: torch.device) -> torch.Generator:
    """That of the process for a device.

    Example:
        >>> default_generator(torch.device("cpu")) is torch.default_generator
        True
    """
    if device.type == "cpu":
        return torch.default_generator
    module = torch.get_device_module(device)
    index = device.index if device.index is not None else module.current_device()
    generator: torch.Generator = module.default_generators[index]
    return generator
