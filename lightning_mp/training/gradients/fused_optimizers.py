"""Optimizers that skip and unscale in their own kernel."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Adafactor, Adagrad, Optimizer, Rprop

from lightning_mp.ground.core import private_optimizer_api

_PLAIN = {Tensor, nn.Parameter}

#: They end in an error of torch at the first step (torch 2.13); Rprop does until torch 2.15.
_NOT_WITH_DTENSORS = (Adafactor, *(() if torch.__version__ >= "2.15" else (Rprop,)))


def applies_grad_scale(optimizer: Optimizer) -> bool:
    """Whether the optimizer's own kernel divides gradients by ``optimizer.grad_scale`` and skips on ``found_inf``."""
    return private_optimizer_api.supports_amp_scaling(optimizer)


def why_steps_wait(optimizer: Optimizer) -> str | None:
    """Why the host waits for the device in each step of this optimizer, in one sentence; None if it does not.

    Masked updates would avoid the wait at a higher price: a copy of weights and state, and some 60 bytes per parameter
    of memory traffic, in every step.

    >>> weights = [nn.Parameter(torch.ones(1))]
    >>> why_steps_wait(torch.optim.AdamW(weights, fused=True)) is None
    True
    """
    if applies_grad_scale(optimizer):
        return None
    name = type(optimizer).__name__
    reason = "so the host waits for the device once per step, to keep non-finite gradients out."
    if "fused" in optimizer.defaults:
        return f"{name} is not fused, {reason} {name}(fused=True) decides on the device and is faster."
    return f"{name} cannot skip a step on the device, {reason} torch's AdamW, Adam, SGD and Adagrad can, fused=True."


def momentum_is_missing(optimizer: Optimizer) -> bool:
    """Whether a fused SGD would make a momentum buffer in this step.

    If that very step is skipped on the device, the buffer stays uninitialised memory.
    """
    with_momentum = [group for group in optimizer.param_groups if group.get("momentum", 0) != 0]
    return any(
        optimizer.state.get(p, {}).get("momentum_buffer") is None
        for group in with_momentum
        for p in group["params"]
        if p.grad is not None
    )


def one_mesh_per_group(optimizer: Optimizer) -> AbstractContextManager[None]:
    """While this is entered, no parameter group mixes plain tensors and DTensors, or DTensors of several meshes.

    torch's kernels over whole lists (``fused=True``, ``foreach=True``) refuse such a mix, and take one group after the
    other. Groups that mix nothing stay as they are; those that do are put back in the end, whatever happens. Nothing
    else changes: state belongs to parameters, and the parts have all settings of their group.
    """
    groups = optimizer.param_groups
    split = [part for group in groups for part in _split(group)]
    return nullcontext() if len(split) == len(groups) else _groups_are(groups, split)


@contextmanager
def fused_step(optimizer: Optimizer, found_inf: Tensor, factor: Tensor | None) -> Iterator[None]:
    """While this is entered, ``optimizer.step()`` multiplies gradients and decides in its own kernel."""
    # torch would bring them to weights on the CPU without waiting for the GPU that they are on.
    trained = (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None)
    device = next((p.device for p in trained), found_inf.device)
    optimizer.found_inf = found_inf.to(device)  # type: ignore[attr-defined]  # torch's protocol
    if factor is not None:
        optimizer.grad_scale = factor.reciprocal().float().to(device)  # type: ignore[attr-defined]  # the kernel divides
    try:
        yield
    finally:
        for name in ("found_inf", "grad_scale"):
            if hasattr(optimizer, name):
                delattr(optimizer, name)


@contextmanager
def _groups_are(groups: list[dict[str, Any]], split: list[dict[str, Any]]) -> Iterator[None]:
    before = list(groups)
    groups[:] = split
    try:
        yield
    finally:
        groups[:] = before


def _split(group: dict[str, Any]) -> list[dict[str, Any]]:
    if not (group.get("fused") or group.get("foreach")):
        return [group]
    if {type(parameter) for parameter in group["params"]} <= _PLAIN:
        return [group]
    kinds: dict[object, list[Tensor]] = {}
    for parameter in group["params"]:
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        kinds.setdefault(mesh, []).append(parameter)
    return [group | {"params": members} for members in kinds.values()] if len(kinds) > 1 else [group]


def refuse_without_dtensors(*optimizers: Optimizer) -> None:
    """Refuses optimizers that torch cannot step DTensors with."""
    for optimizer in optimizers:
        kind, name = type(optimizer), type(optimizer).__name__
        sharded = [group for group in optimizer.param_groups if any(isinstance(p, DTensor) for p in group["params"])]
        if sharded and kind in _NOT_WITH_DTENSORS:
            raise ValueError(
                f"{name} has sharded parameters (DTensors, from FSDP2 or tensor parallelism), and torch"
                f" {torch.__version__} lacks operations that {name} needs on these. Use AdamW or another optimizer that"
                " works element by element, or train with DDP."
            )
        if sharded and kind.__module__.partition(".")[0] == "bitsandbytes":
            raise ValueError(
                f"{name} of bitsandbytes has sharded parameters (DTensors, from FSDP2 or tensor parallelism), which its"
                " kernels do not take (bitsandbytes 0.50). Use torchao.optim.AdamW8bit, or train with DDP."
            )
        if isinstance(optimizer, SGD | Adagrad) and any(group.get("fused") for group in sharded):
            raise ValueError(
                f"{name}(fused=True) has sharded parameters (DTensors, from FSDP2 or tensor parallelism), for which"
                f" torch has no fused {name}. Use {name}(foreach=True), or a fused Adam or AdamW, which torch has."
            )
