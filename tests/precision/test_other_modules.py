"""What a user's module holds besides common weights: metrics, a 16-bit base, pruned and lazy parameters."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, cast

import pytest
import torch
import torchmetrics
from cpu_fsdp import CpuFsdp
from gloo import on_ranks
from gloo import run_same_ranks as run_ranks
from lightning.pytorch.callbacks import ModelPruning
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from master_loops import DTYPES, master_weights, masters_of
from small_models import (
    WIDTH,
    Regression,
    StepsByHand,
    fit,
    loader,
    quiet_trainer,
    regression_batches,
    sgd,
    weights,
)
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._pytree import tree_map

from lightning_mp import AutocastPrecision, MasterWeightsPrecision, PrecisionPolicy

MASTERS: dict[str, Callable[[], Any]] = {
    "bf16-true": lambda: MasterWeightsPrecision("bf16-true"),
    "16-true": lambda: MasterWeightsPrecision("16-true"),
    "policy": lambda: MasterWeightsPrecision("bf16-true", policy=PrecisionPolicy.default()),
}

#: Of each measurement; over all of a run they are more than the 256 up to which bf16 counts.
VALUES = 60


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


@on_ranks(run_ranks, 1)
def test_evaluation_in_fp32_says_what_fsdp2_gathers_in_16_bit(rank: int) -> None:
    module = Adapted(torch.float32, gathered_in=torch.bfloat16)
    trainer = quiet_trainer(
        strategy=ModelParallelStrategy(process_group_backend="gloo"),
        devices=1,
        plugins=[AutocastPrecision("bf16-mixed", eval_precision="32-true")],
    )
    with warned(r"\): base are gathered by fully_shard in 16 bit.*Give fully_shard no param_dtype"):
        trainer.validate(module, loader(regression_batches(1)), verbose=False)


@contextmanager
def warned(text: str | None) -> Iterator[None]:
    if text is None:
        yield  # warnings are errors
        return
    with pytest.warns(UserWarning, match=text):
        yield


class Mixing(Regression):
    class Layer(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return torch.lerp(super().forward(input), torch.ones(16), self.bias)

    def __init__(self) -> None:
        super().__init__(sgd)
        self.net[0] = self.Layer(8, 16)


@pytest.mark.parametrize("kind", [Mixing])
def test_two_dtypes_in_an_operation_get_a_hint_with_the_cure(kind: type[Regression]) -> None:
    with pytest.raises(RuntimeError) as raised:
        fit(kind(), regression_batches(1), plugin=MasterWeightsPrecision("bf16-true"))
    assert "a module's weights are torch.bfloat16 inside of its forward" in raised.value.__notes__[0]
    assert "a rule in fp32, policy={'name.of.module': 'fp32'}" in raised.value.__notes__[0]
    fit(kind(), regression_batches(1), plugin=MasterWeightsPrecision("bf16-true", policy={"net.0": "fp32"}))


class HalvesGradients(StepsByHand, Regression):
    """A gradient surgery that computes in fp32."""

    def manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        super().manual_backward(loss, *args, **kwargs)
        for parameter in self.parameters():
            parameter.grad = 0.5 * cast(Tensor, parameter.grad).float()


@pytest.mark.parametrize("precision", ["bf16-true", "16-true"])
def test_fp32_gradients_that_the_module_assigns_get_a_hint_with_the_cure(precision: Any) -> None:
    with pytest.raises(RuntimeError, match="with grad_dtype") as raised:
        fit(HalvesGradients(), regression_batches(1), plugin=MasterWeightsPrecision(precision))
    [hint] = raised.value.__notes__
    assert hint.endswith("Assign gradient.to(parameter.grad_dtype), or take fp32_gradients=True.")
    fit(HalvesGradients(), regression_batches(1), plugin=MasterWeightsPrecision(precision, fp32_gradients=True))


class Scripted(Regression):
    def __init__(self) -> None:
        super().__init__(sgd)
        self.net[2] = torch.jit.script(self.net[2])


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize("storage", ["fp32", "remainder", "24bit"])
def test_a_torchscript_part_trains(storage: Any) -> None:
    scripted, plain = Scripted(), Regression(sgd)
    fit(scripted, regression_batches(4), plugin=MasterWeightsPrecision("bf16-true", storage=storage))
    fit(plain, regression_batches(4), plugin=MasterWeightsPrecision("bf16-true", storage=storage))
    for one, other, start in zip(weights(scripted), weights(plain), weights(Regression()), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0.02 * float((other - start).abs().max()))


@pytest.mark.parametrize("rewinds", [True, False])
def test_pruning_trains(rewinds: bool) -> None:
    module = Regression()
    pruning = ModelPruning("l1_unstructured", amount=0.5, use_lottery_ticket_hypothesis=rewinds)
    fit(module, regression_batches(2), pruning, plugin=MasterWeightsPrecision("bf16-true"), max_epochs=2)
    zeros = sum(int((p == 0).sum()) for p in module.parameters())
    # Half in the first epoch, half of the rest in the second.
    assert zeros >= 0.7 * sum(p.numel() for p in module.parameters())


class Lazy(Regression):
    def __init__(self, *, in_setup: bool = False) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.LazyLinear(16), nn.GELU(), nn.LazyLinear(1))
        self.in_setup = in_setup

    def setup(self, stage: str) -> None:
        if self.in_setup:
            torch.manual_seed(0)
            with torch.no_grad():
                self.net(torch.zeros(1, 8))


class ValidatedLazy(Lazy):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.seen = self.net(batch[0]).dtype


@pytest.mark.parametrize("precision", DTYPES)
def test_parameters_without_a_shape_train_once_they_have_one(precision: str) -> None:
    ends = []
    for module in (Lazy(in_setup=True), Regression()):
        trainer = fit(module, regression_batches(4), plugin=master_weights(precision))
        ends.append(masters_of(trainer))
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


@pytest.mark.parametrize("precision", ["bf16-true", "16-true"])
def test_parameters_without_a_shape_can_be_evaluated(precision: Any) -> None:
    module = ValidatedLazy()
    quiet_trainer(plugins=[master_weights(precision)]).validate(module, loader(regression_batches(1)), verbose=False)
    assert module.seen == DTYPES[precision]
