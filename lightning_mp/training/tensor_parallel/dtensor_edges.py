"""Into DTensors and out of them, where torch's own ways do one thing too many."""

import inspect
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate
from typing_extensions import override

# Until torch 2.13 it is not there; torch.compile takes the gradient's placements from it, and a wrong branch of ours.
_TAKES_GRAD_PLACEMENTS = "grad_placements" in inspect.signature(DTensor.from_local).parameters


def local_part(value: Tensor, *, gradient: Placement | None = None) -> Tensor:
    """This rank's part of a DTensor, which is no view: FSDP2 warns of modules that give views."""
    if torch.compiler.is_compiling():
        assert isinstance(value, DTensor)
        local: Tensor = value.to_local(grad_placements=None if gradient is None else [gradient])
        return local
    part: Tensor = _LocalPart.apply(value, gradient)  # type: ignore[no-untyped-call]
    return part


def unreduced(value: Tensor, mesh: DeviceMesh) -> Tensor:
    """A DTensor of what is the same on all ranks; of its gradient each rank gets its own term of the sum.

    ``DTensor.from_local`` would add the terms up, with an all-reduce.
    """
    if _TAKES_GRAD_PLACEMENTS:
        return DTensor.from_local(value, mesh, [Replicate()], run_check=False, grad_placements=[Partial()])
    if torch.compiler.is_compiling():
        raise RuntimeError(
            "FSDP2Strategy(tensor_parallel_plan='auto_sequence') with compiled blocks needs a torch whose"
            " DTensor.from_local takes grad_placements. Upgrade torch, leave compile() out, or use 'auto'."
        )
    made: Tensor = _Unreduced.apply(value, mesh)  # type: ignore[no-untyped-call]
    return made


class _LocalPart(torch.autograd.Function):
    @staticmethod
    @override
    def forward(ctx: Any, value: DTensor, gradient: Placement | None) -> Tensor:
        ctx.layout = value.device_mesh, value.placements if gradient is None else (gradient,)
        local: Tensor = value.to_local()
        return local

    @staticmethod
    @override
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return DTensor.from_local(gradient, *ctx.layout, run_check=False), None


class _Unreduced(torch.autograd.Function):
    @staticmethod
    @override
    def forward(ctx: Any, value: Tensor, mesh: DeviceMesh) -> Tensor:
        return DTensor.from_local(value.detach(), mesh, [Replicate()], run_check=False)

    @staticmethod
    @override
    def backward(ctx: Any, gradient: DTensor) -> tuple[Tensor, None]:
        local: Tensor = gradient.to_local()
        return local if gradient.placements[0].is_partial() else local / gradient.device_mesh.size(), None
