"""Attention masks of Hugging Face models on fake tensors, whose shortcuts read numbers.

Their mask functions check whether positions restart and whether there is padding (``bool(padding.all())``), to omit the
mask. On the meta device the check fails; with fake tensors they skip it and keep the mask, as in a traced graph. A mask
is saved for backward in every layer, and with it attention with grouped queries repeats keys and values, which it does
not do without. Here the check gives the result of a real batch. All other reads of numbers fail as before.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode
from typing_extensions import override

_MASK_MODULES = ("transformers.masking_utils", "transformers.modeling_attn_mask_utils")
_LOOKS_FOR_PACKED_SEQUENCES = "find_packed_sequence_indices"


class MasksWithoutNumbers(TorchFunctionMode):
    """A context in which Hugging Face's mask functions take positions as one sequence, and padding as given.

    >>> import torch
    >>> with MasksWithoutNumbers():
    ...     bool(torch.ones(1).all())
    True
    """

    def __init__(
        self, has_no_numbers: Callable[[Tensor], bool] = lambda tensor: tensor.is_meta, *, has_padding: bool = False
    ) -> None:
        super().__init__()
        self._has_no_numbers = has_no_numbers
        self._has_padding = has_padding
        self._restore = ExitStack()

    @override
    def __enter__(self) -> "MasksWithoutNumbers":
        for name in _MASK_MODULES:
            module: Any = sys.modules.get(name)
            is_tracing = getattr(module, "is_tracing", None)
            if is_tracing is not None:
                # Called without a tensor it still detects a real trace.
                module.is_tracing = lambda tensor=None, ask=is_tracing: ask()
                self._restore.callback(setattr, module, "is_tracing", is_tracing)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    @override
    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._restore.close()

    @override
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is Tensor.__bool__ and self._has_no_numbers(args[0]):
            asking = sys._getframe(1)
            while asking.f_code.co_name == "__torch_function__" and asking.f_back is not None:
                asking = asking.f_back  # of a mode that was entered later
            if asking.f_globals["__name__"] in _MASK_MODULES:
                return not self._has_padding or asking.f_code.co_name == _LOOKS_FOR_PACKED_SEQUENCES
        return func(*args, **(kwargs or {}))
