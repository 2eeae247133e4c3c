"""What a user's module holds or is given besides weights: metrics, decompositions, ids in a batch."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torchmetrics
from cpu_fsdp import CpuFsdp
from gloo import run_same_ranks as run_ranks
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from small_models import WIDTH, Regression, fit, loader, quiet_trainer, regression_batches, sgd
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.utils import parametrizations, parametrize
from torch.utils._pytree import tree_map

from lightning_mp import AutocastPrecision, MasterWeightsPrecision, PrecisionPolicy

MASTERS: dict[str, Callable[[], Any]] = {
    "bf16-true": lambda: MasterWeightsPrecision("bf16-true"),
    "16-true": lambda: MasterWeightsPrecision("16-true"),
    "remainder": lambda: MasterWeightsPrecision("bf16-true", storage="remainder"),
    "24bit": lambda: MasterWeightsPrecision("bf16-true", storage="24bit"),
    "policy": lambda: MasterWeightsPrecision("bf16-true", policy=PrecisionPolicy.default()),
}

#: Of each measurement; over all of a run they are more than the 256 up to which bf16 counts.
VALUES = 60


# -- torchmetrics ------------------------------------------------------------------------------------------------------


class Measured(Regression):
    """Metrics as submodules, in containers, wrapped, in a collection with compute groups, in fp64, and saved ones."""

    def __init__(self) -> None:
        super().__init__(sgd)
        self.mean = torchmetrics.MeanMetric()
        self.mean.persistent(mode=True)
        self.fp64 = torchmetrics.SumMetric().set_dtype(torch.float64)
        self.nested = nn.ModuleDict(
            {"in_training": nn.ModuleList([torchmetrics.SumMetric(), torchmetrics.CatMetric()])}
        )
        self.wrapped = torchmetrics.MinMaxMetric(torchmetrics.MeanMetric())
        members = [torchmetrics.MeanSquaredError(), torchmetrics.MeanAbsoluteError(), torchmetrics.R2Score()]
        self.collection = torchmetrics.MetricCollection(members)  # type: ignore[arg-type]
        self.accuracy = torchmetrics.classification.BinaryAccuracy()

    def metrics(self) -> list[torchmetrics.Metric]:
        return [part for part in self.modules() if isinstance(part, torchmetrics.Metric)]

    def measure(self) -> None:
        total, values = self.nested["in_training"]  # type: ignore[misc]
        for value in torch.linspace(1.0, 1.5, VALUES, dtype=torch.float32):
            self.mean.update(value)
            self.fp64.update(value)
            total.update(1.0)
            values.update(value)
            self.wrapped.update(value)
        predictions = torch.linspace(0, 1, 50, dtype=torch.float32)
        self.collection.update(predictions, predictions + 0.01)
        self.accuracy.update(predictions, (predictions > 0.3).long())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.measure()
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.measure()

    def results(self) -> dict[str, Any]:
        found = {name: metric for name, metric in self.named_modules() if isinstance(metric, torchmetrics.Metric)}
        return {
            name: tree_map(_told, (metric.compute(), metric.dtype, metric.metric_state))
            for name, metric in found.items()
        }


def _told(value: Any) -> Any:
    return (value.tolist(), value.dtype) if isinstance(value, Tensor) else value


def trained(plugin: Any, **arguments: Any) -> Measured:
    module = Measured()
    trainer = quiet_trainer(plugins=[plugin] if plugin is not None else [], num_sanity_val_steps=0, **arguments)
    trainer.fit(module, loader(regression_batches(4)), loader(regression_batches(1)))
    return module


@cache
def fp32_results() -> dict[str, Any]:
    return trained(None).results()


@pytest.mark.parametrize("plugin", MASTERS)
def test_metrics_are_those_of_fp32(plugin: str) -> None:
    ours = trained(MASTERS[plugin]())
    assert ours.results() == fp32_results()
    assert len(ours.metrics()) == 10
    assert float(ours.nested["in_training"][0].compute()) == 5 * VALUES  # type: ignore[index]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", pytest.param("fsdp1", marks=pytest.mark.full)])
def test_metrics_on_two_ranks_are_those_of_fp32(strategy: str) -> None:
    class Sharded(Measured):
        def configure_model(self) -> None:
            if strategy == "fsdp2":
                fully_shard(self.net)

    strategies: dict[str, Callable[[], Any]] = {
        "ddp": lambda: DDPStrategy(process_group_backend="gloo"),
        "fsdp2": lambda: ModelParallelStrategy(process_group_backend="gloo"),
        "fsdp1": CpuFsdp,
    }

    def run(rank: int) -> Any:
        module = Sharded()
        trainer = quiet_trainer(
            strategy=strategies[strategy](), devices=2, plugins=[MASTERS["bf16-true"]()], num_sanity_val_steps=0
        )
        trainer.fit(module, loader(regression_batches(2)), loader(regression_batches(1)))
        return (
            float(module.mean.compute()),
            float(module.nested["in_training"][0].compute()),
            module.fp64.sum_value.dtype,
        )

    for mean, total, dtype in run_ranks(run, 2):
        assert mean == pytest.approx(1.25, rel=1e-5)
        assert total == 2 * 3 * VALUES  # of both ranks
        assert dtype == torch.float64


def test_metrics_after_an_evaluation_and_after_a_resume(tmp_path: Any) -> None:
    module = Measured()
    trainer = quiet_trainer(plugins=[MASTERS["bf16-true"]()], num_sanity_val_steps=0)
    trainer.validate(module, loader(regression_batches(1)), verbose=False)
    assert {
        value.dtype
        for metric in module.metrics()
        for value in metric.metric_state.values()
        if isinstance(value, Tensor)
    } == {
        torch.float32,
        torch.float64,
        torch.int64,
    }
    for metric in module.metrics():
        metric.reset()
    trainer.fit(module, loader(regression_batches(2)), loader(regression_batches(1)))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    saved = torch.load(tmp_path / "a.ckpt")["state_dict"]
    assert saved["mean.mean_value"].dtype == torch.float32
    resumed = Measured()
    quiet_trainer(plugins=[MASTERS["bf16-true"]()], num_sanity_val_steps=0, max_epochs=2).fit(
        resumed, loader(regression_batches(2)), loader(regression_batches(1)), ckpt_path=tmp_path / "a.ckpt"
    )
    assert float(resumed.mean.weight) == 6 * VALUES
    assert float(resumed.mean.compute()) == pytest.approx(1.25, rel=1e-5)


def test_the_network_inside_of_a_metric_is_cast_like_any_other() -> None:
    """As FID's feature extractor: it is given what the module computes, which is 16 bit."""

    class Distance(torchmetrics.Metric):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(1, 4)
            self.add_state("total", torch.tensor(0.0), dist_reduce_fx="sum")

        def update(self, x: Tensor) -> None:
            self.total += self.net(x).float().mean().detach()

        def compute(self) -> Tensor:
            return self.total

    class WithDistance(Regression):
        def __init__(self) -> None:
            super().__init__(lambda _: sgd(self.net.parameters()))
            self.distance = Distance()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.distance.update(self.net(batch[0]))
            return super().training_step(batch, batch_idx)

    module = WithDistance()
    fit(module, regression_batches(2), plugin=MASTERS["bf16-true"]())
    assert module.distance.net.weight.dtype == torch.bfloat16
    assert module.distance.total.dtype == torch.float32
    assert "_apply" not in vars(module.distance)


# -- evaluation in fp32 ------------------------------------------------------------------------------------------------


class Adapted(Regression):
    """A frozen base of any dtype, and an adapter."""

    def __init__(self, base: torch.dtype, *, gathered_in: torch.dtype | None = None) -> None:
        super().__init__(lambda _: sgd(self.net.parameters()))
        self.base = nn.Linear(WIDTH, WIDTH).to(base).requires_grad_(False)
        self.gathered_in = gathered_in

    def configure_model(self) -> None:
        if self.gathered_in is not None:
            fully_shard(self.base, mp_policy=MixedPrecisionPolicy(param_dtype=self.gathered_in))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.dtype_of_base = self.base(batch[0].to(self.base.weight.dtype)).dtype


@pytest.mark.parametrize("base", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("loop", ["fit", "validate"])
def test_evaluation_in_fp32_says_what_stays_in_16_bit(base: torch.dtype, loop: str) -> None:
    module = Adapted(base)
    trainer = quiet_trainer(plugins=[AutocastPrecision("bf16-mixed", eval_precision="32-true")])
    loaders = [loader(regression_batches(1))] * (2 if loop == "fit" else 1)
    text = r"eval_precision='32-true'\): base.weight, base.bias are stored in 16 bit.*evaluate a copy loaded in fp32"
    with warned(text if base != torch.float32 else None):
        getattr(trainer, loop)(module, *loaders)
    assert module.dtype_of_base == base


@pytest.mark.parametrize("eval_precision", [None, "16-mixed"])
def test_nothing_is_said_where_evaluation_is_16_bit_anyway(eval_precision: Any) -> None:
    plugin = AutocastPrecision("bf16-mixed", eval_precision=eval_precision)
    with warned(None):
        quiet_trainer(plugins=[plugin]).validate(Adapted(torch.bfloat16), loader(regression_batches(1)), verbose=False)


def test_evaluation_in_fp32_says_what_fsdp2_gathers_in_16_bit() -> None:
    def run(rank: int) -> None:
        module = Adapted(torch.float32, gathered_in=torch.bfloat16)
        trainer = quiet_trainer(
            strategy=ModelParallelStrategy(process_group_backend="gloo"),
            devices=1,
            plugins=[AutocastPrecision("bf16-mixed", eval_precision="32-true")],
        )
        with warned(r"\): base are gathered by fully_shard in 16 bit.*Give fully_shard no param_dtype"):
            trainer.validate(module, loader(regression_batches(1)), verbose=False)

    run_ranks(run, 1)


@contextmanager
def warned(text: str | None) -> Iterator[None]:
    if text is None:
        yield  # warnings are errors
        return
    with pytest.warns(UserWarning, match=text):
        yield


# -- decompositions ----------------------------------------------------------------------------------------------------

MAPS = ["matrix_exp", "cayley", "householder"]


class Orthogonal(Regression):
    def __init__(self, orthogonal_map: str, rows: int) -> None:
        super().__init__(sgd)
        self.layer = parametrizations.orthogonal(nn.Linear(WIDTH, rows), orthogonal_map=orthogonal_map)
        self.back = nn.Linear(rows, WIDTH)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step([self.back(self.layer(batch[0])), batch[1]], batch_idx)


@pytest.mark.parametrize("rows", [4, 8, 12])
@pytest.mark.parametrize("orthogonal_map", MAPS)
@pytest.mark.parametrize("precision", ["bf16-true", "16-true"])
def test_orthogonal_weights_are_refused_and_the_named_policy_cures_it(
    orthogonal_map: str, rows: int, precision: Any
) -> None:
    module = Orthogonal(orthogonal_map, rows)
    with pytest.raises(
        MisconfigurationException,
        match=rf"MasterWeightsPrecision\('{precision}'\) would compute layer.parametrizations.weight in .*Use"
        rf" MasterWeightsPrecision\('{precision}', policy={{'\*.parametrizations.\*': 'fp32'}}\)",
    ):
        fit(module, regression_batches(3), plugin=MasterWeightsPrecision(precision))
    plugin = MasterWeightsPrecision(precision, policy={"*.parametrizations.*": "fp32"})
    before = module.layer.weight.detach().clone()
    fit(module, regression_batches(3), plugin=plugin)
    weight = module.layer.weight.detach()
    gram = weight @ weight.T if rows < WIDTH else weight.T @ weight
    assert weight.dtype == torch.float32
    assert not torch.equal(weight, before)
    torch.testing.assert_close(gram, torch.eye(len(gram)), rtol=0, atol=1e-5)


class Inverse(nn.Module):
    """A parametrization of a user's own, over a bias."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.linalg.inv(torch.diag(x) + 3 * torch.eye(len(x))).diagonal()


class Inverted(Regression):
    def __init__(self) -> None:
        super().__init__(sgd)
        parametrize.register_parametrization(self.net[0], "bias", Inverse())


def test_an_operation_without_16_bit_names_the_cure() -> None:
    with pytest.raises(RuntimeError) as raised:
        fit(Inverted(), regression_batches(1), plugin=MasterWeightsPrecision("bf16-true"))
    assert "does not have this operation" in raised.value.__notes__[0]
    assert "a rule in fp32: policy={'name.of.module': 'fp32'}" in raised.value.__notes__[0]
    assert "in a step itself, create its inputs with dtype=torch.float32" in raised.value.__notes__[0]
    plugin = MasterWeightsPrecision("bf16-true", policy={"net.0.parametrizations.*": "fp32"})
    fit(Inverted(), regression_batches(1), plugin=plugin)


# -- numbers in a batch ------------------------------------------------------------------------------------------------

BATCHES: dict[str, tuple[Any, dict[str, str | None]]] = {
    # what is in the batch; what is said in bf16 and in fp16
    "measurements": (1e3 * torch.randn(64, 8) + 0.123, {"bf16-true": None, "16-true": None}),
    "pixels": (torch.arange(256.0).view(16, 16), {"bf16-true": None, "16-true": None}),
    "ids": (
        torch.tensor([100001.0, 3.0]),
        {"bf16-true": r"in batch\['x'\] 100001 becomes 99840\.", "16-true": "100001 becomes inf"},
    ),
    "small ids": (torch.tensor([[257.0], [3.0]]), {"bf16-true": "257 becomes 256", "16-true": None}),
    "fp64 time stamps": (
        torch.tensor([1.7e9 + 1.0], dtype=torch.float64),
        {"bf16-true": "1700000001 becomes 1702887424", "16-true": "becomes inf"},
    ),
    "a column of ids": (
        torch.stack([torch.rand(8), 1000.0 + torch.arange(8)], 1),
        {"bf16-true": "1001 becomes 1000", "16-true": None},
    ),
    "too large": (torch.tensor([70000.5, 1.5]), {"bf16-true": None, "16-true": "70000.5 becomes inf"}),
    "integers": (torch.tensor([100001, 3]), {"bf16-true": None, "16-true": None}),
    "masks": (torch.tensor([float("-inf"), 0.0, float("nan")]), {"bf16-true": None, "16-true": None}),
    "nothing": (torch.zeros(0, 4), {"bf16-true": None, "16-true": None}),
}


class Given(pl.LightningModule):
    """Keeps what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.given: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.given.append(batch["x"])
        return self.weight.square()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return sgd(self.parameters())


class Validated(Given):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.given.append(batch["x"])


@pytest.mark.parametrize("precision", ["bf16-true", "16-true"])
@pytest.mark.parametrize("name", BATCHES)
def test_numbers_that_16_bit_does_not_have_are_told_of(name: str, precision: Any) -> None:
    x, texts = BATCHES[name]
    module = Given()
    trainer = quiet_trainer(plugins=[MasterWeightsPrecision(precision)])
    with warned(texts[precision]):
        trainer.fit(module, loader([{"x": x}] * 2))
    expected = x.to(module.weight.dtype) if x.is_floating_point() else x
    assert all(torch.equal(a.nan_to_num(), expected.nan_to_num()) for a in module.given)


def test_they_are_told_of_in_every_loop_with_its_first_batch_only() -> None:
    ids, small = {"x": torch.tensor([100001.0])}, {"x": torch.tensor([1.0])}

    def said(train: list[Any], val: list[Any]) -> int:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fit(Validated(), train, plugin=MASTERS["bf16-true"](), max_epochs=2, num_sanity_val_steps=0, validation=val)
        return sum("becomes 99840" in str(w.message) for w in caught)

    assert said([ids, ids], [small]) == 1
    assert said([small], [ids, ids]) == 1
    assert said([ids], [ids]) == 2
    assert said([small, ids], [small]) == 0


def test_under_a_policy_a_batch_is_not_cast() -> None:
    module = Given()
    fit(module, [{"x": BATCHES["ids"][0]}], plugin=MASTERS["policy"]())
    assert torch.equal(module.given[0], BATCHES["ids"][0])
