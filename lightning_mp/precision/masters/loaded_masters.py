"""Checkpoints with fp32 masters, in runs that have none or that come after such a run."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from lightning_mp.checkpoints.sharded import is_sharded_checkpoint, saved_names
from lightning_mp.core.patches import Patch
from lightning_mp.gradients.gradient_ops import local_shard
from lightning_mp.precision.masters.store import refine_full

#: Where a master lies in ``optimizer.state_dict()["state"][i]``, always as full fp32.
MASTER_KEY = "master_param"

#: In a checkpoint: its run trained the masters in the optimizer states. Says in which precision the weights are.
MASTERS_KEY = "lightning_mp_masters"

#: In a checkpoint that is a single file: how many masters its optimizer states have.
MASTER_COUNT_KEY = "lightning_mp_master_count"

#: In a checkpoint: of how many steps its masters are, for masters that are rounded stochastically.
MASTER_STEPS_KEY = "lightning_mp_master_steps"


def without_masters(state: Mapping[Any, Any]) -> tuple[dict[Any, Any], dict[Any, Tensor]]:
    """An optimizer's state without masters, and the masters; the dictionaries that are given stay as they are.

    Example:
        >>> import torch
        >>> without_masters({0: {"step": 1, "master_param": torch.ones(1)}})
        ({0: {'step': 1}}, {0: tensor([1.])})
    """
    kept: dict[Any, Any] = {}
    masters: dict[Any, Tensor] = {}
    for index, entry in state.items():
        if isinstance(entry, dict) and MASTER_KEY in entry:
            entry = dict(entry)
            masters[index] = entry.pop(MASTER_KEY)
            if not entry:
                continue
        kept[index] = entry
    return kept, masters


def by_index(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> list[tuple[Any, Tensor]]:
    """Pairs of a parameter's number in the state dict and the parameter."""
    numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    # Of different length if the state is another optimizer's; torch's own error says so.
    return list(zip(numbers, parameters, strict=False))


def warn_about_other_weights(differing: int, masters: int) -> None:
    """Says that masters of a checkpoint were not taken everywhere."""
    rank_zero_warn(
        f"MasterWeightsPrecision: the checkpoint's fp32 masters differ from the model's weights in {differing} of"
        f" {masters} parameters; there the model's weights are used. Load model and optimizer from one checkpoint, if"
        " that was not intended."
    )


def warn_about_rounded_weights(precision: str) -> None:
    """Warns that a checkpoint was read in 16 bit although fp32 values exist."""
    rank_zero_warn(
        f"This run continues from weights rounded as in {precision!r}: the checkpoint's fp32 masters were not read"
        " with the optimizer states. To continue from the masters, resume from a checkpoint without"
        " save_weights_only=True."
    )


def masters_in(checkpoint: Mapping[str, Any]) -> list[Any]:
    """What lies in the place of masters in the optimizer states of a checkpoint that is a single file."""
    return [
        entry[MASTER_KEY]
        for state_dict in checkpoint.get("optimizer_states", ())
        if isinstance(state_dict, Mapping) and isinstance(state_dict.get("state"), Mapping)
        for entry in state_dict["state"].values()
        if isinstance(entry, Mapping) and MASTER_KEY in entry
    ]


def refuse_damaged_masters(checkpoint: Mapping[str, Any], owner: str) -> None:
    """Refuses a checkpoint that lacks masters which it was saved with, or has something else in their place.

    Lightning has loaded the weights by then: it calls a plugin only afterwards.
    """
    if "optimizer_states" not in checkpoint:
        return
    found = masters_in(checkpoint)
    masters = [value for value in found if isinstance(value, Tensor) and value.is_floating_point()]
    saved = checkpoint.get(MASTER_COUNT_KEY, len(found))
    if len(masters) != saved or len(masters) != len(found):
        raise ValueError(
            f"{owner}: the checkpoint is damaged. It was saved with {saved} fp32 masters in its optimizer states, and"
            f" {len(masters)} of them are there. Resume from another checkpoint, or load the weights alone:"
            " MyModule.load_from_checkpoint(path)."
        )


def drop_stale_masters(checkpoint: dict[str, Any]) -> None:
    """Takes masters out of the optimizer states of a checkpoint whose run did not train them.

    Lightning's own plugins carry what they find in an optimizer's state along, unchanged, while the weights move on.
    """
    if MASTERS_KEY in checkpoint:
        return
    found = 0
    for state_dict in checkpoint.get("optimizer_states", ()):
        if isinstance(state_dict, dict) and isinstance(state_dict.get("state"), dict):
            state_dict["state"], masters = without_masters(state_dict["state"])
            found += len(masters)
    if found:
        rank_zero_warn(
            f"MasterWeightsPrecision ignores the fp32 masters of {found} parameters in this checkpoint: a later run in"
            " one of Lightning's own precisions trained the weights without them. The run continues from the"
            " checkpoint's weights."
        )


def warn_about_rounding(dtype: torch.dtype) -> None:
    """Says, at a run's first checkpoint, who resumes from its masters."""
    rank_zero_info(
        f"MasterWeightsPrecision: checkpoints hold {dtype} weights, and fp32 masters in the optimizer states, from"
        " which the plugins of this package resume. For Lightning's own precisions, which would resume from the"
        " rounded weights, set fp32_checkpoints=True."
    )


def around_load(
    optimizer: Optimizer, begin: Callable[[Optimizer, dict[str, Any]], tuple[dict[str, Any], Callable[[], None]]]
) -> list[Callable[[], None]]:
    """Has ``begin`` change what an optimizer loads, and calls what it returns afterwards; the result ends that.

    It comes at torch's hooks, after those of others, or where a load calls none of them (bitsandbytes) after it. A
    subclass whose load reads the state once more (pytorch_optimizer) finds it without masters. Where ``begin`` returns
    what it got, the masters stay in it: they are not its to take.
    """
    pending: list[Callable[[], None]] = []
    hooked = False
    loading: dict[str, Any] = {}

    def load(state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal hooked, loading
        hooked = False
        if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= state_dict.keys():
            return patch.original(state_dict, *args, **kwargs)
        state = {key: dict(entry) if type(entry) is dict else entry for key, entry in state_dict["state"].items()}
        loading = {**state_dict, "state": state}
        try:
            result = patch.original(loading, *args, **kwargs)
            if not hooked:
                changed, finish = begin(optimizer, loading)
                if changed is not loading:
                    _drop_masters(optimizer.state)
                finish()
        finally:
            loading = {}
        return result

    def before(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        nonlocal hooked
        hooked = True
        changed, finish = begin(optimizer, state_dict)
        pending[:] = [finish]  # in place of that of a load that failed
        if changed is not state_dict:
            _drop_masters(loading.get("state", {}))
        return changed

    def after(optimizer: Optimizer) -> None:
        while pending:
            pending.pop()()

    patch = Patch(optimizer, "load_state_dict", load)
    return [
        patch.undo,
        optimizer.register_load_state_dict_pre_hook(before).remove,
        optimizer.register_load_state_dict_post_hook(after).remove,
    ]


def _drop_masters(state: Mapping[Any, Any]) -> None:
    for entry in state.values():
        if isinstance(entry, dict):
            entry.pop(MASTER_KEY, None)


@torch.no_grad()
def into_weight_(parameter: Tensor, master: Tensor) -> bool:
    """Gives an fp32 weight the number that was rounded to it in a checkpoint; returns whether it fits everywhere."""
    weight = local_shard(parameter.detach())
    if isinstance(parameter, DTensor) and not isinstance(master, DTensor):
        # torch splits from a full checkpoint only what the optimizer has itself.
        master = distribute_tensor(master, parameter.device_mesh, parameter.placements, src_data_rank=None)
    value = local_shard(master.detach()).to(device=weight.device, dtype=torch.float32)
    if weight.dtype != torch.float32:
        # Such a weight holds what it can hold already.
        return torch.equal(value.to(weight.dtype), weight)
    refined = refine_full(weight, value)
    weight.copy_(refined)
    return torch.equal(refined, value)


class MastersIntoWeights:
    """Lets an optimizer over fp32 weights load the state of one that had masters: its weights become the masters.

    The weights of such a checkpoint are 16 bit, and the masters are the numbers that were rounded to them.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        #: Parameters that the last state to be loaded had masters of.
        self.taken: frozenset[Tensor] = frozenset()
        #: Parameters whose masters are in the checkpoint that is being read; only these are read.
        self.expected: frozenset[Tensor] = frozenset()
        self._ends = [
            optimizer.register_state_dict_post_hook(self._ask).remove,
            *around_load(optimizer, self._begin_load),
        ]

    def remove(self) -> None:
        """Takes the hooks away."""
        for end in self._ends:
            end()

    def _ask(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        state = dict(state_dict["state"])
        for index, parameter in by_index(optimizer, state_dict):
            if parameter in self.expected:
                room = torch.empty_like(parameter, dtype=torch.float32, requires_grad=False)
                state[index] = {**state.get(index, {}), MASTER_KEY: room}
        return {**state_dict, "state": state}

    def _begin_load(
        self, optimizer: Optimizer, state_dict: dict[str, Any]
    ) -> tuple[dict[str, Any], Callable[[], None]]:
        state, masters = without_masters(state_dict["state"])
        parameters = dict(by_index(optimizer, state_dict))

        def finish() -> None:
            taken = {parameters[index]: master for index, master in masters.items() if index in parameters}
            self.taken |= frozenset(taken)
            differing = sum(not into_weight_(parameter, master) for parameter, master in taken.items())
            if differing:
                warn_about_other_weights(differing, len(taken))

        self.taken = frozenset()
        return {**state_dict, "state": state}, finish


@contextmanager
def masters_announced(module: nn.Module, hooks: Iterable[MastersIntoWeights], path: Path) -> Iterator[None]:
    """While this is open, optimizers read the masters that a checkpoint has, if it is a folder with shards."""
    hooks = list(hooks)
    names = saved_names(path) if is_sharded_checkpoint(path) else ()
    endings = {name.partition(".state.")[2] for name in names if name.endswith(f".{MASTER_KEY}")}
    expected = frozenset(
        parameter
        for name, parameter in module.named_parameters(remove_duplicate=False)
        if f"{name}.{MASTER_KEY}" in endings
    )
    for hook in hooks:
        hook.expected = expected
    try:
        yield
    finally:
        for hook in hooks:
            hook.expected = frozenset()
