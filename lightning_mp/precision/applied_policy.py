"""One precision policy in force on one model, for one run."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from lightning_mp.policy import PrecisionPolicy
from lightning_mp.policy_forward import ForwardRules, PolicyScope
from lightning_mp.policy_functional import OperationRules, operation_rules

__all__ = ["AppliedPolicy"]


class AppliedPolicy:
    """Resolves a policy, wraps the forwards of the modules that it covers, and takes them off again.

    Args:
        policy: the rules.
        model: their model.
        device_type: of the run.

    Raises:
        ValueError: if a rule matches nothing in the model.
    """

    def __init__(self, policy: PrecisionPolicy, model: nn.Module, device_type: str) -> None:
        self.resolved = policy.resolve(model)
        self._scope = PolicyScope(device_type)
        rules = operation_rules(self.resolved, device_type)
        self._operations = OperationRules(rules, self._scope) if rules else None
        self._forwards = ForwardRules(model, self.resolved, self._scope)

    @contextmanager
    def in_force(self, low: torch.dtype | None) -> Iterator[None]:
        """The rules hold, for a forward under autocast or its backward.

        Args:
            low: the 16-bit dtype of that autocast; None where it is off, and the rules then sleep.
        """
        already = self._scope.low is not None  # the backward in a training step with manual optimization
        with ExitStack() as stack:
            stack.enter_context(self._scope.awake(low))
            if low is not None and self._operations is not None and not already:
                stack.enter_context(self._operations)
            yield

    def detach(self) -> None:
        """Gives the modules their own forwards back."""
        self._forwards.detach()
