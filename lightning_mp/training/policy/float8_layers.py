"""Which linear layers of a model multiply in fp8, which do not, and why."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn
from torch.distributed.fsdp import FSDPModule

from lightning_mp.ground.core.float8_gains import SmallestGain
from lightning_mp.ground.core.messages import listed
from lightning_mp.ground.modules.names import is_inside, named_modules
from lightning_mp.ground.modules.whole_parameters import tensor_parallel_parts
from lightning_mp.training.policy.resolved import ResolvedPolicy
from lightning_mp.training.policy.rules import LOW

#: An entry of ``skip``: a class, or a name or glob. In this order, so that a YAML file can give a class by its path.
Float8Skip = type[nn.Module] | str

#: ``torch._scaled_mm`` on CUDA refuses other sizes of a weight (github.com/pytorch/ao/issues/571); rows are padded.
DIMENSION_MULTIPLE = 16


@dataclass(frozen=True)
class Float8Layer:
    """An ``nn.Linear`` and what was decided about it."""

    name: str  # dotted name, as in `named_modules()` but without what wrappers put into it
    module: nn.Linear  # the layer itself
    skipped_because: str | None  # why it does not multiply in fp8; None if it does


def check_skip(skip: Iterable[Float8Skip]) -> Collection[Float8Skip]:
    """The argument of ``Float8Precision``; one entry may be given without a list.

    >>> check_skip(["head", nn.MultiheadAttention])
    ['head', <class 'torch.nn.modules.activation.MultiheadAttention'>]
    """
    entries = [skip] if isinstance(skip, str | type) else list(skip) if isinstance(skip, Iterable) else [None]
    if not all(isinstance(entry, str | type) for entry in entries):
        raise ValueError(
            f"Float8Precision(skip={skip!r}): it must be a list of names, globs and classes of layers that stay in"
            " bf16, such as ['head', '*.router']; [] for none."
        )
    return skip if isinstance(skip, Collection) else entries


def choose_float8_layers(
    model: nn.Module,
    skip: Collection[Float8Skip] = (),
    *,
    skip_first_and_last: bool = True,
    policy: ResolvedPolicy | None = None,
    smallest: SmallestGain | None = None,
) -> list[Float8Layer]:
    """Decides about every ``nn.Linear`` of a model, in the order in which they are registered.

    The first of these that applies keeps a layer out of fp8:

    .. code-block:: text

        skip names it, or a module around it
        a policy requests another dtype than "low" in it, or in the operation linear
        its class is a subclass of nn.Linear, which may compute something else, or its forward was replaced
        in_features or out_features is not a multiple of 16, or under tensor parallelism a rank's part of one is none
        its weight also belongs to a module that is no Linear, such as an embedding
        it is the first or the last Linear of the model
        it is smaller than `smallest`, from which on its recipe gains

    The rule about the first and the last is a habit of practice, for quality: the layers beside the embedding and the
    logits suffer most and cost little (Megatron-LM has it as ``first_last_layers_bf16``, torchtitan filters its output
    layer).
    """
    names = _names_of_linears(model)
    kept_by = _rules_by_name(policy) if policy is not None else {}
    named_by = _entries_by_linear(model, names, [skip] if isinstance(skip, str | type) else list(skip))
    owners = _owners_besides_linears(model)
    ends = {"first": next(iter(names), None), "last": next(reversed(names), None)}
    layers = []
    for linear, own_names in names.items():
        reason = f"skip={named_by[linear]}" if linear in named_by else kept_by.get(own_names[0])
        reason = reason or _unsuited(linear, owners)
        if reason is None and skip_first_and_last:
            reason = next((f"it is the {end} Linear" for end, module in ends.items() if module is linear), None)
        if reason is None and smallest is not None:
            reason = _too_small(linear, smallest)
        layers.append(Float8Layer(own_names[0], linear, reason))
    return layers


def summarise_float8_layers(layers: Sequence[Float8Layer]) -> str:
    """How many layers multiply in fp8, and why the others do not, in one line.

    >>> model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 10))
    >>> summarise_float8_layers(choose_float8_layers(model))
    '1 of 3 Linear layers; not 0 (it is the first Linear), 2 (out_features is 10, not a multiple of 16)'
    """
    by_reason: dict[str, list[str]] = {}
    for layer in layers:
        if layer.skipped_because is not None:
            by_reason.setdefault(layer.skipped_because, []).append(layer.name)
    skipped = [f"{listed(names, most=3)} ({reason})" for reason, names in by_reason.items()]
    others = f"; not {', '.join(skipped)}" if skipped else ""
    chosen = sum(layer.skipped_because is None for layer in layers)
    return f"{chosen} of {len(layers)} Linear layers{others}"


def _names_of_linears(model: nn.Module) -> dict[nn.Linear, list[str]]:
    """Every Linear and all names it has."""
    names: dict[nn.Linear, list[str]] = {}
    for name, module in named_modules(model):
        if isinstance(module, nn.Linear):
            names.setdefault(module, []).append(name)
    return names


def _entries_by_linear(
    model: nn.Module, names: Mapping[nn.Linear, Sequence[str]], entries: Sequence[Float8Skip]
) -> dict[nn.Linear, str]:
    """The first entry that names each Linear, as the user wrote it."""
    found: dict[nn.Linear, str] = {}
    for entry in entries:
        written = repr(entry) if isinstance(entry, str) else entry.__name__
        roots = [
            name
            for name, module in named_modules(model)
            if (fnmatchcase(name, entry) if isinstance(entry, str) else isinstance(module, entry))
        ]
        hits = [
            linear
            for linear, own_names in names.items()
            if any(name == root or is_inside(name, root) for name in own_names for root in roots)
        ]
        if not hits:
            there_are = listed([own[0] for own in names.values()], most=12) or "none"
            raise ValueError(
                f"skip={written} matches no nn.Linear, and no module that contains one. The Linear layers of"
                f" {type(model).__name__} are: {there_are}."
            )
        for linear in hits:
            found.setdefault(linear, written)
    return found


def _rules_by_name(policy: ResolvedPolicy) -> dict[str, str]:
    """Of each module whose weights a policy keeps from "low": the rule, in words."""
    return {
        module.name: f"rule {number + 1} of the policy, {policy.rules[number]}"
        for module in policy.modules
        if (number := policy.deciding_rule(module)) is not None and policy.rules[number].dtype != LOW
    }


def _owners_besides_linears(model: nn.Module) -> dict[int, str]:
    """Which module that is no Linear holds a parameter, by the parameter's id."""
    return {
        id(parameter): f"{name or 'the model'} ({type(module).__name__})"
        for name, module in named_modules(model)
        if not isinstance(module, nn.Linear)
        for parameter in module.parameters(recurse=False)
    }


def _unsuited(linear: nn.Linear, owners: Mapping[int, str]) -> str | None:
    if not _is_plain_linear(linear):
        return f"its class is {type(linear).__name__}, a subclass of nn.Linear"
    if "forward" in vars(linear):
        return "its forward was replaced on the object"
    if not isinstance(linear.weight, nn.Parameter):
        return "its weight is computed from other parameters (pruning, spectral_norm)"
    for dimension, dim in (("in_features", 1), ("out_features", 0)):
        size = getattr(linear, dimension)
        if size % DIMENSION_MULTIPLE:
            return f"{dimension} is {size}, not a multiple of {DIMENSION_MULTIPLE}"
        part = size // tensor_parallel_parts(linear.weight, dim)
        if part % DIMENSION_MULTIPLE:
            return f"a rank's part of {dimension} is {part}, not a multiple of {DIMENSION_MULTIPLE}"
    owner = owners.get(id(linear.weight))
    return None if owner is None else f"its weight is also that of {owner}"


def _too_small(linear: nn.Linear, smallest: SmallestGain) -> str | None:
    """By what a rank holds of it."""
    for dimension, dim in (("in_features", 1), ("out_features", 0)):
        size = getattr(linear, dimension) // tensor_parallel_parts(linear.weight, dim)
        if size < smallest.features:
            return f"{dimension} is {size}, and fp8 gains from {smallest.features}"
    return None


def _is_plain_linear(linear: nn.Linear) -> bool:
    """Whether it is an ``nn.Linear`` and nothing else.

    FSDP2's ``fully_shard`` puts its own class in front, which changes nothing here.
    """
    own = type(linear)
    return own is nn.Linear or (isinstance(linear, FSDPModule) and own.__bases__[1:] == (nn.Linear,))
