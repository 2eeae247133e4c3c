"""Plans for tensor parallelism: which layers are cut, and along which of their two dimensions."""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any, Literal, get_args

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from lightning_mp.policy_rules import named_modules, near_misses

__all__ = ["Style", "apply_style", "check_divisible", "read_plan", "resolve_plan"]

Style = Literal["column", "row", "column_gather", "row_split", "vocabulary"]
"""How a layer is cut; see :func:`apply_style`."""

_OWNER = "FSDP2Strategy"
_NAMES_IN_MESSAGE = 12
_CONV1D = "transformers.pytorch_utils.Conv1D"

# Where queries, keys and values are one matrix, its columns are not those of whole heads: the product is cut, and
# attention itself runs on all ranks.
_FUSED_ATTENTION: Mapping[str, Style] = MappingProxyType({"in": "column_gather", "out": "row_split"})
_LLAMA, _GPT2 = "transformers.models.llama.modeling_llama", "transformers.models.gpt2.modeling_gpt2"
_DEMO = "lightning_mp.demo.model"

# Class of a module -> its children.
_AUTO: Mapping[str, Mapping[str, Style]] = MappingProxyType(
    {
        f"{_LLAMA}.LlamaAttention": {"q_proj": "column", "k_proj": "column", "v_proj": "column", "o_proj": "row"},
        f"{_LLAMA}.LlamaMLP": {"gate_proj": "column", "up_proj": "column", "down_proj": "row"},
        f"{_LLAMA}.LlamaModel": {"embed_tokens": "vocabulary"},
        f"{_LLAMA}.LlamaForCausalLM": {"lm_head": "column_gather"},
        f"{_GPT2}.GPT2Attention": {"c_attn": _FUSED_ATTENTION["in"], "c_proj": _FUSED_ATTENTION["out"]},
        f"{_GPT2}.GPT2MLP": {"c_fc": "column", "c_proj": "row"},
        f"{_GPT2}.GPT2Model": {"wte": "vocabulary"},
        f"{_GPT2}.GPT2LMHeadModel": {"lm_head": "column_gather"},
        f"{_DEMO}.CausalSelfAttention": {"query_key_value": _FUSED_ATTENTION["in"], "output": _FUSED_ATTENTION["out"]},
        f"{_DEMO}.MLP": {"up": "column", "down": "row"},
        f"{_DEMO}.GPT": {"token_embedding": "vocabulary", "head": "column_gather"},
    }
)
_ATTENTION_BY_HEADS = (f"{_LLAMA}.LlamaAttention",)


def read_plan(plan: Mapping[str, Style] | Literal["auto"] | None) -> dict[str, Style] | Literal["auto"]:
    """Checks the argument; None is "auto".

    Raises:
        ValueError: if it is neither a mapping nor "auto", or a style is unknown.

    Example:
        >>> read_plan({"*.up": "column"}), read_plan(None)
        ({'*.up': 'column'}, 'auto')
    """
    if plan is None or plan == "auto":
        return "auto"
    if not isinstance(plan, Mapping) or not plan:
        raise ValueError(
            f"{_OWNER}(tensor_parallel_plan={plan!r}): it must be 'auto', or a mapping from globs over names of layers"
            f" to one of {get_args(Style)}, as in {{'*.mlp.up': 'column', '*.mlp.down': 'row'}}."
        )
    for pattern, style in plan.items():
        if style not in get_args(Style) or not isinstance(pattern, str):
            raise ValueError(
                f"{_OWNER}(tensor_parallel_plan=...): {pattern!r}: {style!r} is no rule. On the left stands a glob over"
                f" names of layers, on the right one of {get_args(Style)}."
            )
    return dict(plan)


def resolve_plan(model: nn.Module, plan: Mapping[str, Style] | Literal["auto"]) -> dict[str, Style]:
    """The style of each layer that is cut, by its name, in the order of the model. The first rule that fits wins.

    Raises:
        ValueError: if a rule fits no layer that can be cut, or "auto" knows no module of the model.

    Example:
        >>> model = nn.ModuleDict({"up": nn.Linear(4, 8), "down": nn.Linear(8, 4)})
        >>> resolve_plan(model, {"up": "column", "do*": "row"})
        {'up': 'column', 'down': 'row'}
    """
    layers = {name: module for name, module in named_modules(model) if _can_be_cut(module)}
    found = _auto(model) if plan == "auto" else _by_rules(model, plan, layers)
    for name, style in found.items():
        if (style == "vocabulary") != isinstance(layers[name], nn.Embedding):
            raise ValueError(
                f"{_OWNER}(tensor_parallel_plan=...): {name} is a {type(layers[name]).__name__}, which cannot be cut as"
                f" {style!r}. 'vocabulary' is for nn.Embedding, and the only style for it."
            )
    return {name: found[name] for name in layers if name in found}


def check_divisible(model: nn.Module, styles: Mapping[str, Style], tensor_parallel_size: int) -> None:
    """Refuses layers that do not give equal parts.

    Raises:
        ValueError: names the layer, its size and the number of ranks.
    """
    modules = dict(named_modules(model))
    for name, style in styles.items():
        size = modules[name].weight.shape[_cut_dimension(modules[name], style)]  # type: ignore[index]
        if size % tensor_parallel_size:
            raise ValueError(
                f"{_OWNER}(tensor_parallel_size={tensor_parallel_size}): {name} is cut as {style!r} along a dimension"
                f" of {size}, which {tensor_parallel_size} ranks do not divide. Use another tensor_parallel_size, pad"
                " the layer, or leave it out of tensor_parallel_plan."
            )
    for name, module in modules.items():
        config = getattr(module, "config", None)
        if _path(module) not in _ATTENTION_BY_HEADS or f"{name}.q_proj" not in styles:
            continue
        for heads in ("num_attention_heads", "num_key_value_heads"):
            number = getattr(config, heads)
            if number % tensor_parallel_size:
                raise ValueError(
                    f"{_OWNER}(tensor_parallel_size={tensor_parallel_size}): {name} has {heads}={number}, which"
                    f" {tensor_parallel_size} ranks do not divide; each rank computes whole heads."
                )


def apply_style(layer: nn.Module, style: Style, mesh: DeviceMesh) -> None:
    """Cuts one layer over the ranks of a mesh, in place.

    ==================  ======================  ==================  ====================  ==========================
    style               weight of a Linear is   takes               gives                 communication, forward
    ==================  ======================  ==================  ====================  ==========================
    ``column``          cut by outputs          whole input         this rank's outputs   none
    ``row``             cut by inputs           this rank's inputs  whole output          all-reduce
    ``column_gather``   cut by outputs          whole input         whole output          all-gather
    ``row_split``       cut by inputs           whole input         whole output          all-reduce
    ``vocabulary``      (Embedding) by rows     whole token ids     whole output          all-reduce
    ==================  ======================  ==================  ====================  ==========================

    A ``column`` layer is followed by a ``row`` layer, with nothing between them but what works on parts of the last
    dimension, such as an activation or whole attention heads (Shoeybi et al. 2019, "Megatron-LM", section 3). Where the
    code between needs the whole, the other two do the same products with more communication.

    Args:
        layer: ``nn.Linear``, ``nn.Embedding`` or Hugging Face's ``Conv1D``.
        style: see the table.
        mesh: the ranks.
    """
    if _path(layer) == _CONV1D:
        _cut_conv1d(layer, style, mesh)
        return
    styles: dict[Style, ParallelStyle] = {
        "column": ColwiseParallel(),
        "row": RowwiseParallel(),
        "column_gather": ColwiseParallel(output_layouts=Replicate()),
        "row_split": RowwiseParallel(input_layouts=Replicate()),
        "vocabulary": RowwiseParallel(input_layouts=Replicate()),
    }
    parallelize_module(layer, mesh, styles[style])


def _auto(model: nn.Module) -> dict[str, Style]:
    found: dict[str, Style] = {}
    for name, module in named_modules(model):
        for kind in type(module).__mro__:
            for child, style in _AUTO.get(f"{kind.__module__}.{kind.__qualname__}", {}).items():
                found[f"{name}.{child}" if name else child] = style
    if not found:
        raise ValueError(
            f"{_OWNER}(tensor_parallel_plan='auto') knows Llama and GPT-2 of Hugging Face and the GPT of"
            f" lightning_mp.demo, and found none of them in {type(model).__name__}. Write the plan as a mapping, as in"
            " {'*.mlp.up': 'column', '*.mlp.down': 'row'}."
        )
    return found


def _by_rules(model: nn.Module, plan: Mapping[str, Style], layers: Mapping[str, nn.Module]) -> dict[str, Style]:
    found: dict[str, Style] = {}
    for pattern, style in plan.items():
        names = [name for name in layers if fnmatchcase(name, pattern)]
        if not names:
            some = ", ".join(list(layers)[:_NAMES_IN_MESSAGE])
            raise ValueError(
                f"{_OWNER}(tensor_parallel_plan=...): {pattern!r} fits no Linear, Embedding or Conv1D of"
                f" {type(model).__name__}.{near_misses(pattern, layers)} Layers that exist: {some or 'none'}."
            )
        for name in names:
            found.setdefault(name, style)
    return found


def _can_be_cut(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear | nn.Embedding) or _path(module) == _CONV1D


def _path(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def _cut_dimension(layer: nn.Module, style: Style) -> int:
    """Along which dimension of its weight a layer is cut."""
    by_outputs = style in ("column", "column_gather", "vocabulary")
    if _path(layer) == _CONV1D:
        by_outputs = not by_outputs
    return 0 if by_outputs else 1


def _cut_conv1d(layer: nn.Module, style: Style, mesh: DeviceMesh) -> None:
    """torch's own styles know no layer whose weight is ``[inputs, outputs]``."""
    by_outputs = style in ("column", "column_gather")
    split: Placement = Shard(-1)
    takes = split if style == "row" else Replicate()
    gives = split if style == "column" else Replicate()
    placements: dict[str, Placement] = {
        "weight": Shard(1 if by_outputs else 0),
        "bias": Shard(0) if by_outputs else Replicate(),
    }

    def partition(_name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
        for name, parameter in list(module.named_parameters(recurse=False)):
            cut = distribute_tensor(parameter.detach(), device_mesh, [placements[name]])
            module.register_parameter(name, nn.Parameter(cut, parameter.requires_grad))

    def on_input(_module: nn.Module, inputs: tuple[Any, ...], device_mesh: DeviceMesh) -> tuple[DTensor, ...]:
        whole_or_part = DTensor.from_local(inputs[0], device_mesh, [takes], run_check=False)
        return (whole_or_part if by_outputs else whole_or_part.redistribute(placements=[split]),)

    def on_output(_module: nn.Module, output: DTensor, device_mesh: DeviceMesh) -> Tensor:
        local: Tensor = output.redistribute(placements=[gives]).to_local()
        return local

    distribute_module(layer, mesh, partition, on_input, on_output)  # type: ignore[arg-type]  # what hooks return
