"""Tensors that autograd has saved for a backward, read without unpacking what a hook has packed."""

from typing import Any

from torch import Tensor


def unchanged(tensor: Tensor) -> Tensor:
    """The unpack hook of hooks that only look: they have packed the tensor as it was."""
    return tensor


def saved_tensor(saved: Any) -> Tensor | None:
    """What a node's ``_raw_saved_*`` holds; None where a hook has packed it, or it is no plain tensor.

    A hook may unpack once only, as in torch's tutorial on saved-tensor hooks.
    """
    value = saved.data if saved.unpack_hook is None or saved.unpack_hook is unchanged else None
    return value if type(value) is Tensor else None
