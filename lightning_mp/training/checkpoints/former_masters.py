"""Checkpoints from before parameters were the masters: 16-bit weights, and fp32 masters in the optimizer states.

``MasterWeightsPrecision`` wrote them until November 2026. They load into fp32 weights, once; what is saved then has no
masters beside the weights.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from lightning.fabric.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from lightning_mp.ground.core.saved_state import checked_state, tensor_like

#: Where a master lies in the state of its parameter, always as full fp32.
MASTER_KEY = "master_param"

#: In a checkpoint whose run trained the masters in it. Lightning's own plugins carried them along, unchanged.
_TRAINED_KEY = "lightning_mp_masters"


def have_been_trained(checkpoint: Mapping[str, Any]) -> bool:
    """Whether the masters in a checkpoint belong to its weights."""
    return _TRAINED_KEY in checkpoint


def take_masters(checkpoint: dict[str, Any], optimizers: Sequence[Optimizer]) -> dict[Tensor, Tensor]:
    """Takes masters out of the optimizer states of a checkpoint; returns those of each parameter.

    The optimizer states that are given stay as they are; the checkpoint gets others.

    Raises:
        ValueError: if a master is no floating-point tensor of its parameter's shape; nothing is changed then.

    >>> import torch
    >>> weight = torch.nn.Parameter(torch.zeros(1))
    >>> state = {"state": {0: {"step": 1, "master_param": torch.ones(1)}}, "param_groups": [{"params": [0]}]}
    >>> checkpoint = {"optimizer_states": [state], "lightning_mp_masters": "bf16-true"}
    >>> take_masters(checkpoint, [torch.optim.SGD([weight])]) == {weight: torch.ones(1)}
    True
    >>> checkpoint["optimizer_states"][0]["state"]
    {0: {'step': 1}}
    """
    found: dict[Tensor, Tensor] = {}
    states = []
    for state_dict, optimizer in zip(checkpoint.get("optimizer_states", ()), optimizers, strict=False):
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        of_number = dict(zip(numbers, parameters, strict=False))
        state = {key: dict(entry) if isinstance(entry, dict) else entry for key, entry in state_dict["state"].items()}
        for number, entry in state.items():
            if isinstance(entry, dict) and MASTER_KEY in entry and number in of_number:
                found[of_number[number]] = entry.pop(MASTER_KEY)
        states.append({**state_dict, "state": {key: entry for key, entry in state.items() if entry != {}}})
    if not found:
        return {}
    if have_been_trained(checkpoint):
        for parameter, master in found.items():
            checked_state({MASTER_KEY: master}, {MASTER_KEY: tensor_like(parameter.shape)}, "an optimizer")
    checkpoint["optimizer_states"] = states
    if have_been_trained(checkpoint):
        say_what_was_read(len(found))
        return found
    rank_zero_warn(
        f"The fp32 masters of {len(found)} parameters in this checkpoint are ignored: a later run in one of Lightning's"
        " own precisions trained the weights without them. The run continues from the checkpoint's weights."
    )
    return {}


def say_what_was_read(masters: int) -> None:
    """Says that a checkpoint was converted."""
    rank_zero_info(
        f"The checkpoint holds 16-bit weights and fp32 masters of {masters} of them: the masters become the weights."
        " Checkpoints of this run hold fp32 weights."
    )


def warn_about_rounded_weights(checkpoint: Mapping[str, Any]) -> None:
    """Warns where a strategy has read 16-bit weights of such a checkpoint, and not the masters."""
    if checkpoint.get(_TRAINED_KEY, "32-true") != "32-true":
        rank_zero_warn(
            "This run continues from weights rounded to 16 bit: the fp32 masters of the checkpoint were not read. To"
            " continue from them, resume on one device, under DDP or under FSDP2Strategy, and save a checkpoint there."
        )
