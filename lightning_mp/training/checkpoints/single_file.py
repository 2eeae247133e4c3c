"""Single-file checkpoints of a sharded run, readable by a run with any number of ranks and any strategy."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer


def full_optimizer_state(optimizer: Optimizer, *, keep: bool) -> dict[str, Any]:
    """What ``optimizer.state_dict()`` gives on one device: whole tensors on the CPU, parameters by number.

    Numbers follow the optimizer's own groups, so that any other strategy can load it. All ranks have to call it.
    """
    state = optimizer.state_dict()
    values: dict[int, dict[str, Any]] = {}
    for number, of_parameter in state["state"].items():
        gathered = {n: v.full_tensor() if isinstance(v, DTensor) else v for n, v in of_parameter.items()}
        if keep:
            values[number] = {
                name: value.cpu() if isinstance(value, Tensor) else value for name, value in gathered.items()
            }
    return {**state, "state": values} if keep else {}


def load_full_checkpoint(
    path: Path, model: nn.Module, optimizers: list[Optimizer], *, strict: bool, weights_only: bool | None
) -> dict[str, Any]:
    """Reads a single file on every rank and keeps this rank's part. Returns everything that is neither of both.

    The file may come from any strategy and any number of ranks.
    """
    checkpoint: dict[str, Any] = torch.load(path, mmap=True, map_location="cpu", weights_only=weights_only)
    # Brings seventy modules of torch along, so not at the top.
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

    from lightning_mp.training.checkpoints.former_masters import take_masters

    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    masters = {names[p]: master for p, master in take_masters(checkpoint, optimizers).items()}
    weights = {**checkpoint.pop("state_dict"), **masters}
    if strict:  # torch leaves out what the model has not
        known = get_model_state_dict(model)
        refuse_other_names(
            type(model).__name__,
            missing=[name for name in known if name not in weights],
            unexpected=[name for name in weights if name not in known],
        )
    set_model_state_dict(model, weights, options=StateDictOptions(full_state_dict=True, strict=strict))
    states = checkpoint.get("optimizer_states", [])
    if optimizers:
        refuse_other_number(len(states), len(optimizers), path)
    for optimizer, state in zip(optimizers, states, strict=False):
        optimizer.load_state_dict(_distributed(state, optimizer, model))
    return checkpoint


def _distributed(state: Mapping[str, Any], optimizer: Optimizer, model: nn.Module) -> dict[str, Any]:
    """A state of whole tensors, split as the parameters are."""
    saved, own = (
        [len(group["params"]) for group in groups] for groups in (state["param_groups"], optimizer.param_groups)
    )
    refuse_other_groups(saved, own)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    numbers = dict(_numbers_of(state, parameters, model))
    values = {
        numbers[key]: {name: _split(name, value, parameters[numbers[key]]) for name, value in of_parameter.items()}
        for key, of_parameter in state["state"].items()
    }
    groups = [{**group, "params": [numbers[key] for key in group["params"]]} for group in state["param_groups"]]
    return {**state, "state": values, "param_groups": groups}


def _numbers_of(state: Mapping[str, Any], parameters: list[Tensor], model: nn.Module) -> Iterator[tuple[Any, int]]:
    """Parameters are numbered by torch, and named in what FSDP1 and older runs wrote."""
    keys = [key for group in state["param_groups"] for key in group["params"]]
    names = {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)}
    places = {id(p): place for place, p in enumerate(parameters)}
    for place, key in enumerate(keys):
        yield key, places[names[key]] if isinstance(key, str) else place


def _split(name: str, value: Any, parameter: Tensor) -> Any:
    if not isinstance(value, Tensor) or not isinstance(parameter, DTensor) or value.dim() == 0:
        return value
    if value.shape != parameter.shape:
        raise ValueError(
            f"The checkpoint holds {name!r} of shape {tuple(value.shape)} for a parameter of shape"
            f" {tuple(parameter.shape)}; only state of the parameter's shape can be sharded. Resume with the model and"
            " optimizer that wrote it, or write it with save_distributed_checkpoint=True."
        )
    whole = value.to(parameter.device)
    return distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)


def refuse_other_names(owner: str, *, missing: Iterable[str], unexpected: Iterable[str]) -> None:
    """Says what of a state dict is too little or too much, for loading that is strict."""
    missing, unexpected = list(missing), list(unexpected)
    if missing or unexpected:
        raise RuntimeError(
            f"Error(s) in loading state_dict for {owner}: missing keys {missing}, unexpected keys {unexpected}. Use"
            " the model that the checkpoint was written with, or strict_loading=False."
        )


def refuse_other_groups(saved: Sequence[int], own: Sequence[int], *, difference: str = "") -> None:
    """Compares how many parameters each parameter group of an optimizer has."""
    if list(saved) != list(own) or difference:
        raise ValueError(
            f"The checkpoint's optimizer has parameter groups of {list(saved)} parameters, and configure_optimizers"
            f" made groups of {list(own)}{difference and f': {difference}'}. Resume with the model that wrote it, or"
            " load its weights only. Groups added in that run, as by BackboneFinetuning, must be made in"
            " configure_optimizers."
        )


def refuse_other_number(saved: int, own: int, path: Path | None = None) -> None:
    """Compares how many optimizers there are."""
    if saved != own:
        raise ValueError(
            f"The checkpoint{'' if path is None else f' {path}'} holds the state of {saved} optimizers, and"
            f" configure_optimizers made {own}. Use the model that it was written with, or load its weights only."
        )
