"""How many parameters of a module a token uses: of a mixture of experts, those that it is routed to."""

from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from lightning_mp.ground.modules.stage_placeholder import full_model
from lightning_mp.ground.modules.whole_parameters import WholeParameter


def elements_used(module: nn.Module, weights: Sequence[WholeParameter]) -> list[int]:
    """How many numbers of each parameter a token uses: all, and of a mixture the share of the experts it is sent to."""
    with full_model(module):
        experts = {
            id(part)
            for name, of_experts in module.named_modules()
            if name.rpartition(".")[2] == "experts"
            for part in of_experts.modules()
        }
    share = _share_of_experts(module) if any(_is_expert(weight, experts) for weight in weights) else (1, 1)
    return [
        weight.elements * share[0] // share[1] if _is_expert(weight, experts) else weight.elements for weight in weights
    ]


def _is_expert(weight: WholeParameter, experts: set[int]) -> bool:
    return any(id(owner) in experts for owner in weight.owners)


def _share_of_experts(module: nn.Module) -> tuple[int, int]:
    """How many experts a token is routed to, of how many."""
    for config in configurations(module):
        met = getattr(config, "num_experts_per_tok", None)
        for name in ("num_local_experts", "num_experts", "n_routed_experts"):
            experts = getattr(config, name, None)
            if met and experts:
                return int(met), int(experts)
    raise ValueError(
        "This mixture of experts has no Hugging Face configuration with num_experts_per_tok and num_local_experts,"
        " num_experts or n_routed_experts, so counting all parameters would be too high. Use 'exact', or give the"
        " number of FLOPs."
    )


def configurations(module: nn.Module) -> Iterator[Any]:
    """The Hugging Face configurations of a module and of those inside of it."""
    for part in module.modules():
        config = getattr(part, "config", None)
        if config is not None:
            yield config
