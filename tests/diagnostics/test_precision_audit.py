"""PrecisionAudit: the dtype every module and operation really used, at no change of a single bit of the run."""

import json
import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
from audit_models import CLASSES, WIDTH, InFp64, Known, Mix, audited, batches, fit, runs, what_is_left
from huggingface_models import project
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins import MixedPrecision
from small_models import Parts, Regression, fused_adamw, loader, quiet_trainer, regression_batches, sgd, weights
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_mp import AutocastPrecision, Float8Precision, LossScaler, MasterWeightsPrecision, PrecisionPolicy
from lightning_mp.callbacks.precision_audit import PrecisionAudit
from lightning_mp.monitors.diagnostics.audit.table import audit_table
from lightning_mp.monitors.diagnostics.audit.watch import PrecisionWatch, audit_step


def scaler() -> LossScaler:
    return LossScaler(init_scale=1024.0)


POLICY = [("middle", "fp32"), *PrecisionPolicy.default().rules]
# What each run is made of, its 16 bit (or fp32), and the dtype of weights and inputs.
RUNS: dict[str, tuple[Any, str, str]] = {
    "32-true": (dict, "fp32", "fp32"),
    "stock 16-mixed": (lambda: {"plugins": [MixedPrecision("16-mixed", "cpu", scaler())]}, "fp16", "fp32"),
    "stock bf16-mixed": (lambda: {"precision": "bf16-mixed"}, "bf16", "fp32"),
    "stock bf16-true": (lambda: {"precision": "bf16-true"}, "bf16", "bf16"),
    "autocast 16": (lambda: {"plugins": [AutocastPrecision("16-mixed", scaler=scaler())]}, "fp16", "fp32"),
    "autocast bf16": (lambda: {"plugins": [AutocastPrecision("bf16-mixed")]}, "bf16", "fp32"),
    "policy": (lambda: {"plugins": [AutocastPrecision("bf16-mixed", policy=PrecisionPolicy(POLICY))]}, "bf16", "fp32"),
    "masters bf16": (lambda: {"plugins": [MasterWeightsPrecision("bf16-true", policy=None)]}, "bf16", "fp32"),
    "masters 16": (
        lambda: {"plugins": [MasterWeightsPrecision("16-true", scaler=scaler(), policy=None)]},
        "fp16",
        "fp32",
    ),
}


def truth(name: str) -> dict[tuple[str, str], str]:
    """What runs in which dtype, by torch's documentation: CPU autocast leaves softmax and norms to their inputs."""
    _, low, stored = RUNS[name]
    mixed = low != stored
    return {
        ("first", "addmm"): low,
        ("norm", "layer_norm"): "fp32" if name == "policy" else low,
        ("middle", "addmm"): "fp32" if name == "policy" else low,
        ("mix", "mm"): low,
        ("mix", "softmax"): "fp32" if name == "policy" else low,
        ("last", "addmm"): low,
        ("", "log_softmax"): "fp32" if mixed else low,
        ("", "nll_loss"): "fp32" if mixed else low,
    }


@pytest.mark.parametrize("name", RUNS)
def test_every_dtype_of_a_known_model_is_told(name: str) -> None:
    arguments, low, stored = RUNS[name]
    audit = audited(Known(), **arguments())
    report = audit.records
    assert report is not None
    assert runs(report) == truth(name)
    modules = {row.name: row for row in report.modules}
    assert list(modules) == ["", "first", "norm", "middle", "mix", "last"]
    for part in ("first", "norm", "middle", "last"):
        held = low if name.startswith("masters") and part != "norm" else stored  # inside of a call
        assert modules[part].weights == modules[part].weight_gradients == (held,)
        assert modules[part].calls == 1
    for part in ("first", "last"):
        assert modules[part].outputs == modules[part].output_gradients == (low,)
        assert modules[part].autocast == (f"cpu {low}" if low != stored else "off")
    assert modules["first"].inputs == (stored,)
    assert modules["middle"].autocast == ("off" if name == "policy" or low == stored else f"cpu {low}")
    assert (report.compiled, report.unseen) == (False, ())
    # Each product's backward runs in the dtype of its forward.
    backward = runs(report, "backward")
    assert {key: backward[key] for key in (("first", "mm"), ("last", "mm"))} == {
        ("first", "mm"): low,
        ("last", "mm"): low,
    }
    # Also where a CPU's own autocast leaves norm and softmax in 16 bit: the table says so.
    assert audit.findings == ()


def test_the_autocast_of_a_module_is_that_inside_of_its_rule() -> None:
    """A norm's dtype is the same in fp32 with autocast off and on, where autocast leaves it to its input."""
    audit = audited(Known(), plugins=[AutocastPrecision("bf16-mixed", policy=PrecisionPolicy([("norm", "fp32")]))])
    report = audit.records
    assert report is not None
    modules = {row.name: row for row in report.modules}
    assert (modules["norm"].autocast, modules["middle"].autocast) == ("off", "cpu bf16")


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_fp8_layers_are_told_from_those_in_bf16(recipe: Any) -> None:
    """torchao's recipes: which of a layer's three products are in which format."""
    audit = audited(Known(), plugins=[Float8Precision(recipe, skip_small=False, emulate=True)])
    report = audit.records
    assert report is not None
    forward, backward = runs(report), [row for row in report.operations if row.phase == "backward"]
    assert forward["first", "addmm"] == forward["last", "addmm"] == forward["mix", "mm"] == "bf16"
    assert forward["middle", "mm"] == "fp8_e4m3fn"
    products = {row.compute for row in backward if row.module == "middle" and row.kind == "matmul"}
    assert (
        products
        == {"tensorwise": {"fp8_e5m2"}, "rowwise": {"fp8_e4m3fn"}, "rowwise_with_gw_hp": {"fp8_e4m3fn", "bf16"}}[recipe]
    )
    assert audit.findings == ()


def test_gpt2_of_hugging_face_under_stock_autocast() -> None:
    """Known of GPT-2: 4 products in a block, tied head, attention in one kernel, fp32 loss."""
    module, data = project("gpt2")
    audit = audited(module, data, precision="bf16-mixed", limit_train_batches=1)
    report = audit.records
    assert report is not None
    found = runs(report)
    blocks = [f"model.transformer.h.{number}" for number in (0, 1)]
    products = [
        f"{block}.{part}" for block in blocks for part in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    ]
    assert {key: value for key, value in found.items() if key[1] == "addmm"} == {
        (name, "addmm"): "bf16" for name in products
    }
    assert [found[f"{block}.attn", "scaled_dot_product_attention"] for block in blocks] == ["bf16", "bf16"]
    assert found["model.lm_head", "mm"] == "bf16"
    assert found["model", "nll_loss"] == "fp32"
    # The residual stream is fp32, so the norms are.
    assert {value for (_, operation), value in found.items() if operation == "layer_norm"} == {"fp32"}
    assert audit.findings == ()


class Manual(Known):
    """Two optimizers, two forwards and backwards in one training step, with accumulation by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.critic = nn.Linear(CLASSES, 8)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        one, two = self.optimizers()
        self.manual_backward(F.cross_entropy(self(x), y))
        if batch_idx % 2:
            one.step()
            one.zero_grad()
        self.manual_backward(self.critic(self(x).detach()).float().square().mean())
        two.step()
        two.zero_grad()

    def configure_optimizers(self) -> Any:
        generator = [p for name, p in self.named_parameters() if not name.startswith("critic")]
        return [fused_adamw(generator), sgd(self.critic.parameters())]


SAME_NUMBERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "plain": (Known, {}),
    "checkpointed": (lambda: Known(checkpointed=True), {}),
    "accumulated": (Known, {"accumulate_grad_batches": 2}),
    "manual": (Manual, {}),
}


@pytest.mark.parametrize("case", SAME_NUMBERS)
@pytest.mark.parametrize("name", ["32-true", "stock 16-mixed", "policy", "masters bf16"])
def test_the_run_computes_the_same_bits_with_and_without(name: str, case: str) -> None:
    make, arguments = SAME_NUMBERS[case]
    results = []
    for audit in (None, PrecisionAudit()):
        module = make()
        fit(module, audit=audit, **RUNS[name][0](), **arguments)
        results.append(weights(module))
    assert audit is not None
    assert audit.records is not None
    assert all(torch.equal(one, two) for one, two in zip(*results, strict=True))


@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_transformers_compute_the_same_bits_with_and_without(model: str) -> None:
    results = []
    for audit in (None, PrecisionAudit()):
        torch.manual_seed(0)
        module, data = project(model)
        torch.manual_seed(0)
        fit(module, data, audit, plugins=[AutocastPrecision("bf16-mixed")], limit_train_batches=3)
        results.append((weights(module), module.losses))
    (one, losses), (two, audited_losses) = results
    assert losses == audited_losses
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


class CountWhatIsLeft(Callback):
    """After the backward and at the end of each batch."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    def on_before_zero_grad(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.counts.append(what_is_left(pl_module))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.counts.append(what_is_left(pl_module))


def test_nothing_of_it_is_left_after_the_batch() -> None:
    counter = CountWhatIsLeft()
    fit(Known(), audit=PrecisionAudit(), callbacks=[counter])
    # Gradients are zeroed between forward and backward: only in the first batch is something there.
    first, *others = counter.counts
    assert first == 6 * 2 + 1
    assert len(others) == 5
    assert set(others) == {0}


@pytest.mark.parametrize("where", ["forward", "backward", "step"])
def test_nothing_of_it_is_left_after_an_exception(where: str) -> None:
    class Breaks(Known):
        def forward(self, x: Tensor) -> Tensor:
            if where == "forward":
                self.first(x[:, :3])
            out = super().forward(x)
            if where == "backward":
                out.register_hook(lambda gradient: 1 / 0)
            return out

        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
            super().optimizer_step(epoch, batch_idx, optimizer, closure)
            if where == "step":
                raise ZeroDivisionError

    module = Breaks()
    with pytest.raises((RuntimeError, ZeroDivisionError)):
        fit(module, audit=PrecisionAudit())
    assert what_is_left(module) == 0


def test_manual_optimization_is_seen_in_both_backwards_and_without_its_steps() -> None:
    audit = audited(Manual(), plugins=[AutocastPrecision("bf16-mixed")])
    report = audit.records
    assert report is not None
    assert runs(report)["critic", "addmm"] == "bf16"
    backward = runs(report, "backward")
    assert backward["critic", "mm"] == backward["first", "mm"] == "bf16"
    stepping = [row.operation for row in report.operations if "foreach" in row.operation or "adam" in row.operation]
    assert stepping == []
    assert next(row for row in report.modules if row.name == "first").calls == 2


def test_what_a_checkpoint_computes_again_is_told() -> None:
    report = audited(Known(checkpointed=True), plugins=[AutocastPrecision("bf16-mixed")]).records
    assert report is not None
    forward, again = runs(report), runs(report, "recompute")
    assert again == {key: value for key, value in forward.items() if key[0] == "mix"} != {}


def test_the_batch_that_was_asked_for() -> None:
    class Counts(Known):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
            return F.cross_entropy(self(batch[0].repeat(batch_idx + 1, 1)), batch[1].repeat(batch_idx + 1))

    for number in (0, 2):
        audit = PrecisionAudit(batch=number)
        fit(Counts(), audit=audit)
        assert audit.records is not None
        product = next(row for row in audit.records.operations if row.operation == "addmm")
        assert dict(product.sizes) == {"rows": 8 * (number + 1), "inner": WIDTH, "columns": 32}


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`:UserWarning")
def test_a_batch_without_a_loss_is_passed_over() -> None:
    class Skips(Known):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
            return super().training_step(batch, batch_idx) if batch_idx else None

    audit = audited(Skips())
    assert audit.records is not None
    assert ("first", "mm") in runs(audit.records, "backward")


def test_a_batch_that_never_comes_is_said() -> None:
    audit = PrecisionAudit(batch=7)
    with pytest.warns(UserWarning, match=r"batch=7\) has seen nothing: the fit had 3 batches"):
        quiet_trainer(callbacks=[audit]).fit(Known(), loader(batches()))
    assert audit.records is None


def test_each_fit_is_audited() -> None:
    audit = PrecisionAudit()
    for precision in ("32-true", "bf16-true"):
        fit(Known(), audit=audit, precision=precision)
        assert audit.records is not None
        assert runs(audit.records)["first", "addmm"] == {"32-true": "fp32", "bf16-true": "bf16"}[precision]


def test_records_are_json() -> None:
    report = audited(Known(), precision="bf16-mixed").records
    assert report is not None
    read = json.loads(report.to_json())
    assert read == report.to_dict()
    product = next(row for row in read["operations"] if row["module"] == "middle" and row["kind"] == "matmul")
    assert product == {
        "module": "middle",
        "operation": "addmm",
        "kind": "matmul",
        "phase": "forward",
        "compute": "bf16",
        "inputs": ["bf16"] * 3,
        "outputs": ["bf16"],
        "autocast": "cpu bf16",
        "sizes": {"rows": 8, "inner": 32, "columns": 32},
        "device_type": "cpu",
        "calls": 1,
    }


def test_the_table_is_logged_once_and_the_findings_are_one_warning(caplog: Any) -> None:
    logged = caplog.at_level(logging.INFO)
    warned = pytest.warns(UserWarning, match="PrecisionAudit found:\n  1. 64-bit floating-point numbers: norm.")
    module = Known()
    module.norm = InFp64()
    with logged, warned as caught:
        quiet_trainer(callbacks=[PrecisionAudit()], precision="bf16-mixed").fit(module, loader(batches()))
    assert len([warning for warning in caught if "PrecisionAudit" in str(warning.message)]) == 1
    tables = [record.getMessage() for record in caplog.records if "Precision audit" in record.getMessage()]
    assert len(tables) == 1
    assert "softmax bf16" in " ".join(tables[0].split())
    assert "No problem" not in tables[0]


def test_the_table_says_if_there_is_no_problem(caplog: Any) -> None:
    with caplog.at_level(logging.INFO):
        fit(Known(), callbacks=[PrecisionAudit()], precision="bf16-mixed")
    assert [text for text in caplog.messages if text.endswith("\nNo problem found.")]


def test_the_table_shows_like_modules_as_one_row_and_fits_into_a_terminal(monkeypatch: Any) -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    report = audit_step(model, lambda: model(torch.ones(8, 8)).sum().backward())
    monkeypatch.setenv("COLUMNS", "120")
    assert audit_table(report).splitlines() == [
        "Precision audit",
        "* (4): Linear, autocast off",
        "    weights fp32; in fp32; runs addmm fp32; out fp32; gradient of out fp32; gradient of weights fp32",
    ]
    for columns in ("80", "40"):
        monkeypatch.setenv("COLUMNS", columns)
        narrow = audit_table(report)
        assert max(map(len, narrow.splitlines())) <= int(columns)
        assert "gradient of weights fp32" in " ".join(narrow.split())
    name = "a_long_name_of_a_part.and_of_the_first_of_all"
    assert f"{name}: Linear" in audit_table(replace(report, modules=(replace(report.modules[1], name=name),)))


def test_without_a_trainer_two_watches_may_follow_each_other_and_exceptions_pass() -> None:
    model = nn.Sequential(nn.Linear(8, 8), Mix())
    for _ in range(2):
        with PrecisionWatch(model) as watch:
            model(torch.ones(8, 8)).sum().backward()
        assert watch.report is not None
        assert runs(watch.report) == {("0", "addmm"): "fp32", ("1", "mm"): "fp32", ("1", "softmax"): "fp32"}
    with pytest.raises(RuntimeError, match="shapes"), PrecisionWatch(model):
        model(torch.ones(8, 3))
    assert what_is_left(model) == 0


def test_a_module_that_returns_its_own_weight_keeps_no_hook_on_it() -> None:
    model = Parts(lambda module: module.weight, weight=lambda: nn.Parameter(torch.ones(8)))
    report = audit_step(model, lambda: model().sum().backward())
    assert report.modules[0].output_gradients == report.modules[0].weight_gradients == ("fp32",)
    assert what_is_left(model) == 0


def test_beside_fused_optimizers_and_skipped_steps() -> None:
    """The batch that is watched overflows; the step is skipped and the audit stands."""
    audit = audited(
        Regression(fused_adamw, overflows=[0]),
        loader(regression_batches(3, batch_size=8)),
        plugins=[AutocastPrecision("16-mixed", scaler=scaler())],
    )
    assert audit.records is not None
    assert runs(audit.records)["", "mse_loss"] == "fp32"


@pytest.mark.parametrize("steps", [False, True], ids=["one step", "two steps"])
def test_what_runs_outside_of_modules_is_seen_after_a_backward_too(steps: bool) -> None:
    """Two losses in manual optimization; what comes after the last backward is left out."""
    model, x = nn.Linear(WIDTH, WIDTH), torch.ones(2, WIDTH)
    optimizer = torch.optim.SGD(model.parameters())

    def step() -> None:
        for _ in range(2):
            F.mse_loss(model(x), x).backward()
            if steps:
                optimizer.step()
        torch.softmax(x, -1)

    report = audit_step(model, step)
    assert [row.calls for row in report.operations if row.operation == "mse_loss"] == [2]
    assert not any(row.operation == "softmax" for row in report.operations)


def test_numbers_without_dimensions_may_come_of_fp64_tensors() -> None:
    model, x = nn.Identity(), torch.ones(4, dtype=torch.float64)
    report = audit_step(model, lambda: model(x).sum() * 2.0)
    assert [(row.operation, row.compute) for row in report.operations] == [("sum", "fp64")]


def test_a_watch_that_cannot_begin_leaves_nothing() -> None:
    class Refuses(nn.Module):
        def register_forward_pre_hook(self, *args: Any, **kwargs: Any) -> Any:
            raise RuntimeError("planted")

    model = nn.Sequential(nn.Linear(2, 2), Refuses())
    with pytest.raises(RuntimeError, match="planted"):
        PrecisionWatch(model).__enter__()
    assert [len(part._forward_hooks) + len(part._forward_pre_hooks) for part in model.modules()] == [0, 0, 0]
