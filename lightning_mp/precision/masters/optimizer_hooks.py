"""Master weights under any optimizer, through the hooks that every ``torch.optim.Optimizer`` has.

For the time of a step, fp32 masters replace the 16-bit parameters in the parameter groups:

.. code-block:: text

    before the step   param_groups[g]["params"][i]: parameter -> master      state[parameter] -> state[master]
                      master.grad = parameter.grad in fp32
    the step          is the optimizer's own; it sees nothing but fp32
    after the step    everything back, and parameter = master rounded

An optimizer that shares its groups with a base optimizer (SAM, Lookahead) has state in both, which moves together. A
parameter has the same master in every step, so that state which is kept elsewhere also stays with it.

An optimizer whose update of a parameter depends on no other steps block by block, so that fp32 gradients, and masters
that are lent, never exist for all parameters at once. Numbers are those of one block, to the bit.

The parameters themselves are never touched. Swapping ``parameter.data`` for fp32 data would be simpler, but a change
of dtype makes autograd drop the gradient accumulator that DDP has hooked, and from the second step on the ranks would
train apart, without an error.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adagrad, Optimizer

from lightning_mp.core import private_api
from lightning_mp.core.patches import Patch
from lightning_mp.core.precisions import HALF_DTYPES
from lightning_mp.gradients.gradient_ops import local_shard
from lightning_mp.gradients.step_blocks import step_blocks
from lightning_mp.optimizer_step.bypassed_steps import with_wrapped
from lightning_mp.precision.masters.compiled_step import CompiledStep
from lightning_mp.precision.masters.fp32_gradients import Fp32Gradients
from lightning_mp.precision.masters.loaded_masters import (
    MASTER_KEY,
    around_load,
    by_index,
    into_weight_,
    warn_about_other_weights,
    without_masters,
)
from lightning_mp.precision.masters.store import MasterStore


@dataclass
class _Swap:
    """The masters that are swapped in, and what is to be put back; one for each step, or block of it."""

    masters: dict[Tensor, Tensor] = field(default_factory=dict)  # by parameter
    optimizers: list[Optimizer] = field(default_factory=list)  # whose states have moved to the masters
    whole_groups: list[tuple[dict[str, Any], list[Tensor]]] = field(default_factory=list)  # with their parameters
    versions: dict[Tensor, int] = field(default_factory=dict)  # of the parameters
    marks: list[tuple[Tensor | None, int]] = field(default_factory=list)  # of the gradients
    depth: int = 0  # of calls of the hooks: a subclass's step calls its parent's

    def move_state(self, source: Tensor, target: Tensor) -> None:
        """Moves the states of a parameter to its master, or back."""
        for optimizer in self.optimizers:
            state = optimizer.state.pop(source, None)
            if state is not None:
                optimizer.state[target] = state

    def gradients_are_the_same(self) -> bool:
        """Whether no backward and no ``zero_grad`` has come since masters were swapped in."""
        return all(
            parameter.grad is gradient and (gradient is None or version in (-1, private_api.version_of(gradient)))
            for parameter, (gradient, version) in zip(self.masters, self.marks, strict=True)
        )


class MasterHooks:
    """Swaps masters in for the steps of one optimizer, and carries them through its checkpoints."""

    def __init__(
        self,
        optimizer: Optimizer,
        store: MasterStore,
        gradients: Fp32Gradients | None = None,
        *,
        compiled: CompiledStep | None = None,
    ) -> None:
        self.optimizer = optimizer
        self._compiled = compiled
        self._store = store
        self._gradients = gradients if gradients is not None else Fp32Gradients()
        self._swap = _Swap()
        #: While it is set, the optimizer works as if there were no masters: its parameters are fp32.
        self.paused = False
        self._accumulating: set[Tensor] = set()
        stepping = with_wrapped(optimizer)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter in store:
                    _widen(stepping, group, parameter, store.get(parameter))
        private_api.make_room_for_hooks(optimizer)
        self._around_steps = (
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        )
        self._ends = [
            *(hook.remove for hook in self._around_steps),
            optimizer.register_state_dict_post_hook(self._add_masters).remove,
        ]
        for loading in stepping:
            self._ends += around_load(loading, self._begin_load)
        # Schedule-free optimizers change their weights outside of steps, by these names.
        for name in ("train", "eval"):
            if callable(method := getattr(optimizer, name, None)):
                self._ends.append(Patch(optimizer, name, partial(self._on_masters, method)).undo)

    def remove(self) -> None:
        """Removes the hooks; the optimizer continues with the 16-bit parameters."""
        self.swap_out()
        for end in self._ends:
            end()
        self._ends = []

    def _on_masters(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._swap.masters:
            return method(*args, **kwargs)
        try:
            self._swap_in(only_with_gradient=False)
            return method(*args, **kwargs)
        finally:
            self.swap_out()

    def accumulate_in_float32(self) -> None:
        """Lets gradients be fp32 from the next backward on, also of parameters that were added or unfrozen since."""
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                if parameter in self._accumulating or parameter.grad is not None or not self._store.takes(parameter):
                    continue
                if parameter not in self._store:
                    self._store.set(parameter, parameter)
                    _widen(with_wrapped(self.optimizer), group, parameter, self._store.get(parameter))
                parameter.grad_dtype = torch.float32
                self._accumulating.add(parameter)

    # -- a step --------------------------------------------------------------------------------------------------------

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if self.paused:
            return None
        if self._swap.masters and self._swap.gradients_are_the_same():
            # torch calls the hooks again when a subclass's step calls its parent's: this is the same step.
            self._swap.depth += 1
            return None
        self.swap_out()  # what a step that raised may have left
        self._swap.depth = 1
        self._store.steps += 1
        # args[0] is the optimizer itself.
        wrapped = self._with_weights if self._compiled is None else _evaluated
        changed = None
        if len(args) > 1 and callable(args[1]):
            changed = (args[0], wrapped(args[1]), *args[2:]), kwargs
        elif callable(kwargs.get("closure")):
            changed = args, kwargs | {"closure": wrapped(kwargs["closure"])}
        if self._compiled is not None:
            self._step_compiled(self._compiled)
            return changed
        if changed is None:
            self._step_all_blocks_but_the_last()
            return None
        self._swap_in(only_with_gradient=False)
        return changed

    def _step_compiled(self, compiled: CompiledStep) -> None:
        """Steps what has a master, and leaves the rest to the optimizer itself."""
        if not private_api.is_next_to_the_step(*self._around_steps):
            raise RuntimeError(
                f"MasterWeightsPrecision(compiled_step=True) makes the step of {type(self.optimizer).__name__} itself,"
                " and a step hook of other code would find no parameters in its groups. Leave the hook or"
                " compiled_step out."
            )
        groups = self.optimizer.param_groups
        stepped = {p: g for g in groups for p in g["params"] if p.grad is not None and self._store.takes(p)}
        compiled.step(stepped, self._gradients.factor)
        self._swap.whole_groups = [(group, group["params"]) for group in groups]
        for group in groups:
            group["params"] = [p for p in group["params"] if not self._store.takes(p)]

    def _step_all_blocks_but_the_last(self) -> None:
        # Other hooks around the step have to find all parameters in it.
        is_alone = not private_api.has_other_step_hooks(*self._around_steps) and len(with_wrapped(self.optimizer)) == 1
        blocks = step_blocks(self.optimizer) if is_alone else []
        if not blocks:
            self._swap_in(only_with_gradient=True)
            return
        groups = self.optimizer.param_groups
        whole = [(group, group["params"]) for group in groups]
        for block in blocks:
            depth, self._swap.whole_groups = self._swap.depth, whole
            for group, members in zip(groups, block, strict=True):
                group["params"] = members
            self._swap_in(only_with_gradient=True)
            if block is not blocks[-1]:
                private_api.step_without_hooks(self.optimizer)
                self.swap_out()
            self._swap.depth = depth

    def _with_weights(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """A closure's forward needs the 16-bit weights, as they are by then."""

        def run() -> Any:
            depth = self._swap.depth
            self.swap_out()
            result = closure()
            self._swap_in(only_with_gradient=False)
            self._swap.depth = depth
            return result

        return run

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.paused:
            return
        self._swap.depth -= 1
        if self._swap.depth > 0:
            return
        changed = [p for p, version in self._swap.versions.items() if private_api.version_of(p) != version]
        self.swap_out()
        if changed:
            raise RuntimeError(
                f"MasterWeightsPrecision cannot be used with {type(optimizer).__name__}, which changed {len(changed)}"
                " 16-bit weights that are not in its param_groups. It probably wraps another optimizer or keeps its"
                " own list of parameters. Use AutocastPrecision, which keeps fp32 weights."
            )

    @torch.no_grad()
    def _swap_in(self, *, only_with_gradient: bool) -> None:
        swap = self._swap
        swap.optimizers = with_wrapped(self.optimizer)
        places = [
            (group, index, parameter)
            for group in self.optimizer.param_groups
            for index, parameter in enumerate(group["params"])
            if self._store.takes(parameter) and not (only_with_gradient and parameter.grad is None)
        ]
        new = {parameter for _, _, parameter in places if parameter not in self._store}
        masters = self._store.swap_in([parameter for _, _, parameter in places])
        for (group, index, parameter), master in zip(places, masters, strict=True):
            if parameter in new:
                _widen(swap.optimizers, group, parameter, master)
            group["params"][index] = master
            swap.masters[parameter] = master
            swap.versions[parameter] = private_api.version_of(parameter)
            swap.move_state(parameter, master)
        with_gradient = [p for p in swap.masters if p.grad is not None]
        gradients = self._gradients.for_step([p.grad for p in with_gradient if p.grad is not None])
        for parameter, gradient in zip(with_gradient, gradients, strict=True):
            swap.masters[parameter].grad = gradient
        swap.marks = [_mark(parameter.grad, master) for parameter, master in swap.masters.items()]

    def swap_out(self) -> None:
        """Puts the 16-bit parameters back and writes them again, if masters are swapped in; can be called any time."""
        swap, self._swap = self._swap, _Swap()
        for group, parameters in swap.whole_groups:
            group["params"] = parameters
        if not swap.masters:
            return
        parameter_of = {master: parameter for parameter, master in swap.masters.items()}
        for group in self.optimizer.param_groups:
            group["params"][:] = [parameter_of.get(p, p) for p in group["params"]]
        for parameter, master in swap.masters.items():
            swap.move_state(master, parameter)
            master.grad = None
        self._store.write_back(list(swap.masters), list(swap.masters.values()))

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def _add_masters(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        if self.paused:
            return state_dict
        self.swap_out()
        # New dictionaries: torch's hold the optimizer's own.
        state = dict(state_dict["state"])
        for index, parameter in by_index(optimizer, state_dict):
            if parameter in self._store:
                state[index] = {**state.get(index, {}), MASTER_KEY: self._store.get(parameter).detach()}
        return {**state_dict, "state": state}

    def _begin_load(
        self, optimizer: Optimizer, state_dict: dict[str, Any]
    ) -> tuple[dict[str, Any], Callable[[], None]]:
        """Takes the masters out, and remembers the rest: torch casts it to the dtype of the 16-bit parameters.

        No master is swapped in meanwhile, because a load that fails calls no hook that could swap it out.
        """
        if self.paused:
            return state_dict, lambda: None
        self.swap_out()
        parameters = dict(by_index(optimizer, state_dict))
        state, masters = without_masters(state_dict["state"])
        loading = {
            parameter: {"state": state.get(index), "master": masters.get(index)}
            for index, parameter in parameters.items()
            # Also of frozen ones: on which epoch they are unfrozen is often known to a callback alone.
            if index in masters or (index in state and parameter.dtype in HALF_DTYPES)
        }
        return {**state_dict, "state": state}, partial(self._finish_load, optimizer, loading)

    def _finish_load(self, optimizer: Optimizer, loading: dict[Tensor, dict[str, Any]]) -> None:
        with_master = {p: entry["master"] for p, entry in loading.items() if entry["master"] is not None}
        differing = sum(not self._take(p, master) for p, master in with_master.items())
        for parameter, entry in loading.items():
            if parameter in optimizer.state:
                optimizer.state[parameter] = widened(optimizer.state[parameter], entry["state"])
        if differing:
            warn_about_other_weights(differing, len(with_master))

    def _take(self, parameter: Tensor, master: Tensor) -> bool:
        """A weight that a policy holds in fp32 was 16 bit in a run without it, and had a master."""
        if parameter.dtype in HALF_DTYPES:
            return self._store.refine_from(parameter, master)
        return into_weight_(parameter, master)


def _mark(gradient: Tensor | None, master: Tensor) -> tuple[Tensor | None, int]:
    """A gradient and its version; -1 if it is the master's own too, which the optimizer may change."""
    return gradient, -1 if gradient is None or gradient is master.grad else private_api.version_of(gradient)


def _evaluated(closure: Callable[[], Any]) -> Callable[[], Any]:
    with torch.enable_grad():
        result = closure()
    return lambda: result


def _widen(optimizers: list[Optimizer], group: dict[str, Any], parameter: Tensor, master: Tensor) -> None:
    for optimizer in optimizers:
        widen_early_state(optimizer, group, parameter, master)


def widened(value: Any, source: Any = None) -> Any:
    """A piece of optimizer state in fp32 where it is 16 bit; dictionaries, lists and tuples are walked.

    Example:
        >>> import torch
        >>> widened({"step": 1, "sum": torch.ones(1).half()}, {"sum": torch.tensor([1.0001])})
        {'step': 1, 'sum': tensor([1.0001])}
    """
    if isinstance(value, Tensor):
        if value.dtype not in HALF_DTYPES:
            return value
        if isinstance(source, Tensor) and source.shape == value.shape and source.is_floating_point():
            return source.detach().to(device=value.device, dtype=torch.float32)
        return value.float()
    if isinstance(value, dict):
        known = source if isinstance(source, dict) else {}
        return {key: widened(entry, known.get(key)) for key, entry in value.items()}
    if type(value) in (list, tuple):
        entries = source if isinstance(source, list | tuple) and len(source) == len(value) else [None] * len(value)
        return type(value)(widened(*pair) for pair in zip(value, entries, strict=True))
    return value


def widen_early_state(optimizer: Optimizer, group: dict[str, Any], parameter: Tensor, master: Tensor) -> None:
    """Widens what the optimizer made for a 16-bit parameter before there was a master, as in its constructor.

    A copy of the weight becomes a copy of the master, and Adagrad's sum its initial value, unrounded.
    """
    if parameter not in optimizer.state:
        return
    state = optimizer.state[parameter]
    narrow = dict(state)
    for key, value in narrow.items():
        state[key] = master.detach().clone() if _is_copy(value, parameter) else widened(value)
    if isinstance(optimizer, Adagrad) and state.get("sum") is not narrow.get("sum") and not state["step"]:
        state["sum"].fill_(group["initial_accumulator_value"])


def _is_copy(value: Any, parameter: Tensor) -> bool:
    if not isinstance(value, Tensor) or value.dtype != parameter.dtype or value.shape != parameter.shape:
        return False
    copy, working = local_shard(value.detach()), local_shard(parameter.detach())
    # Zeros are where moments start.
    return torch.equal(copy, working) and bool(copy.any())
