"""In which dtype FSDP2 gathers the weights of each module of a model that trains under autocast, or with masters."""

from collections.abc import Callable

import torch
from torch import nn

from lightning_mp.ground.modules.names import named_modules
from lightning_mp.training.policy.operations import FAMILIES, operation_of_module
from lightning_mp.training.policy.policy import PrecisionPolicy
from lightning_mp.training.policy.resolved import PolicyModule, ResolvedPolicy
from lightning_mp.training.policy.rules import LOW, Dtype, Rule, dtype_name
from lightning_mp.training.policy.weights_in_float32 import kept_in_float32, with_exact_parametrizations

# Matrix products that are no modules of torch: a linear layer with its weight the other way round.
_PRODUCTS = ("transformers.pytorch_utils.Conv1D",)


def gathered_dtypes(model: nn.Module, policy: PrecisionPolicy | None, low: torch.dtype) -> ResolvedPolicy:
    """Weights that autocast would cast to 16 bit at their use are gathered so; all others in fp32.

    Linear and convolutional layers come in 16 bit, norms, embeddings and modules that torch does not know in fp32: what
    they compute is then the same as on one device, where nothing is gathered. A policy rule about a module takes
    precedence: ``{"class:Embedding": "low"}`` halves the bytes of embeddings and rounds them. Norms stay in fp32 under
    such a rule, because their kernels refuse 16-bit weights with fp32 inputs. A weight that several modules share is
    gathered in fp32 unless all of them use 16 bit.

    >>> model = nn.Sequential(nn.Embedding(4, 4), nn.Linear(4, 4))
    >>> [(m.name, m.dtype) for m in gathered_dtypes(model, None, torch.bfloat16).modules if m.has_parameters]
    [('0', torch.float32), ('1', 'low')]
    """
    resolved = policy.resolve(model) if policy is not None else None
    decided = {module.name: module for module in resolved.modules} if resolved is not None else {}

    def dtype_of(name: str, part: nn.Module) -> Dtype:
        ruled = decided.get(name)
        if resolved is not None and ruled is not None and resolved.deciding_rule(ruled) is not None:
            requested = resolved.compute_dtype(ruled)
            return torch.float32 if requested == LOW and _is_norm(part) else requested
        return LOW if _is_product(part) else torch.float32

    return _gathered(model, dtype_of)


def gathered_of_masters(model: nn.Module, policy: PrecisionPolicy | None, low: torch.dtype) -> ResolvedPolicy:
    """Of fp32 shards that are master weights: 16 bit for all that modules compute with in 16 bit, fp32 for the rest.

    >>> model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    >>> [m.dtype for m in gathered_of_masters(model, None, torch.bfloat16).modules if m.has_parameters]
    ['low', torch.float32]
    """
    kept = kept_in_float32(model, with_exact_parametrizations(policy, model), low)
    return _gathered(model, lambda _, part: torch.float32 if part in kept else LOW)


def _gathered(model: nn.Module, dtype_of: Callable[[str, nn.Module], Dtype]) -> ResolvedPolicy:
    """The dtypes of modules' own weights, as a policy; a weight that several share with different dtypes is fp32."""
    by_parameter: dict[int, list[str]] = {}
    dtypes: dict[str, Dtype] = {}
    modules: dict[str, nn.Module] = {}
    for name, module in named_modules(model):
        if any(module is other for other in modules.values()):
            continue
        modules[name] = module
        dtypes[name] = dtype_of(name, module)
        for parameter in module.parameters(recurse=False):
            by_parameter.setdefault(id(parameter), []).append(name)
    for names in by_parameter.values():
        if len({dtypes[name] for name in names}) > 1:
            for name in names:
                dtypes[name] = torch.float32
    wanted = list(dict.fromkeys(dtypes.values()))
    rules = tuple(Rule("module", "*", dtype, f"weights in {dtype_name(dtype)}") for dtype in wanted)
    found = tuple(
        PolicyModule(
            name,
            type(module).__name__,
            None,
            next(module.parameters(recurse=False), None) is not None,
            wanted.index(dtypes[name]),
            dtypes[name],
        )
        for name, module in modules.items()
    )
    return ResolvedPolicy(rules, found, {})


def gathered_low(model: nn.Module, policy: PrecisionPolicy | None, low: torch.dtype) -> list[nn.Parameter]:
    """The parameters that are gathered in 16 bit.

    >>> model = nn.Sequential(nn.Embedding(4, 4), nn.Linear(4, 4, bias=False))
    >>> gathered_low(model, None, torch.bfloat16) == [model[1].weight]
    True
    """
    found = gathered_dtypes(model, policy, low).modules
    modules = dict(named_modules(model))
    chosen = [modules[module.name] for module in found if module.dtype in (LOW, low)]
    return [parameter for part in chosen for parameter in part.parameters(recurse=False)]


def _is_product(module: nn.Module) -> bool:
    operation = operation_of_module(module)
    if operation is not None:
        return operation in FAMILIES["matmuls"]
    return any(f"{kind.__module__}.{kind.__qualname__}" in _PRODUCTS for kind in type(module).__mro__)


def _is_norm(module: nn.Module) -> bool:
    operation = operation_of_module(module)
    return operation is not None and operation not in FAMILIES["matmuls"]
