"""torch's fused Adam and AdamW with moments in bf16: 4 bytes per parameter less."""

from collections.abc import Mapping, MutableMapping
from itertools import chain
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer

from lightning_mp.training.optimizers.parts import parts_of

AnyAdam = TypeVar("AnyAdam", bound=Adam)

#: Where torch has the kernel; "meta" is that of memory estimates.
_DEVICES = {"cuda", "meta"}

#: Of parameters; the moments of bf16 ones are bf16 anyway.
_DTYPES = {torch.float32, torch.bfloat16}

#: The first release with the kernel in its CUDA build; before, torch refuses moments of another dtype.
_SINCE = "2.12"

#: bf16 has 8 significant bits: multiplied by more than this, some numbers are rounded to what they were.
_MAX_BETA2 = 1 - 2**-8

_MOMENTS = ("exp_avg", "exp_avg_sq")


def bf16_moments(optimizer: AnyAdam) -> AnyAdam:
    r"""Has torch's fused Adam or AdamW keep both moments in bf16.

    Parameters, gradients and all arithmetic stay fp32: the kernel reads the moments, updates the parameter with the
    fp32 numbers, and rounds the moments to nearest when it stores them. Weight, gradient and moments take
    4 + 4 + 2 + 2 = 12 bytes per parameter in place of 16, and the step moves 20 in place of 28:

    .. code-block:: text

        m <- beta1 m + (1 - beta1) g          fp32
        v <- beta2 v + (1 - beta2) g^2        fp32
        p <- p - lr wd p - lr m' / (sqrt(v') + eps)
        m, v <- bf16(m), bf16(v)

    Moments are made in the first step in which their parameter has a gradient. Checkpoints hold them in bf16; those of
    a checkpoint in fp32 are rounded, and an AdamW without this takes bf16 moments as fp32 numbers. CUDA only: torch has
    no such kernel for other devices.

    DeepSeek-V3 was trained with bf16 moments, and torchtitan makes them in the same way
    (``implementation="fused_opt_states_bf16"``). The loss beside that of fp32 moments has not been measured here.

    Args:
        optimizer: an ``Adam`` or ``AdamW`` of ``torch.optim`` with ``fused=True`` and fp32 parameters, before its first
            step; also as a part of a :class:`~lightning_mp.JointOptimizer`.

    Returns:
        The same optimizer.

    Raises:
        ValueError: if it is another optimizer, is not fused, has ``amsgrad=True``, a second beta above 0.996, or
            moments already.
        MisconfigurationException: if this release of torch has no such kernel; and, at set-up or in the first step, if
            the parameters are not on a CUDA device.

    References:
        DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 3.3.2, https://arxiv.org/abs/2412.19437

    Example:
        >>> import torch
        >>> net = torch.nn.Linear(4, 2)
        >>> optimizer = torch.optim.AdamW(net.parameters(), betas=(0.9, 0.95), fused=True)
        >>> if torch.__version__ >= "2.12":
        ...     optimizer = bf16_moments(optimizer)
        >>> type(optimizer).__name__
        'AdamW'
    """
    if type(optimizer) not in (Adam, AdamW):
        raise ValueError(
            f"bf16_moments({type(optimizer).__name__}): only Adam and AdamW of torch.optim have a kernel for bf16"
            " moments. Give it one of them, with fused=True; in a JointOptimizer, the part."
        )
    if torch.__version__ < _SINCE:
        raise MisconfigurationException(
            f"bf16_moments: torch {torch.__version__} has no kernel for fp32 parameters with bf16 moments; torch"
            f" {_SINCE} has. Update torch, or use AdamW8bit of torchao."
        )
    if any(optimizer.state.values()):
        raise ValueError("bf16_moments: the optimizer has moments already. Call it before the first step.")
    for group in optimizer.param_groups:
        _check_group(optimizer, group)
    if optimizer not in _ADDED:
        _ADDED[optimizer] = moments = Bf16Moments()
        optimizer.register_step_pre_hook(moments)
        optimizer.register_load_state_dict_pre_hook(moments.take)
        optimizer.register_load_state_dict_post_hook(moments.give)
    return optimizer


def has_bf16_moments(optimizer: Optimizer) -> bool:
    """Whether :func:`bf16_moments` was called with it."""
    return optimizer in _ADDED


def refuse_bf16_moments(optimizer: Optimizer) -> None:
    """Refuses bf16 moments of parameters for which torch has no kernel.

    Raises:
        MisconfigurationException: on another device than CUDA.
        ValueError: if parameters are neither fp32 nor bf16.
    """
    for part in parts_of(optimizer):
        if has_bf16_moments(part):
            for parameter in chain(*(group["params"] for group in part.param_groups)):
                _check_parameter(part, parameter)


class Bf16Moments:
    """The hooks of one optimizer: makes bf16 moments before a step, and keeps torch from loading them as fp32."""

    def __init__(self) -> None:
        self._taken: list[tuple[Tensor, dict[str, Tensor]]] = []

    def __call__(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before a step: makes the state of each parameter that has a gradient for the first time.

        A closure, which stock Lightning passes, makes gradients after this, for any parameter that can have one.
        """
        is_evaluated = (len(args) > 1 and args[1] is not None) or kwargs.get("closure") is not None
        state: MutableMapping[Tensor, dict[str, Any]] = optimizer.state
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if not state.get(parameter) and (
                    parameter.grad is not None or (is_evaluated and parameter.requires_grad)
                ):
                    _check_parameter(optimizer, parameter)
                    _check_group(optimizer, group)  # it may have been added since
                    state[parameter] = {
                        # As torch makes it for a fused Adam.
                        "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                        **{name: torch.zeros_like(parameter, dtype=torch.bfloat16) for name in _MOMENTS},
                    }

    def take(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Before a load: leaves the moments out, which torch would cast to the parameter's dtype."""
        parameters = chain(*(group["params"] for group in optimizer.param_groups))
        names = chain(*(group["params"] for group in state_dict["param_groups"]))
        states: Mapping[Any, Mapping[str, Any]] = state_dict["state"]
        # Of different length if the checkpoint is another optimizer's; torch's own error says so.
        of_name = dict(zip(names, parameters, strict=False))
        self._taken = [
            (parameter, {key: states[name][key] for key in _MOMENTS if key in states[name]})
            for name, parameter in of_name.items()
            if name in states
        ]
        rest = {
            name: {key: value for key, value in entry.items() if key not in _MOMENTS} if name in of_name else entry
            for name, entry in states.items()
        }
        return {**state_dict, "state": rest}

    def give(self, optimizer: Optimizer) -> None:
        """After a load: adds them, in bf16."""
        taken, self._taken = self._taken, []
        for parameter, moments in taken:
            moved = {key: value.to(device=parameter.device, dtype=torch.bfloat16) for key, value in moments.items()}
            optimizer.state[parameter].update(moved)


_ADDED: WeakKeyDictionary[Optimizer, Bf16Moments] = WeakKeyDictionary()


def _check_parameter(optimizer: Optimizer, parameter: Tensor) -> None:
    name = type(optimizer).__name__
    if parameter.device.type not in _DEVICES:
        raise MisconfigurationException(
            f"{name} with bf16_moments has parameters on {parameter.device}, and torch has a kernel for fp32 parameters"
            " with bf16 moments on CUDA only. Leave bf16_moments out on other devices."
        )
    if parameter.dtype not in _DTYPES:
        raise ValueError(
            f"{name} with bf16_moments has {parameter.dtype} parameters, and the kernel takes fp32 ones. Train fp32"
            " parameters, for instance with AutocastPrecision or MasterWeightsPrecision, or leave bf16_moments out."
        )


def _check_group(optimizer: Optimizer, group: Mapping[str, Any]) -> None:
    name = type(optimizer).__name__
    if not group["fused"]:
        raise ValueError(f"bf16_moments({name}): only the fused kernel takes bf16 moments. Make it with fused=True.")
    if group["amsgrad"]:
        raise ValueError(f"bf16_moments({name}(amsgrad=True)): it keeps two moments, not three. Leave amsgrad out.")
    beta2 = float(group["betas"][1])
    if beta2 > _MAX_BETA2:
        raise ValueError(
            f"bf16_moments({name}): the second beta is {beta2}. A bf16 number times more than {_MAX_BETA2:.4f} may be"
            " rounded to itself (at 0.999 each is), so that second moments would never decrease. Use a smaller one,"
            " such as betas=(0.9, 0.95), or fp32 moments."
        )
