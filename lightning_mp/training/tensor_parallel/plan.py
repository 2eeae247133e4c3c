"""Plans for tensor parallelism: which layers are split, and along which of their two dimensions."""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Literal, get_args

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from lightning_mp.ground.core.messages import listed
from lightning_mp.ground.modules.names import named_modules, near_misses
from lightning_mp.training.tensor_parallel.known_models import Style, automatic_styles, class_path, head_counts
from lightning_mp.training.tensor_parallel.layers import CONV1D, split_dimension, why_not_in_parts
from lightning_mp.training.tensor_parallel.sequence_parallel import can_take_parts

Automatic = Literal["auto", "auto_sequence"]
"""Plans that are made for the models of :mod:`~lightning_mp.training.tensor_parallel.known_models`."""

Plan = Mapping[str, Style | Automatic] | Automatic
"""What a user writes."""

_OWNER = "FSDP2Strategy"
_STYLES = (*get_args(Style), *get_args(Automatic))
#: Queries, keys and values.
_FUSED = 3


def read_plan(plan: Plan | None) -> Plan:
    """Checks the argument; None is "auto".

    >>> read_plan({"*.up": "column"}), read_plan(None)
    ({'*.up': 'column'}, 'auto')
    """
    if plan is None:
        return "auto"
    if isinstance(plan, str) and plan in get_args(Automatic):
        return plan
    if not isinstance(plan, Mapping) or not plan:
        raise ValueError(
            f"{_OWNER}(tensor_parallel_plan={plan!r}): it must be 'auto' or 'auto_sequence', or a mapping from globs"
            f" over names of layers to one of {_STYLES}, as in {{'*.mlp.up': 'column', '*.mlp.down': 'row'}}."
        )
    for pattern, style in plan.items():
        if style not in _STYLES or not isinstance(pattern, str):
            raise ValueError(
                f"{_OWNER}(tensor_parallel_plan=...): {pattern!r}: {style!r} is not a rule. The left side is a glob"
                f" over names of layers, the right side one of {_STYLES}."
            )
    return dict(plan)


def resolve_plan(model: nn.Module, plan: Plan) -> dict[str, Style]:
    """The style of each layer that is split, by its name, in the order of the model. The first rule that matches wins.

    A rule with "auto" or "auto_sequence" on the right gives layers what these plans give them, so that
    ``{"*.lm_head": "column_gather", "*": "auto"}`` is the automatic plan with another head. "whole" leaves a layer
    alone.

    >>> model = nn.ModuleDict({"up": nn.Linear(4, 8), "down": nn.Linear(8, 4)})
    >>> resolve_plan(model, {"up": "column", "do*": "row"})
    {'up': 'column', 'down': 'row'}
    """
    modules = dict(named_modules(model))
    found: dict[str, Style] = {}
    for pattern, style in ({"*": plan} if isinstance(plan, str) else plan).items():
        for name, its_style in _fitting(model, modules, pattern, style).items():
            found.setdefault(name, its_style)
    for name, chosen in found.items():
        if (chosen == "vocabulary") != isinstance(modules[name], nn.Embedding) and chosen != "whole":
            raise ValueError(
                f"{_OWNER}(tensor_parallel_plan=...): {name} is a {type(modules[name]).__name__}, which cannot be split"
                f" as {chosen!r}. 'vocabulary' is for nn.Embedding, and the only style for it."
            )
        if chosen == "vocabulary" and (why_not := why_not_in_parts(modules[name])) is not None:
            raise ValueError(
                f"{_OWNER}(tensor_parallel_plan=...): {name} has {why_not}, which needs the ids and rows of all ranks,"
                " so it cannot be split as 'vocabulary'. Leave that out, or plan it and a head tied to it as 'whole'."
            )
        if chosen != "whole" and _can_be_split(modules[name]):
            _refuse_other_parameters(name, modules[name])
    return {name: found[name] for name in modules if found.get(name, "whole") != "whole"}


def check_divisible(model: nn.Module, styles: Mapping[str, Style], tensor_parallel_size: int) -> None:
    """Refuses layers that do not give equal parts."""
    modules = dict(named_modules(model))
    owner = f"{_OWNER}(tensor_parallel_size={tensor_parallel_size})"
    for name, style in styles.items():
        if style in ("sequence", "whole_sequence"):
            continue
        size = modules[name].weight.shape[split_dimension(modules[name], style)]  # type: ignore[index]
        if style == "column_qkv" and size % _FUSED:
            raise ValueError(
                f"{owner}: {name} is split as 'column_qkv', for queries, keys and values of one size in one matrix,"
                f" but has {size} outputs, not a multiple of {_FUSED}. Split it as 'column_gather' and the layer after"
                " the attention as 'row_split'."
            )
        parts = size // _FUSED if style == "column_qkv" else size
        if parts % tensor_parallel_size:
            raise ValueError(
                f"{owner}: {name} is split as {style!r} along a dimension of {parts}, which {tensor_parallel_size}"
                " ranks do not divide. Use another tensor_parallel_size, pad the layer, or let it be 'whole' in"
                " tensor_parallel_plan."
            )
    for name, heads, number in head_counts(model, styles):
        if number % tensor_parallel_size:
            raise ValueError(
                f"{owner}: {name} has {heads}={number}, which {tensor_parallel_size} ranks do not divide; each rank"
                " computes whole heads. Use another tensor_parallel_size, or let every rank compute all heads:"
                " queries, keys and values as 'column_gather', the layer after them as 'row_split'."
            )


def _fitting(
    model: nn.Module, modules: Mapping[str, nn.Module], pattern: str, style: Style | Automatic
) -> dict[str, Style]:
    """What one rule says."""
    if style == "auto" or style == "auto_sequence":
        known = automatic_styles(model, sequence=style == "auto_sequence")
        if not known:
            raise ValueError(
                f"{_OWNER}(tensor_parallel_plan={style!r}) knows Llama and GPT-2 of Hugging Face and the GPT of"
                f" lightning_mp.language_model, and found none of them in {type(model).__name__}. Write the plan as a"
                " mapping, as in {'*.mlp.up': 'column', '*.mlp.down': 'row'}."
            )
        names = [name for name in known if fnmatchcase(name, pattern)]
        fitting = {name: known[name] for name in names}
        candidates, kinds = list(known), f"layer that {style!r} knows"
    else:
        about, kinds = _ABOUT.get(style, (_can_be_split, "Linear, Embedding or Conv1D"))
        candidates = [name for name, module in modules.items() if about(module)]
        fitting = {name: style for name in candidates if fnmatchcase(name, pattern)}
    if not fitting:
        raise ValueError(
            f"{_OWNER}(tensor_parallel_plan=...): {pattern!r} matches no {kinds} of {type(model).__name__}."
            f"{near_misses(pattern, candidates)} Layers that exist: {listed(candidates, most=12) or 'none'}."
        )
    return fitting


def _refuse_other_parameters(name: str, layer: nn.Module) -> None:
    """Weights that are computed from others in each forward would have to be split as those are."""
    own = {inner for inner, _ in layer.named_parameters(recurse=False)}
    if is_parametrized(layer) or not own <= {"weight", "bias"}:
        others = [inner for inner, _ in layer.named_parameters() if inner not in ("weight", "bias")]
        raise ValueError(
            f"{_OWNER}(tensor_parallel_plan=...): {name} has {listed(others, most=12)} (weight_norm,"
            " spectral_norm or another parametrization), from which its weight is recomputed, and only plain weights"
            " and biases are split. Let it be 'whole', with the layers that share its split, or remove the"
            " parametrization (torch.nn.utils.parametrize.remove_parametrizations)."
        )


def _holds_layers(module: nn.Module) -> bool:
    return any(_can_be_split(part) for part in module.modules()) and not _can_be_split(module)


def _can_be_split(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear | nn.Embedding) or class_path(module) == CONV1D


#: Styles that are not about single layers.
_ABOUT = {
    "sequence": (can_take_parts, "norm, Dropout or ModuleList"),
    "whole_sequence": (_holds_layers, "module with layers inside"),
}
