"""Attention masks of Hugging Face models on the meta device, where their shortcuts ask for numbers.

Their mask functions look whether positions restart or padding is there (``bool(padding.all())``), to leave a mask out.
Tensors on the meta device have no numbers, so the question fails. What it decides is a mask, never a shape of a
product, so any answer leaves the operations as they are. All other questions fail as before.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

__all__ = ["MasksWithoutNumbers"]

_MASK_MODULES = ("transformers.masking_utils", "transformers.modeling_attn_mask_utils")


class MasksWithoutNumbers(TorchFunctionMode):
    """While this is entered, Hugging Face's mask functions take positions as one sequence and padding as none.

    Example:
        >>> import torch
        >>> with MasksWithoutNumbers():
        ...     bool(torch.ones(1).all())
        True
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is Tensor.__bool__ and args[0].is_meta and sys._getframe(1).f_globals["__name__"] in _MASK_MODULES:
            return True
        return func(*args, **(kwargs or {}))
