"""Blocks that work on parts of the sequence, where tensor parallelism alone would do the same on every rank.

Between a ``row`` layer and the next ``column`` layer every rank has the same activations: norms, dropout and residuals
are computed and kept as often as there are ranks. With style "sequence" each rank has its part of the tokens there. The
all-reduce after a ``row`` layer becomes a reduce-scatter, and an all-gather comes before a ``column`` layer: the same
bytes, and the activations that are kept for backward are divided by the number of ranks (Korthikanti et al. 2022,
"Reducing Activation Recomputation in Large Transformer Models", section 4.2.2, https://arxiv.org/abs/2205.05198).
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from lightning_mp.ground.core.rank_rng import RankRNG
from lightning_mp.ground.modules.names import is_inside, named_modules
from lightning_mp.training.tensor_parallel.dtensor_edges import local_part
from lightning_mp.training.tensor_parallel.known_models import Style

_OWNER = "FSDP2Strategy(tensor_parallel_plan=...)"
#: Activations are ``[batch, tokens, ...]``.
_TOKENS = Shard(1)


def can_take_parts(module: nn.Module) -> bool:
    """Whether "sequence" says something about a module: a norm, a dropout, or a list of blocks.

    >>> can_take_parts(nn.LayerNorm(2)), can_take_parts(nn.Dropout()), can_take_parts(nn.Linear(2, 2))
    (True, True, False)
    """
    norm = isinstance(module, nn.LayerNorm | nn.RMSNorm) or type(module).__name__.endswith("RMSNorm")
    return norm or isinstance(module, nn.Dropout | nn.ModuleList)


def blocks_around(name: str, model: nn.Module, styles: Mapping[str, Style]) -> nn.ModuleList | None:
    """The list of blocks with style "sequence" that a module is in; None if there is none."""
    for other, module in named_modules(model):
        if isinstance(module, nn.ModuleList) and styles.get(other) == "sequence" and is_inside(name, other):
            return module
    return None


def check_sequence_styles(model: nn.Module, styles: Mapping[str, Style]) -> None:
    """Refuses plans under which some gradient would be that of a part of the sequence."""
    modules = dict(named_modules(model))
    lists = [n for n, style in styles.items() if style == "sequence" and isinstance(modules[n], nn.ModuleList)]
    for name, style in styles.items():
        inside = any(is_inside(name, other) for other in lists)
        if style == "sequence" and name in lists and (inside or not len(modules[name])):  # type: ignore[arg-type]
            what = "is in another such list" if inside else "is empty"
            raise ValueError(f"{_OWNER}: {name} is 'sequence' and {what}.")
        if style == "sequence" and name not in lists and not inside:
            raise ValueError(
                f"{_OWNER}: {name} is 'sequence', and no list of blocks around it is. The sequence is split before the"
                " first block of a list and put together after the last: give that nn.ModuleList the style 'sequence'"
                " as well."
            )
        if style in ("vocabulary", "vocab_parallel_head") and inside:
            raise ValueError(f"{_OWNER}: {name} is {style!r} and cannot be in blocks that are 'sequence'.")
        if style == "whole_sequence" and not inside:
            raise ValueError(f"{_OWNER}: {name} is 'whole_sequence' and is in no blocks that are 'sequence'.")
        takes_whole = style.startswith("column") or style == "row_split"
        gathered = any(is_inside(name, other) for other, its in styles.items() if its == "whole_sequence")
        if inside and takes_whole and not gathered:
            raise ValueError(
                f"{_OWNER}: {name} is {style!r} in blocks that are 'sequence', and would get a part of the tokens. Give"
                " the module around it, as the attention or the MLP, the style 'whole_sequence': it gathers them."
            )
    for name, module in modules.items():
        inside = any(is_inside(name, other) for other in lists)
        if inside and name not in styles and next(module.parameters(recurse=False), None) is not None:
            raise ValueError(
                f"{_OWNER}: {name} ({type(module).__name__}) is in blocks that are 'sequence' and has no style, so"
                " its gradients would be those of a part of the tokens. Give a norm the style 'sequence', and a layer"
                " one that splits it."
            )


def split_sequence_of_blocks(blocks: nn.ModuleList, mesh: DeviceMesh) -> None:
    """Lets the first block take a part of the tokens, and the last one give all of them.

    In evaluation mode (``eval()``) nothing is split, so validation and generation take any length.
    """

    def begin(_block: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if not blocks.training:
            if torch.is_grad_enabled():
                rank_zero_warn(
                    "FSDP2Strategy: the blocks whose sequence would be split are in evaluation mode, so it is not. Call"
                    " model.train() before the fit; transformers' from_pretrained leaves models in evaluation mode."
                )
            return None
        if not args or not isinstance(args[0], Tensor) or args[0].ndim < 3:
            raise ValueError(
                f"{_OWNER}: a block that is 'sequence' must get activations [batch, tokens, width] as its first"
                f" argument; got {_described(args)}."
            )
        tokens = args[0].shape[1]
        if tokens % mesh.size():
            raise ValueError(
                f"{_OWNER}: a batch has sequences of {tokens} tokens, which {mesh.size()} ranks do not divide, so they"
                " cannot be split. Pad batches to a multiple of tensor_parallel_size (pad_to_multiple_of in collators"
                " of transformers), or use tensor_parallel_plan='auto', which leaves sequences whole."
            )
        return (_moved(args[0], mesh, Replicate(), _TOKENS), *args[1:])

    def end(_block: nn.Module, _args: Any, output: Any) -> Any:
        if not blocks.training:
            return None
        if isinstance(output, tuple):
            return (_moved(output[0], mesh, _TOKENS, Replicate()), *output[1:])
        return _moved(output, mesh, _TOKENS, Replicate())

    blocks[0].register_forward_pre_hook(begin)
    blocks[-1].register_forward_hook(end)


def take_whole_sequence(module: nn.Module, mesh: DeviceMesh, in_parts: Callable[[], bool]) -> None:
    """Gathers the activations that a module of such a block gets: its first argument, also where it has a name.

    Layers in it that are split by outputs leave the gradients of their inputs as sums to be made; here they are made
    and split in one reduce-scatter.
    """

    def gather(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not in_parts():
            return None
        if args:
            return (_gathered(args[0], mesh), *args[1:]), kwargs
        name = next((name for name, value in kwargs.items() if isinstance(value, Tensor)), None)
        if name is None:
            raise ValueError(
                f"{_OWNER}: {type(module).__name__} is 'whole_sequence' and must get activations [batch, tokens, width]"
                " as its first argument; got no tensor."
            )
        return args, {**kwargs, name: _gathered(kwargs[name], mesh)}

    module.register_forward_pre_hook(gather, with_kwargs=True)


def work_on_parts(layer: nn.Module, mesh: DeviceMesh, in_parts: Callable[[], bool]) -> None:
    """Lets a norm or a dropout in such blocks work on a part of the tokens.

    A norm's weights are whole on every rank. Their gradients are sums over the rank's tokens, which FSDP2 adds up over
    the ranks before anything else sees them. A dropout draws other masks on every rank.
    """
    if isinstance(layer, nn.Dropout):
        numbers = RankRNG(mesh.get_local_rank(), lambda: layer.training and layer.p > 0 and in_parts())
        layer.register_forward_pre_hook(lambda _layer, args: numbers.begin(args[0].device))
        layer.register_forward_hook(lambda *_: numbers.end(), always_call=True)
        return
    for name, parameter in list(layer.named_parameters(recurse=False)):
        whole = distribute_tensor(parameter.detach(), mesh, [Replicate()])
        layer.register_parameter(name, nn.Parameter(whole, parameter.requires_grad))

    def takes(_layer: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        placement: Placement = _TOKENS if in_parts() else Replicate()
        return (DTensor.from_local(args[0], mesh, [placement], run_check=False), *args[1:])

    def gives(_layer: nn.Module, _args: Any, output: DTensor) -> Tensor:
        return local_part(output)

    layer.register_forward_pre_hook(takes)
    layer.register_forward_hook(gives)


def _gathered(value: Tensor, mesh: DeviceMesh) -> Tensor:
    whole = DTensor.from_local(value, mesh, [_TOKENS], run_check=False).redistribute(placements=[Replicate()])
    local: Tensor = whole.to_local(grad_placements=[Partial()])
    return local


def _moved(value: Tensor, mesh: DeviceMesh, here: Placement, there: Placement) -> Tensor:
    return local_part(DTensor.from_local(value, mesh, [here], run_check=False).redistribute(placements=[there]))


def _described(args: tuple[Any, ...]) -> str:
    if not args:
        return "none; it was given by name"
    return f"a tensor of shape {tuple(args[0].shape)}" if isinstance(args[0], Tensor) else f"a {type(args[0]).__name__}"
