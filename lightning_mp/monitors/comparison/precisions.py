"""Which precisions are compared: names, plugins, or functions that make them; each run has its own plugin."""

import copy
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision

from lightning_mp.ground.core.known_words import did_you_mean
from lightning_mp.ground.core.settings_repr import SettingsRepr
from lightning_mp.training.precision import AutocastPrecision, Float8Precision, MasterWeightsPrecision, TF32Precision
from lightning_mp.training.precision.fp8.conversion import Float8Recipe

PluginFactory = Callable[[], Precision]


def _fp8(recipe: Float8Recipe, device_type: str) -> Float8Precision:
    """Emulated on a CPU, where some take seconds for a step with torch's own product, and speed is no question."""
    on_cpu = device_type == "cpu"
    return Float8Precision(recipe, emulate=on_cpu, skip_small=not on_cpu)


# From the device type to a plugin.
_BY_NAME: Mapping[str, Callable[[str], Precision]] = MappingProxyType(
    {
        "64-true": lambda device_type: DoublePrecision(),
        "32-true": lambda device_type: Precision(),
        "tf32": lambda device_type: TF32Precision(),
        "bf16-mixed": lambda device_type: AutocastPrecision("bf16-mixed"),
        "16-mixed": lambda device_type: AutocastPrecision("16-mixed"),
        "bf16-true": lambda device_type: MasterWeightsPrecision("bf16-true"),
        "bf16-true+remainder": lambda device_type: MasterWeightsPrecision("bf16-true", storage="remainder"),
        "bf16-true+24bit": lambda device_type: MasterWeightsPrecision("bf16-true", storage="24bit"),
        "16-true": lambda device_type: MasterWeightsPrecision("16-true"),
        "fp8-mixed": lambda device_type: _fp8("tensorwise", device_type),
        "fp8-tensorwise": lambda device_type: _fp8("tensorwise", device_type),
        "fp8-rowwise": lambda device_type: _fp8("rowwise", device_type),
        "lightning:bf16-true": lambda device_type: HalfPrecision("bf16-true"),
        "lightning:16-true": lambda device_type: HalfPrecision("16-true"),
        "lightning:bf16-mixed": lambda device_type: MixedPrecision("bf16-mixed", device_type),
        "lightning:16-mixed": lambda device_type: MixedPrecision("16-mixed", device_type),
    }
)

PRECISION_NAMES: tuple[str, ...] = tuple(_BY_NAME)
"""Names of ``compare_precisions``: those of ``estimate_memory``; ``lightning:`` is Lightning's own plugin."""


def plugin_factories(
    precisions: Iterable[str | Precision | PluginFactory] | Mapping[str, str | Precision | PluginFactory],
    device_type: str,
) -> dict[str, PluginFactory]:
    """A function that makes the plugin of each precision, by name.

    >>> from lightning_mp import AutocastPrecision
    >>> list(plugin_factories(["32-true", AutocastPrecision("bf16-mixed")], "cpu"))
    ['32-true', 'AutocastPrecision(bf16-mixed)']
    """
    if isinstance(precisions, str):
        raise ValueError(f'`precisions` must be several, got {precisions!r}. Pass ("32-true", {precisions!r}).')
    named = precisions.items() if isinstance(precisions, Mapping) else [(_name_of(each), each) for each in precisions]
    factories: dict[str, PluginFactory] = {}
    for name, precision in named:
        if name in factories:
            raise ValueError(
                f'`precisions` has {name!r} twice. Leave one out, or name them in Python: {{"a": ..., "b": ...}}.'
            )
        factories[name] = _factory(precision, device_type)
    if len(factories) < 2:
        raise ValueError(
            f"`precisions` must be two or more, the baseline first, got {len(factories)}. Names are "
            f"{', '.join(PRECISION_NAMES)}."
        )
    return factories


def make_plugin(name: str, device_type: str) -> Precision:
    """A new plugin."""
    if name not in _BY_NAME:
        raise ValueError(
            f"`precisions` has {name!r}.{did_you_mean(name, _BY_NAME)} Known names are {', '.join(PRECISION_NAMES)}."
        )
    return _BY_NAME[name](device_type)


def described(plugin: Precision) -> str:
    """A plugin with its settings, in the same words in every process."""
    return repr(plugin) if isinstance(plugin, SettingsRepr) else f"{type(plugin).__name__}({plugin.precision})"


def _name_of(precision: Any) -> str:
    if isinstance(precision, str):
        return precision
    if isinstance(precision, Precision):
        return f"{type(precision).__name__}({precision.precision})"
    return str(getattr(precision, "__name__", type(precision).__name__))


def _factory(precision: Any, device_type: str) -> PluginFactory:
    if isinstance(precision, str):
        make_plugin(precision, device_type)
        return lambda: make_plugin(precision, device_type)
    if isinstance(precision, Precision):
        # now, so that what happens to the caller's plugin later changes nothing
        untouched = copy.deepcopy(precision)
        return lambda: copy.deepcopy(untouched)
    if callable(precision):
        return precision  # type: ignore[no-any-return]
    raise ValueError(
        f"`precisions` has {precision!r} of type {type(precision).__name__}. Pass a name, a precision plugin, or a"
        " function without arguments that makes one."
    )
