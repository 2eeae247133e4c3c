"""Master weights under any optimizer, through the hooks that every ``torch.optim.Optimizer`` has.

For the time of a step, fp32 masters stand in the parameter groups where the 16-bit parameters were:

.. code-block:: text

    before the step   param_groups[g]["params"][i]: parameter -> master      state[parameter] -> state[master]
                      master.grad = parameter.grad in fp32
    the step          is the optimizer's own; it sees nothing but fp32
    after the step    everything back, and parameter = master rounded

The parameters themselves are never touched. Swapping ``parameter.data`` for fp32 data would be simpler, but a change
of dtype makes autograd drop the gradient accumulator that DDP has hooked, and from the second step on the ranks would
train apart, without an error.
"""

from collections.abc import Callable
from typing import Any

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from lightning_mp import seams
from lightning_mp.master_store import MasterStore
from lightning_mp.precision.main_gradients import HALF_DTYPES, as_float32

__all__ = ["MASTER_KEY", "MasterHooks"]

#: Where a master lies in ``optimizer.state_dict()["state"][i]``, always as full fp32.
MASTER_KEY = "master_param"


class MasterHooks:
    """Lends masters to one optimizer for its steps, and carries them through its checkpoints.

    Args:
        optimizer: any ``torch.optim.Optimizer``.
        store: where the masters are. A 16-bit parameter that is not in it gets a master at its first step.
    """

    def __init__(self, optimizer: Optimizer, store: MasterStore) -> None:
        self._optimizer = optimizer
        self._store = store
        self._lent: dict[Tensor, Tensor] = {}
        self._versions: dict[Tensor, int] = {}
        self._marks: list[tuple[Tensor | None, int]] = []
        self._depth = 0
        self._loading: dict[Tensor, Tensor] = {}
        self._handles = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
            optimizer.register_state_dict_post_hook(self._add_masters),
            optimizer.register_load_state_dict_pre_hook(self._before_load),
            optimizer.register_load_state_dict_post_hook(self._after_load),
        ]

    def remove(self) -> None:
        """Takes the hooks away; the optimizer goes on with the 16-bit parameters."""
        self.give_back()
        for handle in self._handles:
            handle.remove()
        self._handles = []

    # -- a step --------------------------------------------------------------------------------------------------------

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if self._lent and self._gradients_are_the_same():
            # torch calls the hooks again when a subclass's step calls its parent's: this is the same step.
            self._depth += 1
            return None
        self.give_back()  # what a step that raised may have left
        self._depth = 1
        # args[0] is the optimizer itself.
        if len(args) > 1 and callable(args[1]):
            changed = (args[0], self._with_weights(args[1]), *args[2:]), kwargs
        elif callable(kwargs.get("closure")):
            changed = args, kwargs | {"closure": self._with_weights(kwargs["closure"])}
        else:
            self._lend(only_with_gradient=True)
            return None
        self._lend(only_with_gradient=False)
        return changed

    def _with_weights(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """A closure's forward needs the 16-bit weights, as they are by then."""

        def run() -> Any:
            depth = self._depth
            self.give_back()
            result = closure()
            self._lend(only_with_gradient=False)
            self._depth = depth
            return result

        return run

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._depth -= 1
        if self._depth > 0:
            return
        changed = [p for p, version in self._versions.items() if seams.version_of(p) != version]
        self.give_back()
        if changed:
            raise RuntimeError(
                f"{type(optimizer).__name__} changed {len(changed)} 16-bit weights by itself, not through its"
                " param_groups, so that master weights cannot work with it. It probably wraps another optimizer or"
                " keeps a list of parameters of its own. Use AutocastPrecision, which keeps fp32 weights."
            )

    def _has_master(self, parameter: Tensor) -> bool:
        return parameter in self._store or (parameter.requires_grad and parameter.dtype in HALF_DTYPES)

    @torch.no_grad()
    def _lend(self, *, only_with_gradient: bool) -> None:
        for group in self._optimizer.param_groups:
            for index, parameter in enumerate(group["params"]):
                if not self._has_master(parameter) or (only_with_gradient and parameter.grad is None):
                    continue
                master = self._store.lend(parameter)
                group["params"][index] = master
                self._lent[parameter] = master
                self._versions[parameter] = seams.version_of(parameter)
                self._move_state(parameter, master)
        with_gradient = [p for p in self._lent if p.grad is not None]
        gradients = as_float32([p.grad for p in with_gradient if p.grad is not None])
        for parameter, gradient in zip(with_gradient, gradients, strict=True):
            self._lent[parameter].grad = gradient
        self._marks = [_mark(parameter.grad, master) for parameter, master in self._lent.items()]

    def _gradients_are_the_same(self) -> bool:
        """Whether no backward and no ``zero_grad`` has come since masters were lent."""
        return all(
            parameter.grad is gradient and (gradient is None or version in (-1, seams.version_of(gradient)))
            for parameter, (gradient, version) in zip(self._lent, self._marks, strict=True)
        )

    def give_back(self) -> None:
        """Puts the 16-bit parameters back and writes them anew, if masters are lent; safe to call at any time."""
        lent, self._lent = self._lent, {}
        self._versions, self._marks, self._depth = {}, [], 0
        if not lent:
            return
        parameter_of = {master: parameter for parameter, master in lent.items()}
        for group in self._optimizer.param_groups:
            group["params"][:] = [parameter_of.get(p, p) for p in group["params"]]
        for parameter, master in lent.items():
            self._move_state(master, parameter)
            master.grad = None
        self._store.take_back(list(lent), list(lent.values()))

    def _move_state(self, source: Tensor, target: Tensor) -> None:
        state = self._optimizer.state.pop(source, None)
        if state is not None:
            self._optimizer.state[target] = state

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def _add_masters(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        self.give_back()
        # New dictionaries: torch's hold the optimizer's own.
        state = dict(state_dict["state"])
        for index, parameter in _by_index(optimizer, state_dict):
            if parameter in self._store:
                state[index] = {**state.get(index, {}), MASTER_KEY: self._store.get(parameter).detach()}
        return {**state_dict, "state": state}

    def _before_load(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Takes the masters out, and lends: torch casts moments to the dtype of what is in the groups."""
        self.give_back()
        parameters = dict(_by_index(optimizer, state_dict))
        state, self._loading = {}, {}
        for index, entry in state_dict["state"].items():
            if isinstance(entry, dict) and MASTER_KEY in entry:
                entry = dict(entry)
                master = entry.pop(MASTER_KEY)
                if index in parameters:
                    self._loading[parameters[index]] = master
            state[index] = entry
        self._lend(only_with_gradient=False)
        return {**state_dict, "state": state}

    def _after_load(self, optimizer: Optimizer) -> None:
        self.give_back()
        loading, self._loading = self._loading, {}
        differing = 0
        for parameter, master in loading.items():
            if self._has_master(parameter):
                differing += not self._store.refine_from(parameter, master)
        if differing:
            rank_zero_warn(
                f"The checkpoint's fp32 master weights and the model's 16-bit weights differ in {differing} of"
                f" {len(loading)} parameters. The model's weights are taken where they differ: was the model loaded"
                " from another checkpoint than the optimizer, or changed after the last step?"
            )


def _mark(gradient: Tensor | None, master: Tensor) -> tuple[Tensor | None, int]:
    """A gradient and its version; -1 if it is the master's own too, which the optimizer may change."""
    return gradient, -1 if gradient is None or gradient is master.grad else seams.version_of(gradient)


def _by_index(optimizer: Optimizer, state_dict: dict[str, Any]) -> list[tuple[Any, Tensor]]:
    """Pairs of a parameter's number in the state dict and the parameter."""
    numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    # Of different length if the state is another optimizer's; torch's own error says so.
    return list(zip(numbers, parameters, strict=False))
