"""One policy for FSDP2's units, pure and on two ranks; and what FSDP1 does with the plugin's configuration."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo import process_group, run_ranks
from policy_models import LOW
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_mp import AutocastPrecision, PrecisionPolicy
from lightning_mp.policy_sharding import sharding_units
from lightning_mp.precision.applied_policy import AppliedPolicy

RULES = [("2", "fp32"), *PrecisionPolicy.default().rules]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def model() -> nn.Sequential:
    torch.manual_seed(0)
    built = nn.Sequential(Block(), Block(), nn.Linear(8, 4))
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.add_(torch.randn_like(parameter) / 100)  # norms whose weights 16 bit would round
    return built


def units(rules: Any, wanted: list[str]) -> list[tuple[tuple[str, ...], torch.dtype | None]]:
    found = sharding_units(PrecisionPolicy(rules).resolve(model()), wanted, LOW)
    assert all(unit.mixed_precision.reduce_dtype == torch.float32 for unit in found)
    assert not any(unit.mixed_precision.cast_forward_inputs for unit in found)
    return [(unit.modules, unit.mixed_precision.param_dtype) for unit in found]


def test_without_a_rule_that_matters_units_stay_as_they_are_wanted():
    assert units({"softmax": "fp32"}, ["", "1", "0"]) == [(("1",), LOW), (("0",), LOW), (("",), LOW)]


def test_what_is_fp32_gets_units_of_its_own():
    assert units(RULES, ["0", "1", ""]) == [
        (("0.norm",), None),
        (("0",), LOW),
        (("1.norm",), None),
        (("1",), LOW),
        (("",), None),  # holds the head alone
    ]
    assert units(RULES, [""]) == [(("0.norm", "1.norm", "2"), None), (("",), LOW)]
    assert units({"0.norm": "fp16"}, ["0"]) == [(("0.norm",), torch.float16), (("0",), LOW)]


def test_a_unit_that_is_no_module_is_refused():
    with pytest.raises(ValueError, match=r"No module of the model is named '7', 'blocks'\. Units are names of modules"):
        units(RULES, ["blocks", "0", "7"])


def forward_and_backward(sharded: nn.Module, applied: AppliedPolicy) -> Tensor:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    with torch.autocast("cpu", LOW), applied.in_force(LOW):
        loss = sharded(x).square().mean()
    with applied.in_force(LOW):
        loss.backward()
    return loss.detach()


def test_fsdp2_computes_what_one_process_computes():
    def run(rank: int) -> tuple[Tensor, list[Tensor], dict[str, torch.dtype]]:
        from torch.distributed.fsdp import fully_shard

        with process_group():
            mesh = dist.init_device_mesh("cpu", (2,))
            sharded = model()
            applied = AppliedPolicy(PrecisionPolicy(RULES), sharded, "cpu")
            for names, mixed_precision in sharding_units(applied.resolved, ["0", "1", ""], LOW):
                parts = [sharded.get_submodule(name) for name in names]
                fully_shard(parts, mesh=mesh, mp_policy=mixed_precision)
            seen: dict[str, torch.dtype] = {}
            for name in ("0.norm", "0.up", "2"):
                sharded.get_submodule(name).register_forward_hook(
                    lambda part, args, out, name=name: seen.update({name: part.weight.dtype})
                )
            loss = forward_and_backward(sharded, applied)
            return loss, [parameter.grad.full_tensor() for parameter in sharded.parameters()], seen

    loss, gradients, seen = run_ranks(run, 2)[0]
    assert seen == {"0.norm": torch.float32, "0.up": LOW, "2": torch.float32}
    reference = model()
    assert torch.equal(loss, forward_and_backward(reference, AppliedPolicy(PrecisionPolicy(RULES), reference, "cpu")))
    for ours, parameter in zip(gradients, reference.parameters(), strict=True):
        torch.testing.assert_close(ours, parameter.grad, rtol=1e-6, atol=1e-7)


def test_fsdp1_gathers_in_fp32_and_computes_what_one_process_computes():
    def run(rank: int) -> Tensor:
        from torch.distributed.fsdp import FullyShardedDataParallel

        with process_group():
            plugin = AutocastPrecision("bf16-mixed", policy=PrecisionPolicy(RULES))
            sharded: Any = model()
            applied = AppliedPolicy(PrecisionPolicy(RULES), sharded, "cpu")
            sharded = FullyShardedDataParallel(
                sharded,
                mixed_precision=plugin.mixed_precision_config,
                device_id=torch.device("cpu"),
                use_orig_params=True,
                auto_wrap_policy=lambda module, recurse, **_: recurse or isinstance(module, Block),
            )
            return forward_and_backward(sharded, applied)

    reference = model()
    expected = forward_and_backward(reference, AppliedPolicy(PrecisionPolicy(RULES), reference, "cpu"))
    assert all(torch.equal(loss, expected) for loss in run_ranks(run, 2))
