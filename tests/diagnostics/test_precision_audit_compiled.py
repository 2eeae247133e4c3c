"""PrecisionAudit and torch.compile: nothing is compiled twice or otherwise, and what is not seen is said."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from audit_models import Known, audited, fit, runs, what_is_left
from small_models import Parts, weights
from torch import nn

from lightning_mp import AutocastPrecision, PrecisionPolicy
from lightning_mp.callbacks.precision_audit import PrecisionAudit
from lightning_mp.monitors.diagnostics.audit.table import audit_table

# Of torch.compile, when it looks at the gradients of its inputs.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")

WAYS = ["wrapped part", "compiled in place", "whole module"]


def compiled(way: str, backend: Any) -> tuple[pl.LightningModule, Any]:
    """The module as a user keeps it, and as the Trainer gets it."""
    module = Known()
    if way == "wrapped part":
        module.middle = torch.compile(nn.Sequential(module.middle, nn.LayerNorm(32)), backend=backend)
    elif way == "compiled in place":
        module.middle.compile(backend=backend)
    else:
        return module, torch.compile(module, backend=backend)
    return module, module


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Graphs that torch.compile hands to its backend, counted."""
    from torch._dynamo.backends.registry import lookup_backend

    torch.compiler.reset()
    counts = {"graphs": 0, "nodes": 0}

    def counting(name: str) -> Any:
        inner = lookup_backend(name)

        def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
            counts["graphs"] += 1
            counts["nodes"] += len(graph.graph.nodes)
            return inner(graph, inputs)

        return backend

    yield counts, counting
    torch.compiler.reset()


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("way", WAYS)
def test_the_same_graphs_are_compiled_and_the_same_bits_computed(way: str, backend: str, compilations: Any) -> None:
    counts, counting = compilations
    seen = []
    for audit in (None, PrecisionAudit()):
        torch.compiler.reset()
        counts.update(graphs=0, nodes=0)
        module, given = compiled(way, counting(backend))
        fit(given, audit=audit, plugins=[AutocastPrecision("bf16-mixed", policy=PrecisionPolicy.default())])
        seen.append((dict(counts), weights(module)))
        assert what_is_left(module) == 0
    (plain, ours), (watched, theirs) = seen
    assert plain == watched
    assert plain["graphs"] > 0
    assert all(torch.equal(one, two) for one, two in zip(ours, theirs, strict=True))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("way", WAYS)
def test_operations_in_compiled_code_are_seen_and_modules_that_are_not_are_named(way: str, backend: str) -> None:
    torch.compiler.reset()
    _, given = compiled(way, backend)
    audit = audited(given, precision="bf16-mixed")
    report = audit.records
    assert report is not None
    operations = [(row.operation, row.compute) for row in report.operations if row.phase == "forward"]
    products = sum(row.calls for row in report.operations if row.phase == "forward" and row.kind == "matmul")
    assert ("addmm", "bf16") in operations
    assert products == 5
    inside = {"wrapped part": ("middle.0", "middle.1"), "compiled in place": ("middle",)}.get(
        way, ("first", "norm", "middle", "last")
    )
    assert report.unseen == inside
    assert report.compiled
    table = " ".join(audit_table(report).split())
    unseen = "Not called where it could be seen (compiled, TorchScript, or another module uses their weights)"
    assert f"{unseen}: {inside[0]}" in table
    assert "Part of the step was compiled" in table
    if way == "wrapped part":  # the operations are put down to the part that was compiled
        assert runs(report)["middle", "addmm"] == "bf16"


def without_autocast(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", enabled=False):
        return module.linear(x.float())


@pytest.mark.parametrize(("rule", "kinds"), [("middle.0.linear", []), ("last", ["fp32_matmul"])])
def test_what_a_rule_has_in_compiled_code_is_no_finding(rule: str, kinds: list[str]) -> None:
    """The product is put down to the part that was compiled, about which no rule says anything."""
    torch.compiler.reset()
    module = Known()
    in_fp32 = Parts(without_autocast, linear=lambda: nn.Linear(32, 32))
    module.middle = torch.compile(nn.Sequential(in_fp32, nn.LayerNorm(32)), backend="eager")
    audit = audited(module, plugins=[AutocastPrecision("bf16-mixed", policy=PrecisionPolicy([(rule, "fp32")]))])
    assert [finding.kind for finding in audit.findings] == kinds
