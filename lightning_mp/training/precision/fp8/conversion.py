"""Linear layers that multiply in fp8, made in place from ordinary ones and undone as easily.

Two formats of 8 bits (Micikevicius et al. 2022, "FP8 Formats for Deep Learning", https://arxiv.org/abs/2209.05433):

======  ==================  ========  =====================================================================
format  exponent, mantissa  largest   used for
======  ==================  ========  =====================================================================
e4m3    4, 3 bits           448       inputs and weights: once scaled they need precision more than range
e5m2    5, 2 bits           57,344    gradients with one factor per tensor: small ones would be zero in e4m3
======  ==================  ========  =====================================================================

With one factor per row, the gradients under one factor differ less, and e4m3 holds them too.
"""

import importlib.util
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_mp.training.policy.float8_layers import Float8Layer

if TYPE_CHECKING:
    from torchao.float8 import Float8LinearConfig

#: torchao's recipes (torchao.float8.Float8LinearRecipeName). What is scaled by one factor, and the format of gradients:
#: "tensorwise": whole tensors, e5m2 gradients; "rowwise": rows, by powers of two, e4m3 throughout;
#: "rowwise_with_gw_hp": as rowwise, but the weight's gradient is multiplied in bf16.
Float8Recipe = Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"]
RECIPES = get_args(Float8Recipe)


def require_torchao() -> None:
    """Raises if torchao, the optional package with the fp8 layers, is not installed."""
    if importlib.util.find_spec("torchao") is None:
        raise ModuleNotFoundError("fp8 needs torchao, which is not installed: pip install '.[fp8]'.")


def float8_config(recipe: str, *, emulate: bool = False) -> "Float8LinearConfig":
    """torchao's configuration of a layer."""
    require_torchao()
    from torchao.float8 import Float8LinearConfig

    config = Float8LinearConfig.from_recipe_name(recipe)
    # The kernels need multiples of 16 also in the number of rows, which the last batch of an epoch may not have.
    return replace(config, emulate=emulate, pad_inner_dim=not emulate)


def convert_to_float8(layers: Sequence[Float8Layer], config: "Float8LinearConfig") -> "Float8Conversion":
    """Makes the chosen layers multiply in fp8, in place.

    .. code-block:: text

        output       = fp8(input)           @ fp8(weight)^T
        grad_input   = fp8(grad_output)     @ fp8(weight)
        grad_weight  = fp8(grad_output)^T   @ fp8(input)

    Each factor is scaled so that its largest magnitude fits the format, rounded, multiplied with wide sums, and the
    product is scaled back. Weights stay what they are and are rounded at every use.

    torchao's own conversion replaces the modules: hooks, FSDP2's groups and a second name of a layer would refer to
    modules that are no longer used. Here each layer stays the same object, with the same parameters, and its class
    becomes torchao's, which computes the above.
    """
    conversion = Float8Conversion()
    for layer in layers:
        if layer.skipped_because is None:
            conversion.convert(layer.module, config)
    return conversion


class Float8Conversion:
    """Layers that multiply in fp8 until :meth:`undo`."""

    def __init__(self) -> None:
        self._converted: list[tuple[nn.Linear, tuple[str, ...]]] = []  # with the attributes that were added

    @property
    def linears(self) -> list[nn.Linear]:
        """The layers."""
        return [linear for linear, _ in self._converted]

    def convert(self, linear: nn.Linear, config: "Float8LinearConfig") -> None:
        """Turns one layer into an fp8 layer."""
        from torchao.float8 import convert_to_float8_training

        # A new module; its class and the attributes that it adds are taken from it.
        template = convert_to_float8_training(linear, config=config)
        added = {name: value for name, value in vars(template).items() if name not in vars(linear)}
        vars(linear).update(added)
        _exchange_base(linear, nn.Linear, _float8_linear_class())
        self._converted.append((linear, tuple(added)))

    def undo(self) -> None:
        """Makes them ordinary layers again. Weights, gradients, hooks and names stay."""
        while self._converted:
            linear, added = self._converted.pop()
            for name in added:
                delattr(linear, name)
            _exchange_base(linear, _float8_linear_class(), nn.Linear)


def _exchange_base(linear: nn.Linear, old: type[nn.Linear], new: type[nn.Linear]) -> None:
    """Gives a layer another class; the class that FSDP2 has put in front stays in front."""
    own = type(linear)
    if own is old:
        linear.__class__ = new
        return
    assert own.__bases__[-1] is old, own.__mro__
    # FSDP2 makes its classes in the same way, with no copying of what is sharded.
    name = own.__name__.replace(old.__name__, new.__name__)
    linear.__class__ = type(name, (*own.__bases__[:-1], new), {"__deepcopy__": vars(own)["__deepcopy__"]})


@cache
def _float8_linear_class() -> type[nn.Linear]:
    """torchao's layer (0.18) for every device and mode; copies and pickles of it are ordinary layers."""
    torchao_linear: Any = type(_template())

    class Float8Linear(torchao_linear):  # type: ignore[misc]  # torchao has no types
        def forward(self, input: Tensor) -> Tensor:
            device_type = self.weight.device.type
            # torchao looks at CUDA's autocast only. Elsewhere it would take an fp32 input as it is, and the
            # gradient of the weight would have inputs of two dtypes.
            if torch.is_autocast_enabled(device_type):
                input = input.to(torch.get_autocast_dtype(device_type))
            if torch.compiler.is_compiling() or not torch.is_inference_mode_enabled():
                return self._multiply(input)
            # In inference mode torch does not decompose `reshape` and `to`; torchao's tensors know only their parts.
            with torch.inference_mode(False), torch.no_grad():
                return self._multiply(input)

        def _multiply(self, input: Tensor) -> Tensor:
            output: Tensor = super().forward(input)
            return output

        @override
        def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
            # A copy has no part in the run, and nothing would undo its conversion.
            added = vars(_template()).keys() - vars(nn.Linear(1, 1, device="meta")).keys()
            return nn.Linear.__new__, (nn.Linear,), {k: v for k, v in vars(self).items() if k not in added}

    return Float8Linear


def _template() -> Any:
    from torchao.float8 import convert_to_float8_training

    return convert_to_float8_training(nn.Linear(1, 1, device="meta"))
