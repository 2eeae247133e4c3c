"""Operations that torch refuses in 16 bit: there is no kernel for them, or they write a number that is out of range."""

import math
import re
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from lightning_mp.ground.core.messages import place_in, users_call
from lightning_mp.ground.core.private_dispatch_api import autocast_knows
from lightning_mp.ground.modules.names import named_modules
from lightning_mp.training.policy.operations import FAMILIES, KNOWN_OPERATIONS, functions_of

_LOW = {torch.float16: "fp16", torch.bfloat16: "bf16"}
# A rule casts a copy, which would take what is written.
_IN_PLACE = ("masked_fill_", "index_fill_", "fill_", "clamp_", "scatter_", "fill_diagonal_")
_WRITES_A_NUMBER = {f: name for name in (*FAMILIES["fills"], *_IN_PLACE) for f in functions_of(name)}
_HAS_NO_KERNEL = {f: name for name in FAMILIES["fp32_only"] for f in functions_of(name)}
_OUT_OF_RANGE = re.compile(r"to type c10::(?:Half|BFloat16) without overflow")
_NO_KERNEL = re.compile(
    "not implemented for '(?:Half|BFloat16)'|Low precision dtypes not supported|of type: (?:Half|BFloat16)"
    r"|Unsupported dtype (?:Half|BFloat16)|\((?:Half|BFloat16)\{|but got BFloat16 and|of scalar type: BFloat16"
    "|must be either float or double|cuFFT only supports dimensions whose sizes are powers of two"
)


@dataclass(frozen=True)
class RefusedIn16Bit:
    """An operation that torch refuses, and where it was called."""

    operation: str  # its name in a rule; "" where it is not known
    place: str  # the user's line, as "model.py:12 in forward"
    module: str | None  # name of the innermost module around it; None outside of every forward
    writes_a_number: bool  # the number that it writes is out of range; else it has no kernel

    @override
    def __str__(self) -> str:
        return f"in 16 bit {self.operation or 'the operation'} {self.reason}. {self.cure}"

    @property
    def reason(self) -> str:
        """What torch refuses, after the name of the operation."""
        return "writes a number that is out of range" if self.writes_a_number else "has no kernel"

    @property
    def cure(self) -> str:
        """What to do, in one or two sentences."""
        has_rule = self.operation not in _IN_PLACE
        rule = self.operation if self.operation in KNOWN_OPERATIONS else f"op:{self.operation}"
        ways = [f"policy={{'{rule}': 'fp32'}}"] if self.operation and has_rule else []
        ways += [f"policy={{'{self.module}': 'fp32'}} for its module"] if self.module else []
        ways += ["policy=PrecisionPolicy.default()"] if has_rule else []
        cast = f"Run it in fp32 with {', or '.join(ways)}." if ways else "Cast its input with .float()."
        return f"{cast} Or use torch.finfo(x.dtype).min in place of the number." if self.writes_a_number else cast


def numbers_overflow(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call has 16-bit tensors, and a Python number that is finite and out of their range.

    >>> x = torch.zeros(2, dtype=torch.float16)
    >>> numbers_overflow((x, x > 0, -1e9), {}), numbers_overflow((x, x > 0, -math.inf), {})
    (True, False)
    """
    values = (*args, *kwargs.values())
    limits = [torch.finfo(value.dtype).max for value in values if isinstance(value, Tensor) and value.dtype in _LOW]
    numbers = [abs(value) for value in values if isinstance(value, int | float) and math.isfinite(value)]
    return bool(limits) and bool(numbers) and max(numbers) > min(limits)


class WatchFor16Bit(TorchFunctionMode):
    """Notes the first call that torch would refuse in 16 bit; every call runs as it is, and fake tensors refuse none.

    Entered outside of a policy, it sees what the policy's casts leave.
    """

    def __init__(self, device_type: str, model: Callable[[], nn.Module]) -> None:
        super().__init__()
        self._device_type, self._model = device_type, model
        self.refused: RefusedIn16Bit | None = None
        self.dtype = ""  # the 16-bit format

    @override
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Calls the function."""
        kwargs = kwargs or {}
        if self.refused is None and (func in _HAS_NO_KERNEL or func in _WRITES_A_NUMBER):
            self._note(func, args, kwargs)
        return func(*args, **kwargs)

    def _note(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor) and value.dtype in _LOW]
        writes_a_number = func in _WRITES_A_NUMBER
        operation = _WRITES_A_NUMBER[func] if writes_a_number else _HAS_NO_KERNEL[func]
        if not inputs or (not numbers_overflow(args, kwargs) if writes_a_number else self._works(operation, inputs)):
            return
        calls = [*traceback.walk_stack(None)][::-1]
        place = place_in(traceback.StackSummary.extract(iter(calls)))
        self.dtype = _LOW[inputs[0].dtype]
        self.refused = RefusedIn16Bit(operation, place, _module_around(calls, self._model()), writes_a_number)

    def _works(self, operation: str, inputs: Sequence[Tensor]) -> bool:
        """Whether autocast has the operation on its list, that of fp32, or the device a kernel in fp16."""
        if torch.is_autocast_enabled("cpu") and autocast_knows(operation, self._device_type):
            return True
        if any(tensor.dtype != torch.float16 for tensor in inputs):
            return False
        sizes = {size for tensor in inputs for size in tensor.shape}
        of_cufft = operation.startswith("fft_") and self._device_type == "cuda"
        return operation in ("complex", "view_as_complex") or (of_cufft and all(n & (n - 1) == 0 for n in sizes))


def refused_by(error: RuntimeError, model: nn.Module) -> RefusedIn16Bit | None:
    """What torch has refused, if this is such an error."""
    out_of_range = _OUT_OF_RANGE.search(str(error)) is not None
    if not out_of_range and _NO_KERNEL.search(str(error)) is None:
        return None
    calls = [*traceback.walk_tb(error.__traceback__)]
    summary = traceback.StackSummary.extract(iter(calls))
    line = users_call(summary)
    known = _WRITES_A_NUMBER if out_of_range else _HAS_NO_KERNEL
    short = {name.removeprefix("linalg_").removeprefix("fft_"): name for name in known.values()}
    words = re.findall(r"\w+", line.line or "") if line is not None else []
    operation = next((short[word] for word in words if word in short), "")
    return RefusedIn16Bit(operation, place_in(summary), _module_around(calls, model), out_of_range)


def _module_around(calls: Iterable[tuple[FrameType, int]], model: nn.Module) -> str | None:
    """Name of the module whose method is the last of these calls; "" for the model itself."""
    names = {id(module): name for name, module in named_modules(model)}
    around = [id(frame.f_locals.get("self")) for frame, _ in calls]
    return next((names[one] for one in reversed(around) if one in names), None)
