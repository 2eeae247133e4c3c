"""The unpack hook by which hooks for saved tensors that only look are recognised."""

from torch import Tensor


def unchanged(tensor: Tensor) -> Tensor:
    """The unpack hook of hooks that only look: they have packed the tensor as it was."""
    return tensor
