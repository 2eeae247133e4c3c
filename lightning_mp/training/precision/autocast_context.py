"""One run of one model under autocast: forwards inside of it, backwards and steps outside, a policy in force."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_mp.ground.core import private_dispatch_api
from lightning_mp.ground.core.messages import listed
from lightning_mp.training.policy.applied import AppliedPolicy
from lightning_mp.training.policy.fails_in_16_bit import refused_by
from lightning_mp.training.policy.policy import PrecisionPolicy
from lightning_mp.training.policy.resolved import ResolvedPolicy
from lightning_mp.training.policy.sharding_units import gathered_in_another_low, gathered_otherwise

#: Device types on which torch.autocast casts to fp16 (torch 2.13, torch/amp/autocast_mode.py).
FP16_DEVICE_TYPES = ("cuda", "cpu", "mps", "xpu")

_NOTHING = nullcontext()


class AutocastRun:
    """What a plugin with autocast puts around forwards, backwards and steps, until :meth:`detach`.

    In automatic optimization Lightning runs backwards and steps outside of the forward's context. In manual
    optimization all of the training step is inside of it, and with autocast on, fp32 operations would get 16-bit
    gradients and matrix products of an optimizer would be 16 bit.
    """

    def __init__(
        self,
        model: nn.Module,
        device_type: str,
        dtype: torch.dtype,
        *,
        eval_dtype: torch.dtype | None,
        policy: PrecisionPolicy | None = None,
        opaque: Iterable[nn.Module] = (),
        cache_weights: bool = False,
    ) -> None:
        self._model, self._device_type = model, device_type
        self._cache_weights = cache_weights
        self.dtype, self.eval_dtype = dtype, eval_dtype
        self._applied: AppliedPolicy | None = None
        self._compiled: AbstractContextManager[None] | None = None
        #: No autocast, for optimizer steps.
        self.outside: Callable[[], torch.autocast] = partial(torch.autocast, device_type, dtype, enabled=False)
        #: No autocast for backwards: each operation's backward runs in the dtype of its forward.
        self.backward: Callable[[], AbstractContextManager[Any]] = self.outside
        if policy is not None:
            self.backward = self._backward_under_policy
            _check_what_is_gathered(policy.resolve(model), model, dtype)
            self._applied = AppliedPolicy(policy, model, device_type, opaque)
        else:
            _check_low_dtype(model, dtype)

    @property
    def resolved(self) -> ResolvedPolicy | None:
        """What the policy is about in the model; None without one."""
        return self._applied.resolved if self._applied is not None else None

    @contextmanager
    def forward(self, dtype: torch.dtype | None) -> Iterator[None]:
        """Autocast, and the policy in force."""
        policy = self._applied.in_force(dtype) if self._applied is not None else _NOTHING
        try:
            if dtype is None:
                with policy:
                    yield
                return
            # torch makes a class for every patch, so one is kept; a context inside of another one has its own.
            compiled, self._compiled = self._compiled or private_dispatch_api.backward_outside_autocast(), None
            try:
                with compiled, torch.autocast(self._device_type, dtype, cache_enabled=self._cache_weights), policy:
                    yield
            finally:
                self._compiled = compiled
        except RuntimeError as error:
            refused = refused_by(error, self._model)
            if refused is not None:
                error.add_note(f"HINT: {refused}")
            raise

    @contextmanager
    def _backward_under_policy(self) -> Iterator[None]:
        """The policy is in force for what activation checkpoints compute again, under the autocast of their forward."""
        assert self._applied is not None
        with self.outside(), self._applied.in_force(self.dtype):
            yield

    def detach(self) -> None:
        """Gives every module its own forward back."""
        if self._applied is not None:
            self._applied.detach()


def _check_low_dtype(model: nn.Module, low: torch.dtype) -> None:
    found = gathered_in_another_low(model, low)
    if found:
        names = listed([name or "the model" for name, _ in found])
        raise MisconfigurationException(
            f"The precision plugin computes in {low}, but fully_shard gathers {names} in {found[0][1]}, and operations"
            f" would mix the two. In configure_model set MixedPrecisionPolicy(param_dtype={low}) or None, or choose"
            " the precision that matches."
        )


def _check_what_is_gathered(policy: ResolvedPolicy, model: nn.Module, low: torch.dtype) -> None:
    found = gathered_otherwise(policy, model, low)
    if found:
        name, wanted, gathered = found[0]
        others = f" and {len(found) - 1} more" if len(found) > 1 else ""
        raise MisconfigurationException(
            f"PrecisionPolicy: {name or 'the model'}{others} runs in {wanted}, but fully_shard(mp_policy=...) gathers"
            f" its weights in {gathered}. In configure_model shard the units that"
            " lightning_mp.training.policy.sharding_units.sharding_units returns, each with its mp_policy."
        )


def why_no_autocast(device_type: str, dtype: torch.dtype) -> str | None:
    """Why autocast cannot cast to a dtype on a device type, and what to do; None if it can.

    >>> why_no_autocast("cpu", torch.float16)
    >>> why_no_autocast("meta", torch.bfloat16)[:45]
    'torch has no torch.bfloat16 autocast there. U'
    """
    if torch.amp.is_autocast_available(device_type) and (dtype != torch.float16 or device_type in FP16_DEVICE_TYPES):
        return None
    return f"torch has no {dtype} autocast there. Use one of {FP16_DEVICE_TYPES}, another precision, or none."


def warn_about_emulated_bf16(device_type: str, instead: str) -> None:
    """Warns if the device computes bf16 with fp32 units."""
    if device_type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        rank_zero_warn(
            f"{torch.cuda.get_device_name()} has no bf16 units: bf16 is emulated there and slow. Use {instead}."
        )
