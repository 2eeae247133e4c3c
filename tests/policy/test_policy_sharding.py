"""One policy for FSDP2's units, pure and on two ranks; and every plugin with a policy under FSDP2 and FSDP1."""

from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from cpu_fsdp import CpuFsdp
from gloo import FLOAT8, process_group
from gloo import run_same_ranks as run_ranks
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from policy_models import LOW, nothing_is_left
from small_models import adamw, fit, shard, weights
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from lightning_mp import AutocastPrecision, Float8Precision, MasterWeightsPrecision, PrecisionPolicy
from lightning_mp.ground.core import private_sharding_api
from lightning_mp.training.policy.sharding_units import gathered_otherwise, sharding_units

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


# torch warns of in-place operations on a sharded layer's output; there are none here.
quiet_fsdp2 = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")

PLUGINS: dict[str, Callable[[], Any]] = {
    "autocast": lambda: AutocastPrecision("bf16-mixed", policy=PrecisionPolicy(SHARDED_RULES)),
    "master-weights": lambda: MasterWeightsPrecision("bf16-true", policy=PrecisionPolicy(SHARDED_RULES)),
    "master-weights-remainder": lambda: MasterWeightsPrecision(
        "bf16-true", storage="remainder", policy=PrecisionPolicy(SHARDED_RULES)
    ),
    "fp8": lambda: Float8Precision(skip_small=False, policy=PrecisionPolicy(SHARDED_RULES), skip_first_and_last=False),
}
SHARDED_RULES = [("head", "fp32"), *PrecisionPolicy.default().rules]
WANTED = ["net", "head"]


class Net(pl.LightningModule):
    """Notes in which dtypes weights and buffers are used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 16))
        self.head = nn.Linear(16, 16)
        self.register_buffer("table", torch.linspace(0.9, 1.1, 16))
        self.seen: dict[str, torch.dtype] = {}
        self.losses: list[float] = []
        for name in ("net.0", "net.1", "head"):
            self.get_submodule(name).register_forward_hook(
                lambda part, args, out, name=name: self.seen.update({name: part.weight.dtype, f"{name} out": out.dtype})
            )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        self.seen["table"] = self.table.dtype
        loss = F.mse_loss(self.head(self.net(x * self.table.to(x.dtype))), y)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return adamw(self.parameters())


class ByPolicy(Net):
    """Shards the units that the policy makes."""

    def configure_model(self) -> None:
        if not isinstance(self.head.weight, DTensor):
            resolved = self.trainer.precision_plugin.policy.resolve(self)
            for names, mixed_precision in sharding_units(resolved, WANTED, LOW):
                parts = [self.get_submodule(name) for name in names]
                fully_shard(parts, mesh=self.device_mesh["data_parallel"], mp_policy=mixed_precision)


class OneUnit(Net):
    """Shards as one would without a policy."""

    mixed_precision = MixedPrecisionPolicy()

    def configure_model(self) -> None:
        shard(self, self.net, mp_policy=self.mixed_precision)


class Rounding(OneUnit):
    mixed_precision = MixedPrecisionPolicy(param_dtype=LOW)


def data(num_batches: int = 3) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [list(torch.randn(2, 4, 16, generator=generator)) for _ in range(num_batches)]


def fsdp2() -> ModelParallelStrategy:
    return ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1, process_group_backend="gloo")


def train(module: Net, plugin: Any, **arguments: Any) -> Any:
    return fit(module, data(), plugin=plugin, **arguments)


@quiet_fsdp2
@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", PLUGINS)
def test_under_fsdp2_the_plugin_trains_as_in_one_process(name: str) -> None:
    """With the same batches on both ranks, and in a second fit, too. What the policy keeps in fp32 is gathered so."""

    def run(rank: int) -> Any:
        module, plugin = ByPolicy(), PLUGINS[name]()
        for _ in range(2):
            train(module, plugin, devices=2, strategy=fsdp2())
            assert nothing_is_left(module)
        return [p.full_tensor() for p in weights(module)], module.seen, module.losses

    (first, seen, losses), (second, *_) = run_ranks(run, 2, imports=FLOAT8 if name == "fp8" else ())
    alone, plugin = Net(), PLUGINS[name]()
    for _ in range(2):
        train(alone, plugin)
    fp32 = dict.fromkeys(["net.1", "net.1 out", "head", "head out", "table"], torch.float32)
    assert seen == {"net.0": LOW, "net.0 out": LOW} | fp32
    assert losses == pytest.approx(alone.losses, rel=0.02)
    for ours, other, theirs in zip(first, second, weights(alone), strict=True):
        assert (ours.dtype, torch.equal(ours, other)) == (theirs.dtype, True)
        if name != "fp8":  # FSDP2 gathers in bf16; values on the edge between two fp8 numbers fall to either side
            torch.testing.assert_close(ours, theirs, rtol=2**-8 if ours.dtype == LOW else 1e-5, atol=1e-5)


def refusal(module: type[Net], name: str) -> str:
    def run(rank: int) -> str:
        built = module()
        with pytest.raises(MisconfigurationException) as caught:
            train(built, PLUGINS[name](), devices=2, strategy=fsdp2())
        assert nothing_is_left(built)
        assert {p.dtype for p in built.parameters()} == {torch.float32}
        return str(caught.value)

    return run_ranks(run, 2, imports=FLOAT8 if name == "fp8" else ())[0]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", ["autocast", "fp8", "master-weights"])
def test_a_unit_that_rounds_what_the_policy_keeps_is_refused(name: str) -> None:
    """Its norm would compute in fp32, as the rule says, with weights that lost their last 16 bits on the way."""
    message = refusal(Rounding, name)
    assert message.startswith(
        "PrecisionPolicy: net.1 runs in torch.float32, but fully_shard(mp_policy=...) gathers its weights in"
        " torch.bfloat16. In configure_model shard the units that"
        " lightning_mp.training.policy.sharding_units.sharding_units"
    )


def test_what_units_gather_is_read_from_torch() -> None:
    def run(rank: int) -> Any:
        with process_group():
            mesh = dist.init_device_mesh("cpu", (2,))
            sharded = model()
            fully_shard(sharded[0], mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.float16))
            fully_shard(sharded[2], mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.float32))
            fully_shard(sharded, mesh=mesh)
            dtypes = [
                private_sharding_api.sharding_param_dtype(sharded[0]),
                private_sharding_api.sharding_param_dtype(sharded),
            ]
            found = gathered_otherwise(PrecisionPolicy(RULES).resolve(sharded), sharded, LOW)
            return dtypes, found

    dtypes, found = run_ranks(run, 2)[0]
    assert dtypes == [torch.float16, None]
    fp16 = torch.float16
    assert found == [("0.norm", torch.float32, fp16), ("0.up", LOW, fp16), ("0.down", LOW, fp16)]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("policy", [None, SHARDED_RULES], ids=["bare", "policy"])
@pytest.mark.parametrize("name", ["autocast", "master-weights", "fp8"])
def test_under_fsdp1_buffers_stay_fp32_and_rules_hold(name: str, policy: Any) -> None:
    """D49: Lightning's own "mixed" puts buffers in 16 bit. A rule about a module makes FSDP1 gather fp32 weights."""

    def run(rank: int) -> Any:
        plugin = PLUGINS[name]()
        plugin.policy = None if policy is None else plugin.policy
        module = Net()
        trainer = train(module, plugin, devices=2, strategy=CpuFsdp(process_group_backend="gloo"))
        assert not any(isinstance(vars(part).get("forward"), partial) for part in module.modules())
        with FullyShardedDataParallel.summon_full_params(trainer.model):
            return weights(module), module.seen

    (first, seen), (second, _) = run_ranks(run, 2, imports=FLOAT8 if name == "fp8" else ())
    assert seen["table"] == torch.float32
    if policy is None:
        assert {seen["net.0"], seen["net.1"], seen["head"]} == {LOW}
        return
    assert (seen["net.1 out"], seen["head out"], seen["net.0 out"]) == (torch.float32, torch.float32, LOW)
    assert {seen["net.0"], seen["net.1"], seen["head"]} == {torch.float32}
    alone = Net()
    train(alone, PLUGINS["fp8" if name == "fp8" else "autocast"]())
    for ours, other, theirs in zip(first, second, weights(alone), strict=True):
        assert torch.equal(ours, other)
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
