"""Checkpoints of compiled modules for eager ones, and the other way round."""

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from lightning_mp.ground.modules.names import unwrapped_name

#: Where a module is ``torch.compile(module)``, a name has this in it. ``module.compile()`` changes no name.
COMPILED_PREFIX = "_orig_mod."


def translated_names(saved: Iterable[str], own: Iterable[str]) -> dict[str, str]:
    """Of the names in a state dict those that the module has under another one: with or without what wrappers add.

    >>> translated_names(["net._orig_mod.weight", "head.bias"], ["net.weight", "head.bias"])
    {'net._orig_mod.weight': 'net.weight'}
    >>> translated_names(["net.weight"], ["net._orig_mod.weight"])
    {'net.weight': 'net._orig_mod.weight'}
    """
    saved, own = set(saved), set(own)
    by_plain_name = {unwrapped_name(name): name for name in own - saved}
    targets = {name: by_plain_name.get(unwrapped_name(name)) for name in sorted(saved - own)}
    return {name: target for name, target in targets.items() if target is not None}


def translate_on_load(module: nn.Module) -> RemovableHandle:
    """Has ``module.load_state_dict`` take names with and without ``_orig_mod``, until the handle is removed."""

    def translate(module: nn.Module, state_dict: dict[str, Any], *_: Any) -> None:
        for name, own in translated_names(state_dict, module.state_dict()).items():
            state_dict[own] = state_dict.pop(name)

    handle: RemovableHandle = module.register_load_state_dict_pre_hook(translate)
    return handle
