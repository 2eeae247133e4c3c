"""What a preflight reads off a checkpoint, without its numbers."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_mp.preflight_checks.found import FoundCheckpoint


def inspect_checkpoint(
    path: str | Path,
    module: nn.Module,
    own_optimizers: tuple[tuple[int, ...], ...] | None,
    own_learning_rates: tuple[float, ...],
) -> FoundCheckpoint:
    """Compares a checkpoint of Lightning's in one file with a module and its optimizers."""
    file = Path(path)
    if not file.is_file():
        what = "a folder of shards, which is read on the ranks" if file.is_dir() else "no file"
        raise ValueError(f"{file} is {what}.")
    try:
        content = torch.load(file, map_location="meta", mmap=True, weights_only=True)
    except Exception as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"{file} cannot be read without running code from it ({reason}).") from error
    if not isinstance(content, Mapping) or "state_dict" not in content:
        raise ValueError(f"{file} is not a Lightning checkpoint: it has no 'state_dict'.")
    saved, own = content["state_dict"], module.state_dict()
    groups = [list(one["param_groups"]) for one in content.get("optimizer_states", [])]
    return FoundCheckpoint(
        path=file.name,
        missing=tuple(name for name in own if name not in saved),
        unexpected=tuple(name for name in saved if name not in own),
        reshaped=tuple(name for name in own if name in saved and _shape(own[name]) != _shape(saved[name])),
        optimizers=tuple(tuple(len(group["params"]) for group in one) for one in groups) or None,
        own_optimizers=own_optimizers,
        learning_rates=tuple(float(group.get("initial_lr", group.get("lr", 0.0))) for one in groups for group in one),
        own_learning_rates=own_learning_rates,
        global_step=int(content.get("global_step", 0)),
        epochs_done=_epochs_done(content),
        has_scale=any(_is_scale(state) for state in content.values()),
    )


def _shape(value: Any) -> Any:
    return value.shape if isinstance(value, Tensor) else None


def _epochs_done(content: Mapping[str, Any]) -> int:
    progress = content.get("loops", {}).get("fit_loop", {}).get("epoch_progress", {})
    return int(progress.get("current", {}).get("processed", 0))


def _is_scale(state: Any) -> bool:
    """What torch's GradScaler saves, alone or inside of what a plugin saves."""
    return isinstance(state, Mapping) and any("growth_factor" in one for one in _mappings(state))


def _mappings(state: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    yield state
    for value in state.values():
        if isinstance(value, Mapping):
            yield value
