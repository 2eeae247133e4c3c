"""FSDP2Strategy on models that know nothing of it: real gloo processes against a single one."""

from typing import Any

import pytest
import torch
from fsdp2_runs import assert_same, assert_same_on_ranks, fp16, fsdp2, full_weights, model, train
from gloo import on_ranks
from gloo import run_same_ranks as run_ranks
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from reductions_counter import ReductionsPerStep
from small_models import WIDTH, Regression, fit, loader, quiet_trainer, regression_batches
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from lightning_mp import AccumulationScheduler, AutocastPrecision
from lightning_mp.language_model.gpt import Block
from lightning_mp.strategies.fsdp2 import FSDP2Strategy

# torch warns of in-place operations on a sharded layer's output; there are none here.
pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")

BLOCKS = ("model.blocks.0", "model.blocks.1")


# -- the same as on one process ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return train(gradient_clip_val=0.5)


def check_against(alone: dict[str, Any], found: list[dict[str, Any]]) -> None:
    assert_same_on_ranks(found)
    assert_same(found[0], alone)
    means = [sum(values) / len(found) for values in zip(*(rank["losses"] for rank in found), strict=True)]
    assert means == pytest.approx(alone["losses"], rel=1e-4)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("ranks", "arguments"),
    [
        (2, {"shard": {Block}}),
        pytest.param(4, {"shard": 1000}, marks=pytest.mark.full),
        (4, {"shard": "model.blocks.*", "replicate_size": 2}),
        pytest.param(2, {"shard": "Block", "reshard_after_forward": False}, marks=pytest.mark.full),
    ],
    ids=["class", "size", "hybrid", "kept"],
)
def test_it_equals_one_process(ranks: int, arguments: dict[str, Any], alone: dict[str, Any]) -> None:
    """D17, D19: losses, norms, scale and weights, with fp16, a fused optimizer, tied weights and clipping by norm."""

    def run(rank: int) -> Any:
        module = model()
        found = train(rank, ranks, fsdp2(**arguments), module=module, gradient_clip_val=0.5)
        placements = {p.placements for p in module.parameters() if isinstance(p, DTensor)}
        whole = [name for name, p in module.named_parameters() if not isinstance(p, DTensor)]
        return found | {"placements": placements, "whole": whole}

    found = run_ranks(run, ranks)
    check_against(alone, found)
    hybrid = arguments.get("replicate_size", 1) > 1
    assert found[0]["placements"] == {(Replicate(), Shard(0)) if hybrid else (Shard(0),)}
    assert found[0]["whole"] == []


@pytest.mark.full
def test_fp32_equals_one_process_to_the_rounding_of_sums() -> None:
    clip = {"gradient_clip_val": 0.5, "plugin": Precision()}
    found = run_ranks(lambda rank: train(rank, 2, fsdp2(), **clip), 2)
    assert_same_on_ranks(found)
    assert_same(found[0], train(**clip), atol=2e-6)


@pytest.mark.full
@pytest.mark.parametrize("sync", ["window", "micro_batch"])
def test_gradients_are_reduced_once_per_window_or_micro_batch(sync: Any) -> None:
    """D37, D53: two blocks with their norms apart, and the rest: five reductions."""

    def run(rank: int, devices: int) -> Any:
        counter = ReductionsPerStep()
        schedule = AccumulationScheduler({0: 2}, sync=sync if devices > 1 else "window")
        strategy = fsdp2() if devices > 1 else "auto"
        return train(rank, devices, strategy, steps=3, callbacks=[schedule, counter]) | {"reductions": counter.counts}

    found = run_ranks(lambda rank: run(rank, 2), 2)
    check_against(run(0, 1), found)
    assert found[0]["reductions"] == ([5, 5, 5] if sync == "window" else [10, 10, 10])


@pytest.mark.full
def test_lightnings_own_16_bit_precision_shards_as_well() -> None:
    def run(rank: int, devices: int) -> Any:
        module = Regression()
        strategy = fsdp2(nn.Linear) if devices > 1 else "auto"
        # both ranks see the same rows, so that 16-bit sums have the same rounding
        fit(module, regression_batches(3), devices=devices, strategy=strategy, precision="bf16-true")
        return {name: value.float() for name, value in full_weights(module).items()}

    alone = run(0, 1)
    for found in run_ranks(lambda rank: run(rank, 2), 2):
        for name, value in alone.items():
            torch.testing.assert_close(found[name], value, rtol=1e-2, atol=1e-5)


class Seen(nn.Module):
    """A norm, an embedding's worth of weights that torch knows nothing of, and a product; and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.product = nn.Linear(WIDTH, WIDTH)
        self.table: Tensor
        self.register_buffer("table", torch.linspace(0, 1, WIDTH))
        self.seen: dict[str, Any] = {}

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_autocast_enabled("cpu"):
            tensors = {"scale": self.scale, "table": self.table, "norm": self.norm.weight, "x": x}
            self.seen |= {name: tensor.dtype for name, tensor in tensors.items()}
            self.product.register_forward_pre_hook(
                lambda layer, _: self.seen.update(product=layer.weight.dtype), prepend=False
            )
        return x + self.product(self.norm(x) * self.scale + self.table).relu()


class Watched(Regression):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(Seen(), Seen(), nn.Linear(WIDTH, 1))


@pytest.mark.full
@pytest.mark.parametrize(
    ("arguments", "scale", "product"),
    [
        ({}, torch.float32, torch.bfloat16),
        ({"policy": {"class:Seen": "low"}}, torch.bfloat16, torch.bfloat16),
        ({"eval_precision": "32-true"}, torch.float32, torch.float32),  # evaluation is not fed rounded weights
    ],
    ids=["bare", "policy", "evaluated in fp32"],
)
def test_only_what_autocast_casts_is_gathered_in_16_bit(arguments: Any, scale: Any, product: Any) -> None:
    """D18, D49: a norm's weight, a module's own parameter and buffers are not rounded on the way."""

    def run(rank: int) -> Any:
        module, plugin = Watched(), AutocastPrecision("bf16-mixed", **arguments)
        fit(module, regression_batches(2), devices=2, strategy=fsdp2("Seen"), plugin=plugin)
        return module.net[0].seen, {p.dtype for p in module.parameters()}

    seen, dtypes = run_ranks(run, 2)[0]
    kept = dict.fromkeys(["table", "x", "norm"], torch.float32)
    assert seen == {"scale": scale, "product": product} | kept
    assert dtypes == {torch.float32}


# -- set-up ------------------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_a_model_on_the_meta_device_starts_from_the_same_weights_on_any_number_of_ranks() -> None:
    """Tied weights stay tied; no rank draws the numbers of another's shard."""

    def run(rank: int, ranks: int) -> Any:
        trainer = quiet_trainer(devices=ranks, strategy=fsdp2(), plugins=[AutocastPrecision("bf16-mixed")])
        with trainer.init_module(empty_init=True):
            module = model()
        assert {p.device.type for p in module.parameters()} == {"meta"}
        torch.manual_seed(rank)  # the numbers of rank 0 are everybody's
        trainer.validate(module, loader([[torch.zeros(2, 8, dtype=torch.int64)] * 2]), verbose=False)
        assert module.model.head.weight is module.model.token_embedding.weight
        return full_weights(module)

    (one,) = run_ranks(lambda rank: run(rank, 1), 1)
    assert one.keys() == model().state_dict().keys()
    for weights in run_ranks(lambda rank: run(rank, 2), 2):
        for name, value in one.items():
            assert torch.equal(weights[name], value), name
    drawn = one["model.blocks.1.mlp.up.weight"]
    assert drawn.unique().numel() > 0.99 * drawn.numel()
    bound = 1 / 16**0.5  # of nn.Linear.reset_parameters
    assert drawn.abs().max() <= bound
    torch.testing.assert_close(drawn.std(), torch.tensor(bound / 3**0.5), rtol=0.1, atol=0)
    assert one["model.final_norm.weight"].eq(1).all()


@on_ranks(run_ranks, 2)
def test_a_module_that_cannot_be_initialised_is_refused(rank: int) -> None:
    trainer = quiet_trainer(devices=2, strategy=fsdp2("Seen"))
    with trainer.init_module(empty_init=True):
        module = Watched()
    with pytest.raises(MisconfigurationException, match="class Seen are on the meta device and have no reset_para"):
        trainer.fit(module, loader(regression_batches(1)))


@pytest.mark.full
def test_ranks_start_from_the_weights_of_rank_zero() -> None:
    def run(rank: int) -> Any:
        module = model()
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(rank)
        return train(rank, 2, fsdp2(), module=module, steps=1)

    found = run_ranks(run, 2)
    assert_same_on_ranks(found)
    assert_same(found[0], train(steps=1))


class Manual(Regression):
    """Two steps of the optimizer in each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        optimizer = self.optimizers()
        for _ in range(2):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(self.net(x).float(), y.float())
            self.manual_backward(loss)
            optimizer.step()
        return loss


@pytest.mark.full
def test_manual_optimization_steps_in_the_middle() -> None:
    def run(rank: int, devices: int) -> Any:
        module = Manual()
        strategy = fsdp2("net.2") if devices > 1 else "auto"
        fit(module, regression_batches(4), devices=devices, strategy=strategy, plugin=fp16(), max_epochs=2)
        return full_weights(module)

    alone = run(0, 1)
    for weights in run_ranks(lambda rank: run(rank, 2), 2):
        for name, value in alone.items():
            torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-5)


# -- names and refusals ------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_lightning_knows_its_name() -> None:
    assert "mp_fsdp2" in StrategyRegistry.available_strategies()

    def run(rank: int) -> Any:
        trainer = quiet_trainer(devices=2, strategy="mp_fsdp2", plugins=[fp16()])
        module = model()
        data = loader([[torch.zeros(2, 8, dtype=torch.int64)] * 2])
        trainer.fit(module, data, data)
        return type(trainer.strategy), trainer.strategy.unit_names

    assert run_ranks(run, 2) == [(FSDP2Strategy, BLOCKS)] * 2


# LightningCLI 2.6 calls what jsonargparse has given other names since (lightning/pytorch/cli.py); it still works.
@pytest.mark.filterwarnings(r"ignore:[\s\S]*was deprecated in v4\.49\.0 and will be removed in v5:DeprecationWarning")
@pytest.mark.filterwarnings(r"ignore:\s*By default only one JsonargparseDeprecationWarning per:DeprecationWarning")
@pytest.mark.parametrize(
    ("shard", "read"),
    [("lightning_mp.language_model.gpt.Block", (Block,)), ("['*.0', '*.1']", ("*.0", "*.1")), ("500", 500)],
)
def test_yaml_says_what_is_sharded(shard: str, read: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["project.py"])
    monkeypatch.setenv("PL_GLOBAL_SEED", "1")  # the command line sets them for the rest of the process
    monkeypatch.setenv("PL_SEED_WORKERS", "1")
    config = tmp_path / "run.yaml"
    config.write_text(f"""
seed_everything: 1
trainer:
  accelerator: cpu
  devices: 1
  logger: false
  strategy:
    class_path: lightning_mp.strategies.fsdp2.FSDP2Strategy
    init_args:
      shard: {shard}
      tensor_parallel_size: 2
      tensor_parallel_plan:
        '*.up': column
        '*.down': row
      process_group_backend: gloo
""")
    cli = LightningCLI(Regression, run=False, save_config_callback=None, args=["--config", str(config)])
    strategy = cli.trainer.strategy
    assert isinstance(strategy, FSDP2Strategy)
    assert (strategy.shard, strategy.tensor_parallel_plan) == (read, {"*.up": "column", "*.down": "row"})


class Evaluated(Regression):
    """The last layer is in no unit but the model itself, and gathered for the whole step."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.test_step(batch, batch_idx)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.net(batch[0])
        self.gathered = not isinstance(self.net[2].weight, DTensor)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        self.test_step(batch, batch_idx)
        return batch[1]


@pytest.mark.parametrize("loop", ["validate", "test", "predict"])
def test_nothing_stays_gathered_after_evaluation(loop: str) -> None:
    def run(rank: int) -> Any:
        module = Evaluated()
        trainer = quiet_trainer(devices=2, strategy=fsdp2("net.0"), plugins=[fp16()])
        arguments = {"return_predictions": False} if loop == "predict" else {"verbose": False}
        getattr(trainer, loop)(module, loader(regression_batches(1)), **arguments)
        return module.gathered, {type(parameter) for parameter in module.parameters()}

    assert run_ranks(run, 2) == [(True, {DTensor})] * 2
