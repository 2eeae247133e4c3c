"""Optimizers that evaluate their closure themselves: SAM, LBFGS, and those that are not torch's."""

from collections.abc import Callable
from typing import Any

from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.optim import Optimizer

from lightning_mp.ground.core import private_tensor_api
from lightning_mp.ground.core.patches import Patch
from lightning_mp.training.optimizers.evaluations import requires_closure


def refuse_closures_under_a_scale(optimizer: Optimizer, plugin: object) -> None:
    """Refuses what is known to evaluate the loss several times in one step, where there is a loss scale.

    What it evaluates itself would be scaled, and it would use those gradients without anything to unscale them.
    """
    if requires_closure(optimizer):
        raise _refusal(optimizer, plugin)


def _refusal(optimizer: Optimizer, plugin: object) -> MisconfigurationException:
    return MisconfigurationException(
        f"{plugin} cannot be used with {type(optimizer).__name__}, which evaluates the loss several times in one step:"
        " its own evaluations would be scaled, and could not be unscaled. Use a precision without a loss"
        " scale ('bf16-mixed', 'bf16-true' or '32-true'), or another optimizer."
    )


class StepClosure:
    """The closure that an optimizer is given for one step.

    Lightning's closure has run by then. So the first evaluation that the optimizer requests is that one, unless weights
    are others by now or gradients were taken away. Gradients that the optimizer has only written (centralised, say, in
    front of its parent's step) are kept, as in a plain loop. Each later evaluation runs again, and its gradients are
    made ready again.
    """

    def __init__(self, optimizer: Optimizer, result: Any, evaluate: Callable[[], Any] | None, plugin: object) -> None:
        self._optimizer = optimizer
        self._result = result
        self._evaluate = evaluate
        self._plugin = plugin
        self._is_used = False
        self._is_given = False
        self._is_zeroed = False

    def __call__(self) -> Any:
        """Runs Lightning's closure again."""
        if self._evaluate is None:
            raise _refusal(self._optimizer, self._plugin)
        return self._evaluate()

    def step(self, **kwargs: Any) -> Any:
        """Makes the optimizer's step with this closure.

        Hooks between them are skipped the first time, since the result is already known.
        """
        # A hook that is registered last is the last to change what the optimizer gets.
        handle = self._optimizer.register_step_pre_hook(self._wrap_closure)
        method = Patch(self._optimizer, "zero_grad", lambda *args, **kwargs: self._zero_grad(method, *args, **kwargs))
        try:
            return self._optimizer.step(closure=self, **kwargs)
        finally:
            handle.remove()
            method.undo()

    def _zero_grad(self, method: Patch, *args: Any, **kwargs: Any) -> None:
        self._is_zeroed = True
        method.original(*args, **kwargs)

    def _wrap_closure(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        inner = args[1] if len(args) > 1 else kwargs.get("closure")
        if not callable(inner) or self._is_given:  # a step that calls its parent's, maybe with its own closure
            return None
        self._is_given = True
        versions, gradients = _versions(optimizer), _with_gradient(optimizer)

        def first_or_again() -> Any:
            is_first, self._is_used = not self._is_used, True
            has_gradients = not self._is_zeroed and gradients <= _with_gradient(optimizer)
            is_known = is_first and has_gradients and _versions(optimizer) == versions
            return self._result if is_known else inner()

        if len(args) > 1:
            return (args[0], first_or_again, *args[2:]), kwargs
        return args, kwargs | {"closure": first_or_again}


def _versions(optimizer: Optimizer) -> list[int]:
    return [private_tensor_api.version_of(p) for group in optimizer.param_groups for p in group["params"]]


def _with_gradient(optimizer: Optimizer) -> set[int]:
    return {id(p) for group in optimizer.param_groups for p in group["params"] if p.grad is not None}
