"""What torch's CUDA kernels for Adam with bf16 moments do, on a CPU: so that all around them is tested there.

The kernel widens the moments, makes the fp32 update, and rounds the moments when it stores them
(``FusedAdamMathFunctorMP`` in aten/src/ATen/native/cuda/fused_adam_utils.cuh). Here the fp32 update is that of torch's
own CPU kernel. A test marked ``gpu`` compares the CUDA kernel with the same update.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from lightning_mp.optimizers import adam_moments

_OPERATIONS = ("_fused_adam_", "_fused_adamw_")


@contextmanager
def kernels(steps: list[int] | None = None) -> Iterator[None]:
    """While this is entered, bf16 moments are allowed on a CPU; ``steps`` gets how many parameters each call steps."""
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s)Warning only once for all operators")
        for name in _OPERATIONS:
            library.impl(name, _kernel(name, steps), "CPU", with_keyset=True, allow_override=True)
    try:
        with patch.object(adam_moments, "_DEVICES", {"cpu"}):
            yield
    finally:
        library._destroy()


def _kernel(name: str, steps: list[int] | None) -> Any:
    stock = torch.library.get_kernel(f"aten::{name}", "CPU")

    def step(
        keys: Any, parameters: Any, gradients: Any, exp_avgs: Any, exp_avg_sqs: Any, *rest: Any, **settings: Any
    ) -> None:
        if steps is not None:
            steps.append(len(parameters))
        moments = [[moment.float() for moment in moments] for moments in (exp_avgs, exp_avg_sqs)]
        stock.call_boxed(keys, parameters, gradients, *moments, *rest, **settings)
        for stored, new in zip([*exp_avgs, *exp_avg_sqs], [*moments[0], *moments[1]], strict=True):
            stored.copy_(new)

    return step


def moments_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Of Adam; others may share its state."""
    return [v for state in optimizer.state.values() for key, v in state.items() if key in ("exp_avg", "exp_avg_sq")]


def rounded_moments(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The reference: fp32 moments, which a hook rounds to bf16 after each step."""

    def round_them(*_: Any) -> None:
        for moment in moments_of(optimizer):
            moment.copy_(moment.bfloat16())

    optimizer.register_step_post_hook(round_them)
    return optimizer
