"""State of optimizers over masters: fp32, also what was made or loaded beside the 16-bit weights."""

from typing import Any

import torch
from torch import Tensor
from torch.optim import Adagrad, Optimizer

from lightning_mp.gradients.gradient_ops import local_shard
from lightning_mp.precision.masters.fp32_gradients import HALF_DTYPES

__all__ = ["widen_early_state", "widened"]


def widened(value: Any, source: Any = None) -> Any:
    """A piece of optimizer state in fp32 where it is 16 bit; dictionaries, lists and tuples are walked.

    Args:
        value: the state as it is; what is not 16 bit stays the same object.
        source: where it was rounded from, if that is known; taken where the shapes agree.

    Example:
        >>> import torch
        >>> widened({"step": 1, "sum": torch.ones(1).half()}, {"sum": torch.tensor([1.0001])})
        {'step': 1, 'sum': tensor([1.0001])}
    """
    if isinstance(value, Tensor):
        if value.dtype not in HALF_DTYPES:
            return value
        if isinstance(source, Tensor) and source.shape == value.shape and source.is_floating_point():
            return source.detach().to(device=value.device, dtype=torch.float32)
        return value.float()
    if isinstance(value, dict):
        known = source if isinstance(source, dict) else {}
        return {key: widened(entry, known.get(key)) for key, entry in value.items()}
    if type(value) in (list, tuple):
        entries = source if isinstance(source, list | tuple) and len(source) == len(value) else [None] * len(value)
        return type(value)(widened(*pair) for pair in zip(value, entries, strict=True))
    return value


def widen_early_state(optimizer: Optimizer, group: dict[str, Any], parameter: Tensor, master: Tensor) -> None:
    """Widens what the optimizer made for a 16-bit parameter before there was a master, as in its constructor.

    A copy of the weight becomes a copy of the master, and Adagrad's sum its initial value, unrounded.

    Args:
        optimizer: its state is changed.
        group: the parameter group.
        parameter: fp16 or bf16.
        master: of the parameter, fp32.
    """
    if parameter not in optimizer.state:
        return
    state = optimizer.state[parameter]
    narrow = dict(state)
    for key, value in narrow.items():
        state[key] = master.detach().clone() if _is_copy(value, parameter) else widened(value)
    if isinstance(optimizer, Adagrad) and state.get("sum") is not narrow.get("sum") and not state["step"]:
        state["sum"].fill_(group["initial_accumulator_value"])


def _is_copy(value: Any, parameter: Tensor) -> bool:
    if not isinstance(value, Tensor) or value.dtype != parameter.dtype or value.shape != parameter.shape:
        return False
    copy, working = local_shard(value.detach()), local_shard(parameter.detach())
    # Zeros are where moments start.
    return torch.equal(copy, working) and bool(copy.any())
