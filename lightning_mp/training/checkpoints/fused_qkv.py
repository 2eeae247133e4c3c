"""Queries, keys and values in one matrix, split so that each rank has whole heads.

Their matrix is ``[queries; keys; values]``. Split as it is, the first of two ranks would get all queries and half of
the keys. So it is held in *rank order*, ``[queries 0; keys 0; values 0; queries 1; keys 1; values 1]``, of which an
ordinary split gives each rank its heads. No other code sees that: gradients, norms, optimizers and FSDP2 do not depend
on the order of rows. State dicts of the model and of its optimizers are in the order of a single process, so that
checkpoints do not depend on the number of ranks.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

#: Attribute of a fused layer: the orders of its parameters, by name. Parameters lose theirs in ``module.to()``.
_ORDERS = "fused_orders"

#: Queries, keys, values.
_PARTS = 3

#: Of :func:`convert_optimizer_states`.
_HOOKS: WeakKeyDictionary[Optimizer, tuple[RemovableHandle, ...]] = WeakKeyDictionary()


@dataclass(frozen=True)
class FusedOrder:
    """In which order the rows of a fused matrix lie.

    Example:
        >>> order = FusedOrder(ranks=2, dim=0)
        >>> order.by_rank(torch.arange(6))  # queries 0 1, keys 2 3, values 4 5
        tensor([0, 2, 4, 1, 3, 5])
        >>> order.by_part(order.by_rank(torch.arange(6)))
        tensor([0, 1, 2, 3, 4, 5])
    """

    ranks: int
    dim: int

    def by_rank(self, whole: Tensor) -> Tensor:
        """From the order of one process to that in which the rows of one rank are neighbours."""
        return self._swapped(whole, _PARTS, self.ranks)

    def by_part(self, whole: Tensor) -> Tensor:
        """The way back."""
        return self._swapped(whole, self.ranks, _PARTS)

    def to_checkpoint(self, held: Tensor) -> Tensor:
        """The same values in the order of one process, split as before. All ranks have to call it: it gathers."""
        return self._moved(held, inward=False)

    def from_checkpoint(self, value: Tensor) -> Tensor:
        """The way back."""
        return self._moved(value, inward=True)

    def _swapped(self, whole: Tensor, first: int, second: int) -> Tensor:
        blocks: Tensor = whole.unflatten(self.dim, (first, second, -1))
        swapped: Tensor = blocks.transpose(self.dim, self.dim + 1).flatten(self.dim, self.dim + 2)
        return swapped.contiguous()

    @torch.no_grad()
    def _moved(self, value: Tensor, *, inward: bool) -> Tensor:
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        moved = self.by_rank(whole) if inward else self.by_part(whole)
        if not isinstance(value, DTensor):
            return moved
        return distribute_tensor(moved, value.device_mesh, value.placements, src_data_rank=None)


def fused_orders(model: nn.Module) -> dict[str, FusedOrder]:
    """The order of each parameter that is held in rank order, by its name."""
    return {
        f"{name}.{own}" if name else own: order
        for name, layer in model.named_modules(remove_duplicate=False)
        for own, order in getattr(layer, _ORDERS, {}).items()
    }


def hold_in_rank_order(layer: nn.Module, ranks: int, *, dim_of_weight: int) -> None:
    """Rearranges the whole parameters of a fused layer, and lets its state dict be as if nothing had happened."""
    orders = {"weight": FusedOrder(ranks, dim_of_weight)}
    if getattr(layer, "bias", None) is not None:
        orders["bias"] = FusedOrder(ranks, 0)
    for name, parameter in layer.named_parameters(recurse=False):
        parameter.data = orders[name].by_rank(parameter.data)
    layer.register_state_dict_post_hook(partial(_convert_layer, orders, inward=False))
    layer.register_load_state_dict_pre_hook(partial(_convert_layer, orders, inward=True))
    setattr(layer, _ORDERS, orders)


def convert_optimizer_states(model: nn.Module, optimizers: Iterable[Optimizer]) -> None:
    """Lets state dicts of optimizers be in the order of one process, for parameters that are held in rank order.

    To be called after all other hooks on the optimizers were set; again where more may have been set since.
    """
    orders = fused_orders(model)
    named = model.named_parameters(remove_duplicate=False)
    fused: dict[Tensor, FusedOrder] = {p: orders[name] for name, p in named if name in orders}
    for optimizer in optimizers:
        for earlier in _HOOKS.pop(optimizer, ()):
            earlier.remove()
        if any(p in fused for group in optimizer.param_groups for p in group["params"]):
            _HOOKS[optimizer] = (
                optimizer.register_state_dict_post_hook(partial(_converted, fused, inward=False)),
                # Others may take tensors out of what is loaded, so the order is put right before.
                optimizer.register_load_state_dict_pre_hook(partial(_converted, fused, inward=True), prepend=True),
            )


def _convert_layer(
    orders: Mapping[str, FusedOrder],
    layer: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    *_others: Any,
    inward: bool,
) -> None:
    """Hook of a fused layer; a copy of the layer gets a copy of it."""
    for name, order in orders.items():
        if prefix + name in state_dict:
            value = state_dict[prefix + name]
            state_dict[prefix + name] = order.from_checkpoint(value) if inward else order.to_checkpoint(value)


def _converted(
    fused: Mapping[Tensor, FusedOrder], optimizer: Optimizer, state_dict: dict[str, Any], *, inward: bool
) -> dict[str, Any]:
    """With new dictionaries: torch's hold the optimizer's own."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    state = dict(state_dict["state"])
    # Of different length if the state is another optimizer's; torch's own error says so.
    for number, parameter in zip(numbers, parameters, strict=False):
        order = fused.get(parameter)
        if order is None or number not in state:
            continue
        converted = {}
        for name, value in state[number].items():
            if isinstance(value, Tensor) and value.dim() > 0:
                if value.shape != parameter.shape:
                    raise ValueError(
                        f"FSDP2Strategy: the state of {type(optimizer).__name__} holds {name!r} of shape"
                        f" {tuple(value.shape)} for fused queries, keys and values of shape {tuple(parameter.shape)};"
                        " its order is not known. Plan that layer as 'column_gather' and the next as 'row_split', or"
                        " use another optimizer."
                    )
                value = order.from_checkpoint(value) if inward else order.to_checkpoint(value)
            converted[name] = value
        state[number] = converted
    return {**state_dict, "state": state}
