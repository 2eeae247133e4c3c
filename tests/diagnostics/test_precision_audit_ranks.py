"""PrecisionAudit in real processes: rank 0 tells, nobody waits, and the run is the same."""

import logging
import warnings
from typing import Any

import pytest
import torch
from audit_models import InFp64, Known, batches, fit, runs
from gloo import run_ranks
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from small_models import loader, quiet_trainer, shard, weights
from torch.distributed.fsdp import MixedPrecisionPolicy

from lightning_mp import AutocastPrecision, PrecisionPolicy
from lightning_mp.callbacks.precision_audit import PrecisionAudit


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("gradient_as_bucket_view", [False, True])
def test_under_ddp_rank_0_tells_and_all_compute_the_same(gradient_as_bucket_view: bool) -> None:
    def train(rank: int) -> Any:
        results = []
        handler, logger = Lines(), logging.getLogger()
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        for audit in (None, PrecisionAudit()):
            module = Known()
            module.norm = InFp64()
            strategy = DDPStrategy(process_group_backend="gloo", gradient_as_bucket_view=gradient_as_bucket_view)
            trainer = quiet_trainer(
                devices=2,
                strategy=strategy,
                plugins=[AutocastPrecision("bf16-mixed")],
                callbacks=[audit] if audit is not None else [],
            )
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                trainer.fit(module, loader(batches(4)[rank::2]))
            results.append(weights(module))
        tables = [line for line in handler.lines if "Precision audit" in line]
        said = [str(warning.message) for warning in caught if "PrecisionAudit" in str(warning.message)]
        assert audit is not None
        told = runs(audit.records) if audit.records is not None else None
        return results, len(tables), len(said), told, [finding.modules for finding in audit.findings]

    (first, tables, warned, told, found), (second, other_tables, other_warned, other_told, other_found) = run_ranks(
        train, 2
    )
    assert (tables, warned, other_tables, other_warned) == (1, 1, 0, 0)
    assert told is not None
    assert told["first", "addmm"] == told["last", "addmm"] == "bf16"
    assert found == [("norm",)]
    assert (other_told, other_found) == (None, [])
    reference = first[0]
    for run in (*first, *second):
        assert all(torch.equal(one, two) for one, two in zip(run, reference, strict=True))


class ByHand(Known):
    """Two steps in each training step; the second forward comes after the first optimizer step."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        for _ in range(2):
            self.manual_backward(self(batch[0]).float().square().mean())
            optimizer.step()
            optimizer.zero_grad()


def test_under_ddp_the_steps_of_manual_optimization_are_left_out() -> None:
    """There the whole training step is one call of the model. Our own sums of the step are fp64 on the CPU."""

    def train(rank: int) -> Any:
        audit = PrecisionAudit()
        strategy = DDPStrategy(process_group_backend="gloo", find_unused_parameters=True)
        fit(
            ByHand(),
            loader(batches(2)[rank::2]),
            audit,
            devices=2,
            strategy=strategy,
            plugins=[AutocastPrecision("16-mixed")],
        )
        return audit.records, [finding.kind for finding in audit.findings]

    (report, kinds), _ = run_ranks(train, 2)
    around = {row.operation for row in report.operations if not row.module and row.phase == "forward"}
    assert around == {"gelu", "to_copy", "pow", "mean", "mul"}
    assert "fp64" not in {row.compute for row in report.operations}
    assert next(row.calls for row in report.modules if row.name == "first") == 2
    assert "fp64" not in kinds


class Sharded(Known):
    def configure_model(self) -> None:
        for layer in (self.first, self.norm, self.middle, self.last):
            gathered = None if layer is self.norm else torch.bfloat16
            shard(self, layer, mp_policy=MixedPrecisionPolicy(param_dtype=gathered, reduce_dtype=torch.float32))


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")
def test_under_fsdp2_weights_are_told_as_they_are_gathered() -> None:
    """Gathered and multiplied in bf16, reduced in fp32; whoever audits, the run is the same."""

    def train(rank: int) -> Any:
        results, reports = [], []
        for audit in (None, PrecisionAudit()):
            module = Sharded()
            strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1, process_group_backend="gloo")
            plugins = [AutocastPrecision("bf16-mixed", policy=PrecisionPolicy.default())]
            fit(module, loader(batches(4)[rank::2]), audit, devices=2, strategy=strategy, plugins=plugins)
            results.append([p.full_tensor() for p in weights(module)])
            reports.append(audit.records if audit is not None else None)
        return results, reports[1]

    (ours, report), (theirs, nothing) = run_ranks(train, 2)
    assert nothing is None
    for run in (*ours, *theirs):
        assert all(torch.equal(one, two) for one, two in zip(run, ours[0], strict=True))
    modules = {row.name: row for row in report.modules}
    assert modules["norm"].weights == ("fp32",)
    for name in ("first", "middle", "last"):
        assert (modules[name].weights, modules[name].weight_gradients) == (("bf16",), ("fp32",))
    assert runs(report) == {
        ("first", "addmm"): "bf16",
        ("norm", "layer_norm"): "fp32",
        ("middle", "addmm"): "bf16",
        ("mix", "mm"): "bf16",
        ("mix", "softmax"): "fp32",
        ("last", "addmm"): "bf16",
        ("", "log_softmax"): "fp32",
        ("", "nll_loss"): "fp32",
    }
