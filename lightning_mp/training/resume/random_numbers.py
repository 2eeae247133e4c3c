"""The state of all random numbers of a process, as tensors and plain values that a checkpoint can hold."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_mp.ground.core.random_state import RandomState
from lightning_mp.ground.core.saved_state import ANY_NUMBER, Schema, checked_state, holding, or_none

_BYTES = Schema("a tensor of bytes", lambda value: isinstance(value, Tensor) and value.dtype is torch.uint8)
_NUMBERS = Schema(
    "a tensor of 625 numbers",
    lambda value: isinstance(value, Tensor) and value.dtype is torch.int64 and value.shape == (625,),
)
_KINDS = {
    "torch": Schema("a tensor of 5056 bytes", lambda value: _BYTES.accepts(value) and value.shape == (5056,)),
    "device": or_none(_BYTES),
    "device_type": Schema("a name", lambda value: isinstance(value, str)),
    "python": _NUMBERS,
    "python_gauss": or_none(ANY_NUMBER),
    "numpy": Schema(
        "a mapping with a bit_generator", lambda value: isinstance(value, Mapping) and "bit_generator" in value
    ),
}
#: What :func:`captured` returns.
RANDOM_STATE = holding(_KINDS)

_PYTHON_VERSION = 3  # of the tuple that random.getstate() returns since Python 3.2


def captured(device: torch.device) -> dict[str, Any]:
    """The states of torch (CPU and ``device``), Python and NumPy now; about 15 kB."""
    state = RandomState.capture(device)
    version, numbers, gauss = state.python_state
    assert version == _PYTHON_VERSION
    return {
        "torch": state.torch_state,
        "device": state.device_state,
        "device_type": device.type,
        "python": torch.tensor(numbers, dtype=torch.int64),
        "python_gauss": gauss,
        "numpy": _as_tensors(state.numpy_state),
    }


def restore(saved: Mapping[str, Any], device: torch.device) -> None:
    """Continues from a state; that of the device only on a device of the same type."""
    values = checked_state(saved, _KINDS, "random numbers")
    on_device = values["device"] if values["device_type"] == device.type else None
    before = RandomState.capture(device)
    python = (_PYTHON_VERSION, tuple(values["python"].tolist()), values["python_gauss"])
    try:
        RandomState(device, values["torch"], on_device, python, _as_arrays(values["numpy"])).restore()
    except (ValueError, TypeError, KeyError, RuntimeError) as error:
        before.restore()
        raise ValueError(
            f"The checkpoint's state of random numbers cannot be loaded: {str(error).splitlines()[0]} Nothing was"
            " changed. Resume from another checkpoint."
        ) from error


def _as_tensors(value: Any) -> Any:
    """NumPy's state without arrays, which ``torch.load(weights_only=True)`` refuses."""
    if isinstance(value, Mapping):
        return {key: _as_tensors(inner) for key, inner in value.items()}
    return torch.from_numpy(value.astype("int64")) if hasattr(value, "astype") else value


def _as_arrays(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _as_arrays(inner) for key, inner in value.items()}
    return value.numpy().astype("uint32") if isinstance(value, Tensor) else value
