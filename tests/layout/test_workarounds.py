"""A workaround names the version that ends it, or is proved necessary here; either test fails when it can go."""

import io
import re
import tomllib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.utils.flop_counter import FlopCounterMode

ROOT = Path(__file__).resolve().parents[2]
ENDS = re.compile(r"[Uu]ntil (torch|Lightning) (\d+)\.(\d+)")


def lowest_versions() -> dict[str, tuple[int, int]]:
    """The oldest release of each dependency that is supported."""
    requirements = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    found = [re.match(r"(\w+)>=(\d+)\.(\d+)", requirement) for requirement in requirements]
    return {match[1]: (int(match[2]), int(match[3])) for match in found if match}


def ends() -> list[tuple[str, str, tuple[int, int]]]:
    """File, dependency and version of every "until torch 2.15" in the package."""
    folders = (ROOT / "lightning_mp", ROOT / "callbacks", ROOT / "strategies")
    return [
        (file.name, match[1].lower(), (int(match[2]), int(match[3])))
        for folder in folders
        for file in sorted(folder.rglob("*.py"))
        for match in ENDS.finditer(file.read_text())
    ]


def test_workarounds_of_versions_that_are_no_longer_supported_are_gone():
    lowest = lowest_versions()
    assert {"torch", "lightning"} <= lowest.keys()
    assert len(ends()) >= 8
    assert [row for row in ends() if row[2] <= lowest[row[1]]] == [], "no supported version needs it: take it out"


def torch_version() -> tuple[int, int]:
    """Of the torch that runs: what a later release has mended is no longer worked around there."""
    major, minor, *_ = torch.__version__.split(".")
    return int(major), int(minor)


def orthogonal_in_16_bit() -> None:
    """pytorch/pytorch#9315; refused in precision/masters/checks.py."""
    layer = nn.utils.parametrizations.orthogonal(nn.Linear(4, 4), orthogonal_map="householder").bfloat16()
    layer(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()


def norm_in_16_bit_beside_fp32_statistics() -> None:
    """modules/norms.py keeps such norms in fp32."""
    norm = nn.BatchNorm1d(4).bfloat16()
    nn.functional.batch_norm(torch.ones(2, 4), torch.zeros(4), torch.ones(4), norm.weight, norm.bias, training=True)


def lightning_flattens_with_a_deprecated_check() -> None:
    """Lightning-AI/pytorch-lightning#21326; the warning is left out in core/quiet_run.py and pyproject.toml."""
    from lightning.pytorch.utilities.combined_loader import CombinedLoader

    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        iter(CombinedLoader([[1], [2]]))
        CombinedLoader([[1], [2]], "min_size").flattened  # noqa: B018


class Wrapped(Tensor):
    """A tensor in a subclass, as torchao's optimizers keep their state."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Tensor:
        wrapped = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        wrapped.inner = inner
        return wrapped

    def __init__(self, inner: Tensor) -> None:
        pass

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*(arg.inner if isinstance(arg, Wrapped) else arg for arg in args), **(kwargs or {}))


def subclass_read_with_a_function() -> None:
    """optimizers/low_bit_states.py saves the plain tensors inside."""
    file = io.BytesIO()
    torch.save(Wrapped(torch.ones(2)), file)
    file.seek(0)
    torch.load(file, map_location=lambda storage, location: storage, weights_only=False)


def state_of_an_optimizer_that_has_made_no_step() -> None:
    """pytorch/pytorch#164929; checkpoints/sharded.py keeps torch from making up a step to see the state."""
    layer = nn.Linear(2, 2)
    state = get_optimizer_state_dict(layer, torch.optim.Adam(layer.parameters()))["state"]
    if any(float(of_parameter["step"]) for of_parameter in state.values()):
        raise RuntimeError("Adam has counted a step")


def unscaling_in_bf16_on_cuda() -> None:
    """pytorch/pytorch#127176; gradients/gradient_ops.py multiplies tensor by tensor instead."""
    flag, factor = torch.zeros((), device="cuda"), torch.ones((), device="cuda")
    torch._amp_foreach_non_finite_check_and_unscale_([torch.ones(4, device="cuda").bfloat16()], flag, factor)


def grouped_products_of_fake_tensors_in_fp32() -> None:
    """step_memory/simulated_step.py makes them itself until torch 2.15."""
    with FakeTensorMode():
        nn.functional.grouped_mm(torch.ones(4, 8), torch.ones(2, 8, 8), offs=torch.tensor([2, 4], dtype=torch.int32))


def flops_of_a_grouped_gradient() -> None:
    """pytorch/pytorch#183405; flops/operation_flops.py has a formula of its own."""
    weight = nn.Conv1d(4, 4, 1, groups=4)
    with FlopCounterMode(display=False) as counter:
        weight(torch.ones(1, 4, 8)).sum().backward()
    if counter.get_total_flops() != 2 * 2 * 4 * 8:
        raise RuntimeError("a product for every pair of groups")


@pytest.mark.parametrize(
    "fails",
    [
        pytest.param(
            grouped_products_of_fake_tensors_in_fp32,
            marks=pytest.mark.skipif(torch_version() >= (2, 15), reason="mended in torch 2.15"),
        ),
        flops_of_a_grouped_gradient,
        orthogonal_in_16_bit,
        norm_in_16_bit_beside_fp32_statistics,
        lightning_flattens_with_a_deprecated_check,
        subclass_read_with_a_function,
        state_of_an_optimizer_that_has_made_no_step,
        pytest.param(
            unscaling_in_bf16_on_cuda, marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
        ),
    ],
)
def test_what_is_worked_around_still_fails(fails: Callable[[], None]):
    with pytest.raises((RuntimeError, NotImplementedError, FutureWarning)):
        fails()
