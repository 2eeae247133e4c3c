"""A whole model, split over the ranks that compute it together."""

from collections.abc import Iterable, Mapping
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_mp.ground.core.rank_rng import RankRNG
from lightning_mp.ground.modules.names import named_modules
from lightning_mp.training.policy.unit_selection import tied_parameters
from lightning_mp.training.tensor_parallel.known_models import Style, adapt_attention, attention_dropout, head_counts
from lightning_mp.training.tensor_parallel.layers import SharedInput, split_layer
from lightning_mp.training.tensor_parallel.sequence_parallel import (
    blocks_around,
    split_sequence_of_blocks,
    take_whole_sequence,
    work_on_parts,
)


class TensorParallelSplit:
    """Splits the layers of a model as they are materialised, and handles what they share."""

    def __init__(self, model: nn.Module, styles: Mapping[str, Style], mesh: DeviceMesh) -> None:
        self._model = model
        self._modules = dict(named_modules(model))
        self._styles = styles
        self._mesh = mesh
        self._shared = SharedInput()
        self._rngs = {name: self._rng_of(self._modules[name]) for name, _, _ in head_counts(model, styles)}
        self._ties = [tie for tie in tied_parameters(model) if any(_owner(name) in styles for name in tie)]

    def layers(self, names: Iterable[str]) -> None:
        """Splits those of these layers that have a style; their weights are whole and the same on all ranks."""
        here = list(names)
        for name in [name for name in here if name in self._styles]:  # in one order on all ranks: weights are sent
            layer, style = self._modules[name], self._styles[name]
            blocks = blocks_around(name, self._model, self._styles)
            in_parts = partial(_in_training, blocks) if blocks is not None else None
            if isinstance(layer, nn.ModuleList):
                split_sequence_of_blocks(layer, self._mesh)
            elif style in ("sequence", "whole_sequence"):
                assert in_parts is not None
                do = work_on_parts if style == "sequence" else take_whole_sequence
                do(layer, self._mesh, in_parts)
            else:
                rng = self._rngs.get(_owner(name))
                split_layer(layer, style, self._mesh, shared=self._shared, in_parts=in_parts, rng=rng)
            if style == "column_qkv":
                adapt_attention(self._modules[_owner(name)], self._mesh.size())
        self._tie_again([tie for tie in self._ties if _owner(tie[0]) in here])

    def finish(self, device: torch.device) -> None:
        """When all layers are split and sharded."""
        _same_random_numbers(self._mesh, device)

    def _rng_of(self, attention: nn.Module) -> RankRNG:
        """From the layer before attention to the one after it; to the end of the module if it raises."""
        numbers = RankRNG(self._mesh.get_local_rank(), lambda: attention.training and attention_dropout(attention) > 0)
        attention.register_forward_hook(lambda *_: numbers.end(), always_call=True)
        return numbers

    def _tie_again(self, ties: Iterable[list[str]]) -> None:
        """Layers are split one by one; those that shared a weight share the first one's part."""
        for first, *others in ties:
            shared = getattr(self._modules[_owner(first)], _own_name(first))
            for other in others:
                mine = getattr(self._modules[_owner(other)], _own_name(other))
                if getattr(mine, "placements", None) != getattr(shared, "placements", None):
                    raise ValueError(
                        f"FSDP2Strategy(tensor_parallel_plan=...): {first} and {other} are one parameter (tied weights)"
                        " and would be split differently. Give both layers a style that splits the same dimension"
                        " ('vocabulary' with 'vocab_parallel_head' or 'column_gather'), or neither."
                    )
                setattr(self._modules[_owner(other)], _own_name(other), shared)


def _in_training(blocks: nn.ModuleList) -> bool:
    return blocks.training


def _owner(parameter: str) -> str:
    return parameter.rpartition(".")[0]


def _own_name(parameter: str) -> str:
    return parameter.rpartition(".")[2]


def _same_random_numbers(mesh: DeviceMesh, device: torch.device) -> None:
    """Ranks that compute one model together draw the same dropout masks."""
    group = mesh.get_group()
    source = dist.get_global_rank(group, 0)
    state = torch.get_rng_state().to(device)
    dist.broadcast(state, src=source, group=group)
    torch.set_rng_state(state.cpu())
    if device.type == "cuda":
        state = torch.cuda.get_rng_state(device).to(device)
        dist.broadcast(state, src=source, group=group)
        torch.cuda.set_rng_state(state.cpu(), device)
