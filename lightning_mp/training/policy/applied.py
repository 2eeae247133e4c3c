"""One precision policy in force on one model, for one run."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Literal

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_mp.training.policy.module_rules import PolicyScope, wrap_forwards
from lightning_mp.training.policy.operation_rules import OperationRules, operation_rules
from lightning_mp.training.policy.policy import PolicyLike, PrecisionPolicy

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecision as FSDPMixedPrecision


class AppliedPolicy:
    """Resolves a policy, wraps the forwards of the modules that it covers, and takes them off again."""

    def __init__(
        self,
        policy: PrecisionPolicy,
        model: nn.Module,
        device_type: str,
        opaque: Iterable[nn.Module] = (),
    ) -> None:
        self.resolved = policy.resolve(model)
        self._scope = PolicyScope(device_type)
        rules = operation_rules(self.resolved, device_type)
        self._operations = OperationRules(rules, self._scope) if rules else None
        self._forwards = wrap_forwards(model, self.resolved, self._scope, opaque)

    @contextmanager
    def in_force(self, low: torch.dtype | None) -> Iterator[None]:
        """The rules hold, for a forward under autocast or its backward."""
        already = self._scope.low is not None  # the backward in a training step with manual optimization
        with ExitStack() as stack:
            stack.enter_context(self._scope.active(low))
            if low is not None and self._operations is not None and not already:
                stack.enter_context(self._operations)
            yield

    def detach(self) -> None:
        """Gives the modules their own forwards back."""
        self._forwards.undo()


def read_policy(policy: PolicyLike | Literal["default"] | None, scaler: object, instead: str) -> PrecisionPolicy | None:
    """The policy that a plugin was given: as an object, as its rules, or the default one by that word."""
    if policy is None:
        return None
    if not isinstance(policy, PrecisionPolicy):
        policy = PrecisionPolicy.default() if policy == "default" else PrecisionPolicy(policy)
    if scaler is None and torch.float16 in policy.dtypes:
        rules = ", ".join(str(rule) for rule in policy.rules if rule.dtype == torch.float16)
        raise MisconfigurationException(
            f"PrecisionPolicy: rules set fp16 ({rules}), in which small gradients vanish without a loss scale. Use"
            f" {instead}, or 'bf16' in the rules."
        )
    return policy


def fsdp_mixed_precision(low: torch.dtype, policy: PrecisionPolicy | None) -> "FSDPMixedPrecision":
    """For ``FSDPStrategy``: 16-bit parameters in forward and backward, gradients reduced in fp32, fp32 buffers.

    FSDP1 has one dtype for all parameters. A policy that sets another one in some modules gets fp32 parameters,
    which autocast casts at their use: twice the bytes to gather. Under rules about operations parameters come in 16
    bit, and fp32 operations cast them up.
    """
    from torch.distributed.fsdp import MixedPrecision as FSDPMixedPrecision

    in_fp32 = policy is not None and policy.names_modules
    return FSDPMixedPrecision(
        param_dtype=None if in_fp32 else low, reduce_dtype=torch.float32, buffer_dtype=torch.float32
    )
